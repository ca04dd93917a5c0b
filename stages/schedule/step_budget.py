"""How many tokens the next step may hold, where prompts are computed beside answers. Plain code behind schedule.

While a step runs, every answer in it waits: a step's time is the gap between two tokens. So decoding rows come first,
and prompts get what is left of the target. Large steps compute prompts faster, as more of their time is the prompts':
so the target is stretched where many wait, who have no token at all yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import sqrt

from .step_time_model import Costs, StepContents, StepCosts

FIRST_TOKENS = 64  # of prompts, while nothing is known
LEAST_TOKENS = 16  # of prompts, in any step that has room for one: they make progress whatever the target
MOST_SHARE = 2.0  # of the time of decoding rows that miss the target; 2, as rows that take half of it leave 1
LONG_S = 0.05  # a longer target counts as this one there: it is to leave prompts no less than a shorter one
PATIENCE_S = 0.5  # that prompts may be to compute, all of them, before the target is stretched, in proportion
MOST_STRETCH = 3.0  # times the target
MOST_LOOKED_AT = 100  # prompts, of those that wait


@dataclass(frozen=True, slots=True)
class Wish:
    """What is left of a prompt."""

    num_tokens: int
    start: int  # tokens before them

    def seconds(self, costs: Costs) -> float:
        """What all of it takes."""
        num_pairs = self.num_tokens * (self.start + self.num_tokens / 2)
        return costs.prefill_token_s * self.num_tokens + costs.prefill_pair_s * num_pairs


class StepSize:
    """Chooses a step's tokens by a target for its time, which it learns to foresee.

    Prompts never starve: where decoding rows alone take half of the target (of `LONG_S`, where that is less), prompts
    get as much time as these, and up to `MOST_SHARE` times that the nearer the rows come to missing it by themselves;
    and at least `LEAST_TOKENS`. When it would take longer than `PATIENCE_S` to compute all that is known of, a step may
    take as many times its target, up to `MOST_STRETCH`.
    """

    def __init__(self, target_s: float, most: int) -> None:
        self.target_s = target_s
        self.most = most  # tokens of a step
        self.last = most  # chosen
        self._costs = StepCosts()

    def note(self, contents: StepContents, seconds: float) -> None:
        """A step took so long."""
        self._costs.note(contents, seconds)

    def expected_s(self, contents: StepContents) -> float:
        """What a step with these contents takes as a rule, by what the last choice was made by; 0 before the first."""
        return self._costs.last_told.seconds(contents)

    def choose(self, num_decode: int, num_context: int, wishes: Sequence[Wish], in_line: Iterable[Wish] = ()) -> int:
        """Tokens of a step with so many decoding rows, which attend to `num_context` tokens, and of these prompts as
        much as there is time for, in order; what they leave of it is for others, perhaps some of those in line."""
        num_prompt = self._prompt_tokens(num_decode, num_context, wishes, in_line)
        self.last = min(self.most, num_decode + max(LEAST_TOKENS, num_prompt))
        return self.last

    def _prompt_tokens(self, num_decode: int, num_context: int, wishes: Sequence[Wish], in_line: Iterable[Wish]) -> int:
        if not self._costs.is_known:
            return FIRST_TOKENS
        costs, slowness = self._costs.read()
        decoding_s = costs.decoding_s(num_decode, num_context)
        target_s = self.target_s / slowness
        left_s = target_s * stretch(costs, chain(wishes, in_line)) - decoding_s
        long_s = min(self.target_s, LONG_S) / slowness
        share = MOST_SHARE * min(1.0, decoding_s / long_s)  # at half of that 1: as much as would be left of it
        left_s = max(left_s, share * decoding_s)
        return tokens_within(left_s, costs, wishes, self.most)


def stretch(costs: Costs, wishes: Iterable[Wish]) -> float:
    """How many times its target a step may take while there are these prompts to compute."""
    to_compute_s = 0.0
    for wish in islice(wishes, MOST_LOOKED_AT):
        to_compute_s += wish.seconds(costs)
        if to_compute_s >= MOST_STRETCH * PATIENCE_S:
            return MOST_STRETCH
    return max(1.0, to_compute_s / PATIENCE_S)


def tokens_within(left_s: float, costs: Costs, wishes: Iterable[Wish], most: int) -> int:
    """Tokens of prompts that take no longer than `left_s`, at most `most`: of these, then of one that begins."""
    token_s, pair_s = costs.prefill_token_s, costs.prefill_pair_s
    total = 0
    for wish in chain(wishes, (Wish(most, 0),)):
        wanted_s = wish.seconds(costs)
        if wanted_s > left_s:
            each_s = token_s + pair_s * wish.start  # and pair_s / 2 more for each token before it in the step
            return min(most, total + int(2 * left_s / (each_s + sqrt(each_s**2 + 2 * pair_s * left_s))))
        left_s -= wanted_s
        total += wish.num_tokens
        if total >= most:
            break
    return min(most, total)
