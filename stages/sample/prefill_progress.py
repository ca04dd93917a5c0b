"""Prompt progress for requests with `return_progress`: how many prompt tokens are computed.

Used on the event loop.
"""

from __future__ import annotations

import numpy as np

from ..messages import PromptProgress, Started, StepGrant


class PromptWatch:
    """The prompts whose progress is reported, by slot. Costs nothing while there are none."""

    def __init__(self) -> None:
        self._watched: dict[int, Started] = {}  # by slot: prompts that are not computed yet

    def take_note(self, grant: StepGrant) -> None:
        """Registers the sequences that start with a step. Called in the order of steps."""
        for started in grant.started:
            self._watched.pop(started.slot, None)
            if started.params.return_progress and len(started.token_ids) == started.num_prompt:
                self._watched[started.slot] = started

    def done(self, grant: StepGrant) -> list[PromptProgress]:
        """The progress that a step made on the registered prompts."""
        if not self._watched:
            return []
        found = []
        for row in np.flatnonzero(np.isin(grant.slots, list(self._watched))).tolist():
            started = self._watched[int(grant.slots[row])]
            num_processed = int(grant.starts[row] + grant.num_tokens[row])
            found.append(PromptProgress(started.sequence_id, num_processed))
            if num_processed >= started.num_prompt:
                del self._watched[started.slot]
        return found
