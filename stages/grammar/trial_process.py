"""The helper process in which grammars are tried.

The engine starts it as `python -P -m` and this module's name.
"""

from __future__ import annotations

from ...model.text.grammar_trial import Trials
from ...model.text.vocabulary import Vocabulary
from ...runtime.processes.helper_child import serve

CPU_S = 2.0
MEMORY_BYTES = 256 << 20

if __name__ == "__main__":
    serve(lambda opening: Trials(Vocabulary.from_bytes(opening)).answer, CPU_S, MEMORY_BYTES)
