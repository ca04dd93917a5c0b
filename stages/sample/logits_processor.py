"""Logits processors: code of a library's user, inside the sample stage, that changes the logits of its rows.

```python
class NeverTwice(LogitsProcessor):
    \"\"\"No token may follow itself.\"\"\"

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}  # slot -> token

    def start(self, started):
        self.newest[started.slot] = int(started.token_ids[-1])
        return started.params.extra_args.get("never_twice", False)

    def process(self, slots, logits):
        logits[range(len(slots)), [self.newest[slot] for slot in slots.tolist()]] = -torch.inf

    def note(self, slots, token_ids):
        self.newest.update(zip(slots.tolist(), token_ids.tolist()))

engine = Engine(logits_processor=NeverTwice())
```
"""

from __future__ import annotations

from typing import Any

from ..messages import Indices, Started


class LogitsProcessor:
    """Called on the device thread, step by step in order. Rows are known by their slots, as all state of a step is.

    What it does to a row should depend on that row alone: else what a sequence says depends on its company. If it
    raises, the step is void and tried again in smaller ones, until the one that it raises for is alone and fails.
    """

    def start(self, started: Started) -> bool:
        """A sequence takes `started.slot`, new or back from a preemption with what it had generated; whoever was there
        is gone. Returns whether its logits are to be processed; `started.params.extra_args` is its caller's word."""
        return True

    def process(self, slots: Indices, logits: Any) -> None:
        """Changes `logits` [n, V], a float32 tensor on the device, in place: row i is of `slots[i]`, [n]. After
        penalties, bias and min_tokens, before temperature and truncation. A token at -inf is not chosen. Where the
        model itself needs no torch, this is what imports it."""

    def note(self, slots: Indices, token_ids: Indices) -> None:
        """Each of `slots` [n] got a token, [n] too: rows that are processed, and maybe no others."""
