"""The score of an engine for a request, in seconds: its own time, and the time it takes from others.

    first token   prompts before it, and what is left of its own after the blocks found in the cache
    answer        tokens expected, each the time of a step with one row more
    harm          what each row there loses by that row, over the same tokens
    loss          what a full cache loses to a copy of the part that another engine has in its own
    room          time until enough memory is free

All engines are asked the same, so what is left out of all of them, such as the sampling, changes no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..schedule.step_timing.step_time_model import StepTimeCosts
from .engine_load import EngineView

# What a second of computing costs others if it copies what another engine has, into a cache that is full: prompts that
# would have found what is pushed out are computed again, push out others in turn, and take time from requests that
# arrive meanwhile. The figures behind it are in `deploy/docs/replay.md`.
LOST = 5.0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a router knows of a request."""

    num_prompt: int  # tokens
    num_answer: float  # tokens expected
    num_choices: int = 1
    sticky_key: bytes = b""  # requests with the same one are sent to the same engine, unless another is much better


def prompt_s(costs: StepTimeCosts, num_tokens: int, num_cached: int, token_budget: int) -> float:
    """Seconds to compute a prompt of which `num_cached` tokens are in the cache."""
    return costs.prompt_s(*_left(num_tokens, num_cached), token_budget)


def _left(num_tokens: int, num_cached: int) -> tuple[int, float]:
    """(tokens, pairs of a token and one at or before it) to compute of a prompt."""
    num_left = max(1, num_tokens - num_cached)
    return num_left, num_left * (num_tokens - num_left + (num_left + 1) / 2)


def scores_s(
    views: Iterable[EngineView], facts: RequestFacts, cached: Mapping[int, int], lost: float = LOST
) -> dict[int, float]:
    """The score of each engine, of which `cached` has the tokens of the prompt that it has. The least is the best.

    lost: seconds that each costs others that computes a copy in a full cache; 0.0: only the time is asked.

    Of an engine that has not reported, only the prompts sent to it are known. Takes about 0.7 us an engine.
    """
    num_prompt, num_answer, num_choices = facts.num_prompt, facts.num_answer, facts.num_choices
    num_tokens = num_prompt + num_answer * num_choices
    num_left, num_pairs, last_cached = *_left(num_prompt, 0), 0
    most_cached = max(cached.values(), default=0)
    scores: dict[int, float] = {}
    for view in views:
        standing = view.standing()
        if standing is None:
            scores[view.engine] = view.prompt_s_since + view.rows_since
            continue
        first_s, before_s, num_rows, slots_short, missing, running, free, token_budget, costs = standing
        num_cached = cached.get(view.engine, 0)
        if num_cached != last_cached:
            num_left, num_pairs = _left(num_prompt, num_cached)
            last_cached = num_cached
        more_s = costs.decode_row_s * num_choices + costs.decode_context_s * num_prompt
        room = slots_short  # time until there is room, in answers: as many as run end in the time of one
        if running and (num_missing := missing + num_tokens - num_cached) > 0:
            room = max(room, num_missing / running)
        computing_s = costs.prompt_s(num_left, num_pairs, token_budget)
        if most_cached > num_cached and (pushed_out := num_tokens - num_cached - free) > 0:
            num_copied = most_cached - num_cached
            computing_s *= 1 + lost * (num_copied if num_copied < pushed_out else pushed_out) / num_left
        scores[view.engine] = (
            first_s + computing_s + num_answer * (before_s + more_s + more_s * num_rows + before_s * room)
        )
    return scores
