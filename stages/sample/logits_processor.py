"""Logits processors: user code that changes the logits of its rows, inside the sample stage.

```python
class NeverTwice(LogitsProcessor):
    \"\"\"No token may follow itself.\"\"\"

    always = False  # only for requests that name it, "nevertwice"

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}  # slot -> token

    def start(self, started):
        self.newest[started.slot] = int(started.token_ids[-1])
        return True

    def process(self, slots, logits):
        logits[range(len(slots)), [self.newest[slot] for slot in slots.tolist()]] = -torch.inf

    def note(self, slots, token_ids):
        self.newest.update(zip(slots.tolist(), token_ids.tolist()))

engine = Engine(logits_processor=NeverTwice())  # or serve --logits-processor my_package.processors:NeverTwice
params = SamplingParams(extra_args={"nevertwice": {}})
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..messages import Indices, Started


class LogitsProcessor:
    """The base class of a logits processor.

    Every method runs on the device thread, in the order of steps. Rows are identified by their slots. The change to a
    row must depend on that row alone. Otherwise an answer depends on the other sequences of its batch. If a method
    raises, the step is void and is retried in smaller steps, until the sequence that it raises for is alone and fails.
    """

    # True: `start` is called for every sequence, and none has drafts. False: only for requests that name the processor
    # in `extra_args`; the others keep their speed
    always: ClassVar[bool] = True
    _name = ""

    @property
    def name(self) -> str:
        """The name by which requests ask for it: that of the settings, or the class's in lower case."""
        return self._name or type(self).__name__.lower()

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    def validate(self, arguments: Mapping[str, Any]) -> None:
        """Checks what a request of the HTTP API gives: raise ValueError with what would be right.

        Called before the request is admitted, on any thread, in the first process of several. They reach `start` as
        `started.params.extra_args[self.name]`. Override this to take any.
        """
        if arguments:
            raise ValueError(f"takes no arguments, and got {', '.join(map(str, arguments))}")

    def start(self, started: Started) -> bool:
        """A sequence takes `started.slot`: discard the slot's old state.

        Returns whether to process its logits. The sequence is new, or resumes after a preemption with the tokens it had
        generated. The request's own parameters are in `started.params.extra_args`.
        """
        return True

    def process(self, slots: Indices, logits: Any) -> None:
        """Changes `logits` [n, V] in place. Row i belongs to `slots[i]`, [n].

        `logits` is a float32 tensor on the device. Runs after penalties, bias and min_tokens, and before temperature
        and truncation. A token at -inf is not chosen. Imports torch, even for a model that runs without it.
        """

    def note(self, slots: Indices, token_ids: Indices) -> None:
        """Slot `slots[i]` got token `token_ids[i]`, [n] both. Called for processed rows only."""
