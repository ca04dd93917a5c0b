"""Draft acceptance: decides which tokens of a step with drafts count.

A *run* is a row's own token and its drafts. Each of them yields logits, from which one token is chosen independently.
The tokens of a run count up to and including the first that differs from the next draft, or that ends the answer.
Later tokens were computed for a text that does not exist. So each answer is the same as without drafts.

An asynchronous device decides so itself, by a kernel behind the choice: `note_tokens` in
`kernels/layout/step_state.py`. The host then only drops what follows an end that the device does not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..messages import Bools, Indices, StepGrant

NO_DRAFT = -1


@dataclass(frozen=True, slots=True, eq=False)
class DraftRuns:
    """One entry per row of logits, [L], in the order of the grant; within a run in text order."""

    offsets: Indices  # of the row in its run; 0 starts a run
    drafts: Indices  # the token the row must choose for the next row of its run to count; NO_DRAFT: last of its run

    @classmethod
    def of(cls, grant: StepGrant) -> DraftRuns | None:
        """The runs of a step; None if it has no drafts, so that each row is a run of its own."""
        if grant.drafts is None:
            return None
        sizes = 1 + grant.drafts.counts[grant.is_sampled].astype(np.intp)
        ends = np.cumsum(sizes)
        offsets = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
        drafts = np.full(len(offsets), NO_DRAFT, np.intp)
        is_last = np.zeros(len(offsets), np.bool_)
        is_last[ends - 1] = True
        drafts[~is_last] = grant.drafts.token_ids  # each row with drafts is sampled
        return cls(offsets, drafts)

    def take(self, rows: Indices) -> DraftRuns:
        """A subset of the rows, which must be whole runs."""
        return DraftRuns(self.offsets[rows], self.drafts[rows])

    def that_count(self, token_ids: Indices) -> Indices:
        """The rows that count, given the chosen `token_ids` [L]: those after accepted drafts only."""
        is_wrong = self.drafts != token_ids
        return self._up_to(is_wrong)

    def up_to_the_end(self, rows: Indices, finishes: NDArray[np.int8]) -> Indices:
        """Indices into `rows` [n], which count, up to the first of each run that ends its answer.

        `finishes` [n] are the rows' finish reasons.
        """
        return self.take(rows)._up_to(finishes != 0)

    def _up_to(self, is_last: Bools) -> Indices:
        """The rows of each run up to and including the first with `is_last`."""
        kept, goes_on = [], True
        for row, (offset, ends) in enumerate(zip(self.offsets.tolist(), is_last.tolist(), strict=True)):
            goes_on = goes_on or offset == 0
            if goes_on:
                kept.append(row)
            goes_on = goes_on and not ends
        return np.array(kept, np.intp)


def last_of_each(slots: Indices) -> Indices:
    """The index of the last row of each slot. Rows of one slot must be adjacent."""
    return np.append(slots[1:] != slots[:-1], True).nonzero()[0] if len(slots) else np.zeros(0, np.intp)
