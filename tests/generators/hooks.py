"""Loaded by Schemathesis: keeps bodies that are valid by the document to the relations that no schema can say. Bodies
that are meant to be wrong stay as they are, and every check is on. Counts the requests of each operation.

Random cases are drawn, and that is all: left to itself, Hypothesis would spend more than half of its time on steering
towards answers of 200, on making small what it has steered to, and on choosing what to keep in a database.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from hypothesis import Phase
from schemathesis.generation.meta import TestPhase

from tests.generators.relations import RELATIONS, flat
from tests.generators.tamed import tamed

CONTEXT = int(os.environ["MILLRACE_TEST_CONTEXT"])
COUNTS = Path(os.environ["MILLRACE_TEST_COUNTS"])

hypothesis.settings.register_profile("drawn", phases=set(Phase) - {Phase.target, Phase.explain}, database=None)
hypothesis.settings.load_profile("drawn")  # what a profile says goes before what Schemathesis would say
num_requests: Counter[str] = Counter()  # by operation
num_bounds: Counter[str] = Counter()  # that were offered

# Operations that read the same body in the same way share its bounds in CI: (which, of how many). The largest bodies
# have a quarter of theirs tried, chat and completion, which share most of their fields, other quarters; what renders a
# prompt tries half as many as the operation beside it, and so does what counts tokens.
LARGEST = ("createChatCompletion", "createCompletion", "createResponse", "createMessage", "tokenize")
SHARES = {
    **dict.fromkeys(LARGEST, (1, 4)),
    "createCompletion": (2, 4),
    **dict.fromkeys(("renderChatCompletion", "renderCompletion", "countMessageTokens"), (0, 8)),
    **{"generate": (0, 8), "inferenceGenerate": (4, 8), "generateStream": (2, 8), "createEmbeddings": (1, 2)},
    **{"score": (0, 4), "scoreV1": (2, 4), "rerank": (0, 6), "rerankV1": (2, 6), "rerankV2": (4, 6)},
    **{"ollamaChat": (0, 16), "ollamaPull": (0, 4), "ollamaShow": (1, 4)},
    **dict.fromkeys(("ollamaGenerate", "ollamaEmbed", "ollamaEmbeddings"), (0, 8)),
}
IS_SHARED = bool(os.environ.get("MILLRACE_TEST_SHARES"))
atexit.register(lambda: COUNTS.write_text(json.dumps(num_requests)))


@schemathesis.hook
def after_call(_context: Any, case: Any, _response: Any) -> None:
    """An answer to a case; what checks ask besides is not counted."""
    num_requests[case.operation.label] += 1


@schemathesis.hook
def filter_case(_context: Any, case: Any) -> bool:
    """Leaves out what breaks a relation, and a bound that another operation tries."""
    if IS_SHARED and is_of_another(case):
        return False
    if not is_valid(case):
        return True
    body = flat(tamed(case.body))
    return all(rel.holds(body, CONTEXT) for rel in RELATIONS)


@schemathesis.hook
def map_case(_context: Any, case: Any) -> Any:
    """Puts in the place of what only a compiler could judge what one takes."""
    if is_valid(case):
        case.body = tamed(case.body)
    return case


def is_of_another(case: Any) -> bool:
    """Whether it is a bound of a shared body, and not of this operation's share."""
    name = case.operation.definition.raw.get("operationId")
    if name not in SHARES or case.meta is None or case.meta.phase.name is not TestPhase.COVERAGE:
        return False
    which, of = SHARES[name]
    num_bounds[name] += 1
    return num_bounds[name] % of != which


def is_valid(case: Any) -> bool:
    """By the schema."""
    return isinstance(case.body, dict) and case.meta is not None and case.meta.generation.mode.is_positive
