"""The rows of logits of a step with drafts: which belong together, and how many tokens of each run count.

A *run* is a row's own token and its drafts: the logits behind each of them choose a token, as if there were no others.
Those count up to the first that is not the draft it was to be, and to the first that ends the answer: what stands
behind was computed for a text that is not there. So each answer is what it would be token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..messages import Bools, Indices, StepGrant

NO_DRAFT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """One entry a row of logits, [L]; in the order of the grant, and within a run in that of the text."""

    offsets: Indices  # of the row in its run; 0 begins one
    drafts: Indices  # what the row's token must be for the next one of its run to count; NO_DRAFT: it is the last

    @classmethod
    def of(cls, grant: StepGrant) -> Runs | None:
        """None while nobody drafts: each row is by itself."""
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

    def take(self, rows: Indices) -> Runs:
        """Whole runs of them."""
        return Runs(self.offsets[rows], self.drafts[rows])

    def that_count(self, token_ids: Indices) -> Indices:
        """The rows whose tokens [L] stand behind drafts that turned out right."""
        is_wrong = self.drafts != token_ids
        return self._up_to(is_wrong)

    def up_to_the_end(self, rows: Indices, finishes: NDArray[np.int8]) -> Indices:
        """Of the rows that count, [n], those that come no later than one that ends its answer, as `finishes` [n] say:
        places in `rows`."""
        return self.take(rows)._up_to(finishes != 0)

    def _up_to(self, is_last: Bools) -> Indices:
        """The rows of each run up to the first that is its last, that one included."""
        kept, goes_on = [], True
        for row, (offset, ends) in enumerate(zip(self.offsets.tolist(), is_last.tolist(), strict=True)):
            goes_on = goes_on or offset == 0
            if goes_on:
                kept.append(row)
            goes_on = goes_on and not ends
        return np.array(kept, np.intp)


def last_of_each(slots: Indices) -> Indices:
    """The last row of each slot, where rows of one follow each other."""
    return np.append(slots[1:] != slots[:-1], True).nonzero()[0] if len(slots) else np.zeros(0, np.intp)
