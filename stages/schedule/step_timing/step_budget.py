"""The token budget of a step that mixes prefills and decodes.

Plain code behind the schedule stage. The duration of a step is the inter-token latency of the answers in it. So decodes
come first, and prefills get what is left of the target time. Larger steps compute prompts faster, since more of their
time goes to prompts. So the target is stretched while many prompts wait for their first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import sqrt

from .step_time_model import StepContents, StepTimeCosts, StepTimeModel

FIRST_TOKENS = 64  # prompt tokens per step while no costs are known
LEAST_TOKENS = 16  # prompt tokens in any such step, so that prompts always progress
MOST_SHARE = 2.0  # of the decode time, for prompts when decodes alone miss the target
LONG_S = 0.05  # upper bound of the target in that rule, so that a longer target never gives prompts less
PATIENCE_S = 0.5  # time to compute all known prompts above which the target is stretched in proportion
MOST_STRETCH = 3.0  # upper bound of the factor
MOST_INSPECTED = 100  # waiting prompts to inspect


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """The rest of a prompt that is to be computed."""

    num_tokens: int
    start: int  # tokens of the prompt before them

    def seconds(self, costs: StepTimeCosts) -> float:
        """The time to compute all of it."""
        num_pairs = self.num_tokens * (self.start + self.num_tokens / 2)
        return costs.prefill_token_s * self.num_tokens + costs.prefill_pair_s * num_pairs


class StepBudget:
    """Chooses the token budget of a step from a target time and a learned model of step times.

    Prompts never starve. If decodes alone take half of the target (or of `LONG_S`, if less), prompts get as much time
    as they; up to `MOST_SHARE` times as much as decodes approach the target. Prompts get at least `LEAST_TOKENS`. If
    computing all known prompts would take longer than `PATIENCE_S`, the target is stretched in proportion, at most by
    `MOST_STRETCH`.
    """

    def __init__(self, target_s: float, most: int, costs: StepTimeModel | None = None) -> None:
        """`costs` None: it keeps its own, which `note` is to be told."""
        self.target_s = target_s
        self.most = most  # tokens of a step
        self.last = most  # the last budget chosen
        self._costs = StepTimeModel() if costs is None else costs

    def note(self, contents: StepContents, seconds: float) -> None:
        """Records the duration of a step."""
        self._costs.note(contents, seconds)

    def expected_s(self, contents: StepContents) -> float:
        """Expected duration of a step, by the costs of the last choice; 0 before the first choice."""
        return self._costs.last_costs.seconds(contents)

    def choose(
        self, num_decode: int, num_context: int, demands: Sequence[PrefillDemand], waiting: Iterable[PrefillDemand] = ()
    ) -> int:
        """The token budget of a step with `num_decode` decodes over `num_context` tokens.

        `demands` are of the running prompts, in order; `waiting` are of waiting ones, which count only for the
        stretch. Time that running prompts leave is for prompts that start in the step.
        """
        num_prompt = self._prompt_tokens(num_decode, num_context, demands, waiting)
        self.last = min(self.most, num_decode + max(LEAST_TOKENS, num_prompt))
        return self.last

    def _prompt_tokens(
        self, num_decode: int, num_context: int, demands: Sequence[PrefillDemand], waiting: Iterable[PrefillDemand]
    ) -> int:
        if not self._costs.is_known:
            return FIRST_TOKENS
        costs, slowness = self._costs.read()
        decoding_s = costs.decoding_s(num_decode, num_context)
        target_s = self.target_s / slowness
        left_s = target_s * stretch(costs, chain(demands, waiting)) - decoding_s
        long_s = min(self.target_s, LONG_S) / slowness
        share = MOST_SHARE * min(1.0, decoding_s / long_s)  # 1 at half of long_s: as much time as is left of it
        left_s = max(left_s, share * decoding_s)
        return tokens_within(left_s, costs, demands, self.most)


def stretch(costs: StepTimeCosts, demands: Iterable[PrefillDemand]) -> float:
    """The factor by which the target is stretched for these prompts, 1 to `MOST_STRETCH`."""
    to_compute_s = 0.0
    for demand in islice(demands, MOST_INSPECTED):
        to_compute_s += demand.seconds(costs)
        if to_compute_s >= MOST_STRETCH * PATIENCE_S:
            return MOST_STRETCH
    return max(1.0, to_compute_s / PATIENCE_S)


def tokens_within(left_s: float, costs: StepTimeCosts, demands: Iterable[PrefillDemand], most: int) -> int:
    """Prompt tokens that take at most `left_s`, at most `most`.

    First of these prompts in order, then of a new one.
    """
    token_s, pair_s = costs.prefill_token_s, costs.prefill_pair_s
    total = 0
    for demand in chain(demands, (PrefillDemand(most, 0),)):
        wanted_s = demand.seconds(costs)
        if wanted_s > left_s:
            each_s = token_s + pair_s * demand.start  # plus pair_s / 2 for each token before it in the step
            return min(most, total + int(2 * left_s / (each_s + sqrt(each_s**2 + 2 * pair_s * left_s))))
        left_s -= wanted_s
        total += demand.num_tokens
        if total >= most:
            break
    return min(most, total)
