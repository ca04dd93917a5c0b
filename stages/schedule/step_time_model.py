"""How long a step takes, by what is in it, as the steps of late have shown. Plain code behind the schedule stage.

Reads no clock: each step's time comes with its outcome, so a recording brings the same times again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..messages import Indices, Ints

Numbers = NDArray[np.float64]

NUM_KEPT = 64  # steps of each kind that costs are fitted to
NUM_LATE = 32  # of any kind, that say how slow the machine is now
SLOW_SHARE = 0.9  # of those, how many a step is to be no slower than
FIT_EVERY = 4  # steps that computed prompts, once there are some: a fit is 150 us
ROUNDS = 3  # of a fit: each takes what is far off in the one before for less
FAR_OFF = 1.5  # times as long as was expected, or as short
SHARING = 1e-12  # of a column's weight, that keeps it from being traded for another's
SLOWNESS = (0.25, 8.0)  # bounds of what is believed


@dataclass(frozen=True, slots=True)
class StepContents:
    """What a step has to do, as far as it costs time."""

    num_prefill: int = 0  # tokens of prompts
    num_pairs: float = 0.0  # of such a token and one before it, or itself
    num_decode: int = 0  # rows of one token
    num_context: int = 0  # tokens that those attend to
    num_copied: int = 0  # blocks
    num_started: int = 0  # sequences that begin, or come back

    @classmethod
    def of(
        cls,
        starts: Ints | Indices,
        num_tokens: Ints,
        num_copied: int = 0,
        num_started: int = 0,
        num_drafts: int = 0,
    ) -> StepContents:
        """Of rows that compute `num_tokens` tokens each from `starts` on, [R] both, and drafts besides, each of which
        counts as a row."""
        is_prefill = num_tokens > 1
        tokens, before = num_tokens[is_prefill].astype(np.float64), starts[is_prefill]
        decoding = starts[~is_prefill]
        return cls(
            int(tokens.sum()),
            float((tokens * (before + (tokens + 1) / 2)).sum()),
            len(decoding) + num_drafts,
            int(decoding.sum()) + len(decoding),
            num_copied,
            num_started,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step. All are at least 0."""

    step_s: float = 0.0  # of any
    prefill_token_s: float = 0.0  # more for each of its contents, as in `StepContents`
    prefill_pair_s: float = 0.0
    decode_row_s: float = 0.0
    decode_context_s: float = 0.0

    def decoding_s(self, num_rows: int, num_context: int) -> float:
        """A step of rows that decode, and nothing else."""
        return self.step_s + self.decode_row_s * num_rows + self.decode_context_s * num_context

    def seconds(self, contents: StepContents) -> float:
        """A step with these contents."""
        prefill_s = self.prefill_token_s * contents.num_prefill + self.prefill_pair_s * contents.num_pairs
        return self.decoding_s(contents.num_decode, contents.num_context) + prefill_s


class StepCosts:
    """Costs fitted to the last steps that computed prompts and the last of any kind, so that neither kind is forgotten
    while there is only the other.

    What a neighbour on the machine does is in `slowness`, not in the costs: how much longer than fitted the slow ones
    among the last steps took. It rises within a few slow steps, and one that is late by itself does not move it.
    """

    def __init__(self) -> None:
        self.num_noted = 0
        self._num_prefills = 0
        self._late = np.zeros((NUM_KEPT, 6))  # of any kind: what `_columns` makes of it, and seconds
        self._prefills = np.zeros((NUM_KEPT, 6))
        self._num_fitted = 0  # of the prefills there were, when costs were last fitted
        self._found = np.zeros(5)
        self.last_told = Costs()  # by `read`
        self._read_at = 0  # notes, when the slowness was last judged
        self._slowness = 1.0

    def note(self, contents: StepContents, seconds: float) -> None:
        """A step with these contents took so long."""
        row = (
            1.0,
            contents.num_prefill,
            contents.num_pairs,
            contents.num_decode,
            contents.num_context,
            seconds,
        )
        self._late[self.num_noted % NUM_KEPT] = row
        self.num_noted += 1
        if contents.num_prefill:
            self._prefills[self._num_prefills % NUM_KEPT] = row
            self._num_prefills += 1

    @property
    def is_known(self) -> bool:
        """Whether a step that computes a prompt has been seen."""
        return self._num_prefills > 0

    def read(self) -> tuple[Costs, float]:
        """The costs, and how many times as long a step of now may well take."""
        num_new = self._num_prefills - self._num_fitted
        if num_new >= FIT_EVERY or num_new > 0 and self._num_prefills <= NUM_LATE:
            self._num_fitted = self._num_prefills
            rows = np.concatenate([self._late[: self.num_noted], self._prefills[: self._num_prefills]])
            self._found = fit_robustly(rows[:, :5], rows[:, 5])
            self.last_told = Costs(*self._found.tolist())
        if self._read_at != self.num_noted:
            self._read_at = self.num_noted
            self._slowness = self._judge()
        return self.last_told, self._slowness

    def _judge(self) -> float:
        last = np.arange(max(0, self.num_noted - NUM_LATE), self.num_noted) % NUM_KEPT
        expected = np.maximum(self._late[last, :5] @ self._found, 1e-9)
        ratios = np.sort(self._late[last, 5] / expected)
        return float(np.clip(ratios[int(SLOW_SHARE * len(ratios))], *SLOWNESS))


def fit_robustly(columns: Numbers, seconds: Numbers) -> Numbers:
    """Coefficients [C] of at least 0 with which `columns` [N, C] come to about `seconds` [N], each row weighed by its
    own size. A row that is far off counts as if it were `FAR_OFF`, once the rest has shown what to expect."""
    expected = np.maximum(seconds, np.median(seconds) / 4)
    wanted = seconds
    found = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        found = least_squares(columns / expected[:, None], wanted / expected)
        expected = np.maximum(columns @ found, 1e-9)
        usual = expected * np.median(seconds / expected)
        wanted = np.clip(seconds, usual / FAR_OFF, usual * FAR_OFF)
    return found


def least_squares(columns: Numbers, wanted: Numbers) -> Numbers:
    """Coefficients of at least 0: the one that would fall furthest below is left out, until none does. Where columns
    can stand for each other, they share."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    scaled = columns / scale
    squares, products = scaled.T @ scaled + SHARING * len(wanted) * np.eye(len(scale)), scaled.T @ wanted
    kept = np.flatnonzero(columns.any(axis=0))
    found = np.zeros(len(scale))
    while len(kept):
        some = np.linalg.solve(squares[np.ix_(kept, kept)], products[kept])
        if some.min() >= 0:
            found[kept] = some / scale[kept]
            break
        kept = np.delete(kept, some.argmin())
    return found
