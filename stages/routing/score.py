"""The score of an engine for a request, in seconds: its own time, and the time it takes from others.

    first token   prompts before it, and what is left of its own after the blocks found in the cache
    answer        tokens expected, each the time of a step with one row more
    harm          what each row there loses by that row, over the same tokens
    room          time until enough memory is free

All engines are asked the same, so what is left out of all of them, such as the sampling, changes no choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule.step_timing.step_time_model import StepTimeCosts
from .engine_load import EngineLoad, EngineView


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a router knows of a request."""

    num_prompt: int  # tokens
    num_answer: float  # tokens expected
    num_choices: int = 1
    sticky_key: bytes = b""  # requests with the same one are sent to the same engine, unless another is much better


def prompt_s(costs: StepTimeCosts, num_tokens: int, num_cached: int, token_budget: int) -> float:
    """Seconds to compute a prompt of which `num_cached` tokens are in the cache."""
    num_left = max(1, num_tokens - num_cached)
    num_pairs = num_left * (num_tokens - num_left + (num_left + 1) / 2)
    return costs.prompt_s(num_left, num_pairs, token_budget)


def score_s(view: EngineView, facts: RequestFacts, num_cached: int) -> float:
    """The score of an engine that has the first `num_cached` tokens of the prompt. The least is the best.

    Of an engine that has not reported, only the prompts sent to it are known.
    """
    load = view.load
    if load is None:
        return view.prompt_s_since + view.rows_since
    costs, num_tokens = load.costs, facts.num_prompt + facts.num_answer * facts.num_choices
    first_s = load.prompt_s + view.prompt_s_since
    first_s += prompt_s(costs, facts.num_prompt, num_cached, load.token_budget)
    num_rows = min(load.max_rows, load.num_rows + load.num_waiting + view.rows_since)
    context = load.context_tokens + load.waiting_tokens + view.tokens_since
    before_s = costs.decoding_s(num_rows, context)
    after_s = costs.decoding_s(num_rows + facts.num_choices, int(context + facts.num_prompt))
    harm_s = facts.num_answer * (after_s - before_s) * num_rows
    room_s = _room_s(load, context + num_tokens - num_cached, facts.num_answer, before_s)
    slot_s = _slot_s(load, view, facts.num_answer, before_s)
    return first_s + facts.num_answer * after_s + harm_s + max(room_s, slot_s)


def _room_s(load: EngineLoad, num_needed: float, num_answer: float, step_s: float) -> float:
    """Seconds until sequences that end have freed what is missing: as many as run end in the time of an answer."""
    num_missing = num_needed - load.capacity_tokens
    if num_missing <= 0 or not load.context_tokens:
        return 0.0
    return num_missing / load.context_tokens * num_answer * step_s


def _slot_s(load: EngineLoad, view: EngineView, num_answer: float, step_s: float) -> float:
    """Seconds until a slot is free, likewise."""
    num_missing = load.num_rows + load.num_waiting + view.rows_since + 1 - load.max_rows
    return 0.0 if num_missing <= 0 else num_missing / load.max_rows * num_answer * step_s
