"""A linear model of step times, fitted to recent steps.

Plain code behind the schedule stage. Reads no clock: each step's time comes with its outcome, so a replay sees the same
times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...array_checks import num_true, total
from ...messages import Indices, Ints

Numbers = NDArray[np.float64]

NUM_KEPT = 64  # steps of each kind to which costs are fitted
NUM_RECENT = 32  # last steps of any kind, from which the current slowness is estimated
SLOW_SHARE = 0.9  # quantile of their slowness
FIT_EVERY = 4  # steps with prefills between two fits, later on; a fit takes 150 us
ROUNDS = 3  # of a fit; each clips the outliers of the previous one
FAR_OFF = 1.5  # factor from the expected time beyond which a step is clipped
RIDGE = 1e-12  # ridge, relative; makes columns that could replace each other share
SLOWNESS = (0.25, 8.0)  # bounds of the estimate


class StepContents(NamedTuple):
    """The contents of a step that determine its time."""

    num_prefill: int = 0  # tokens of prompts
    num_pairs: float = 0.0  # pairs of such a token and a token at or before its position
    num_decode: int = 0  # rows of one token
    num_context: int = 0  # tokens to which those rows attend
    num_copied: int = 0  # blocks copied
    num_started: int = 0  # sequences that start or resume

    @classmethod
    def of(
        cls,
        starts: Ints | Indices,
        num_tokens: Ints,
        num_copied: int = 0,
        num_started: int = 0,
        num_drafts: int = 0,
    ) -> StepContents:
        """The contents of a step whose rows compute `num_tokens` tokens from `starts`, [R] each.

        Each draft counts as one more row.
        """
        is_prefill = num_tokens > 1
        num_prefill, num_pairs, num_before, num_decode = 0, 0.0, 0, len(starts)
        if num_rows := num_true(is_prefill):
            tokens, before = num_tokens[is_prefill].astype(np.float64), starts[is_prefill]
            num_prefill, num_before = int(tokens.sum()), total(before)
            num_pairs = float((tokens * (before + (tokens + 1) / 2)).sum())
            num_decode -= num_rows
        num_context = total(starts) - num_before + num_decode
        return cls(num_prefill, num_pairs, num_decode + num_drafts, num_context, num_copied, num_started)


@dataclass(frozen=True, slots=True)
class StepTimeCosts:
    """Coefficients of the step time, in seconds. All are at least 0."""

    step_s: float = 0.0  # of any step
    prefill_token_s: float = 0.0  # this and the next: per unit of `StepContents`
    prefill_pair_s: float = 0.0
    decode_row_s: float = 0.0
    decode_context_s: float = 0.0

    def decoding_s(self, num_rows: int, num_context: int) -> float:
        """The time of a step with decodes only."""
        return self.step_s + self.decode_row_s * num_rows + self.decode_context_s * num_context

    def prompt_s(self, num_tokens: int, num_pairs: float, token_budget: int) -> float:
        """The time to compute prompt tokens, with as many pairs, in as few steps as they fit into."""
        num_steps = -(-num_tokens // token_budget)
        return self.prefill_token_s * num_tokens + self.prefill_pair_s * num_pairs + self.step_s * num_steps

    def seconds(self, contents: StepContents) -> float:
        """The time of a step with these contents."""
        prefill_s = self.prefill_token_s * contents.num_prefill + self.prefill_pair_s * contents.num_pairs
        return self.decoding_s(contents.num_decode, contents.num_context) + prefill_s


class StepTimeModel:
    """Costs fitted to recent steps.

    The last steps with prefills and the last steps of any kind are kept separately, so that neither kind is forgotten.
    Other load on the machine shows in `slowness`, not in the costs: a high quantile of measured over fitted time among
    the last steps. It rises within a few slow steps; a single slow step does not change it.
    """

    def __init__(self) -> None:
        self.num_noted = 0
        self._num_prefills = 0
        self._recent = np.zeros((NUM_KEPT, 6))  # last steps of any kind: the five columns of the fit, and seconds
        self._prefills = np.zeros((NUM_KEPT, 6))
        self._num_fitted = 0  # `_num_prefills` at the last fit
        self._found = np.zeros(5)
        self.last_costs = StepTimeCosts()  # the last result of `read`
        self._read_at = 0  # `num_noted` when the slowness was last estimated
        self._slowness = 1.0

    def note(self, contents: StepContents, seconds: float) -> None:
        """Records the duration of a step."""
        row = (
            1.0,
            contents.num_prefill,
            contents.num_pairs,
            contents.num_decode,
            contents.num_context,
            seconds,
        )
        self._recent[self.num_noted % NUM_KEPT] = row
        self.num_noted += 1
        if contents.num_prefill:
            self._prefills[self._num_prefills % NUM_KEPT] = row
            self._num_prefills += 1

    @property
    def is_known(self) -> bool:
        """Whether a step with a prefill has been recorded."""
        return self._num_prefills > 0

    def read(self) -> tuple[StepTimeCosts, float]:
        """The costs, and the current slowness: the factor by which steps may now take longer."""
        num_new = self._num_prefills - self._num_fitted
        if num_new >= FIT_EVERY or num_new > 0 and self._num_prefills <= NUM_RECENT:
            self._num_fitted = self._num_prefills
            rows = np.concatenate([self._recent[: self.num_noted], self._prefills[: self._num_prefills]])
            self._found = fit_robustly(rows[:, :5], rows[:, 5])
            self.last_costs = StepTimeCosts(*self._found.tolist())
        if self._read_at != self.num_noted:
            self._read_at = self.num_noted
            self._slowness = self._judge()
        return self.last_costs, self._slowness

    def _judge(self) -> float:
        last = np.arange(max(0, self.num_noted - NUM_RECENT), self.num_noted) % NUM_KEPT
        expected = np.maximum(self._recent[last, :5] @ self._found, 1e-9)
        ratios = np.sort(self._recent[last, 5] / expected)
        return float(np.clip(ratios[int(SLOW_SHARE * len(ratios))], *SLOWNESS))


def fit_robustly(columns: Numbers, seconds: Numbers) -> Numbers:
    """Fits coefficients [C] >= 0 with `columns` [N, C] @ coefficients = about `seconds` [N].

    Errors are relative to the expected size of each row. After the first round, outliers are clipped to `FAR_OFF`.
    """
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
    """Least squares with coefficients >= 0.

    Drops the most negative coefficient until none is negative. Collinear columns share their coefficient.
    """
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    scaled = columns / scale
    squares, products = scaled.T @ scaled + RIDGE * len(wanted) * np.eye(len(scale)), scaled.T @ wanted
    kept = np.flatnonzero(columns.any(axis=0))
    found = np.zeros(len(scale))
    while len(kept):
        some = np.linalg.solve(squares[np.ix_(kept, kept)], products[kept])
        if some.min() >= 0:
            found[kept] = some / scale[kept]
            break
        kept = np.delete(kept, some.argmin())
    return found
