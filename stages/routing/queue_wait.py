"""How long a new request would wait in an engine, by what that has reported and what was sent to it since."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .engine_load import EngineView
from .score import prompt_s


def num_waiting(view: EngineView, num_more: float = 0.0) -> float:
    """Requests before a new one. `num_more` are on their way and not sent to any engine yet, this one's share."""
    assert view.load is not None
    return view.load.num_waiting + view.rows_since + num_more


def wait_s(view: EngineView, num_answer: float, num_more: float = 0.0) -> float:
    """Seconds until a new request would be computed. Answers have `num_answer` tokens on average.

    Before it are the prompts that wait. With too few free slots for all of them, answers must end first: in the time
    of one answer as many end as there are slots, so the first one does after half a share of that time.
    """
    load = view.load
    assert load is not None
    ahead = num_waiting(view, num_more)
    prompts_s = load.prompt_s + view.prompt_s_since + num_more * _mean_prompt_s(view)
    context = load.context_tokens + load.waiting_tokens + view.tokens_since
    per_row = context / max(1.0, load.num_rows + ahead)
    num_rows = min(float(load.max_rows), load.num_rows + ahead)
    num_rows = max(1.0, min(num_rows, load.capacity_tokens / max(1.0, per_row)))  # that fit into the memory
    num_missing = load.num_rows + ahead + 1 - num_rows
    if num_missing <= 0 or (num_missing <= 1 and load.num_rows < load.max_rows):
        return prompts_s
    step_s = load.costs.decoding_s(int(num_rows), int(per_row * num_rows))
    num_steps = math.ceil(load.waiting_tokens / load.token_budget) + view.rows_since  # in which rows decode as well
    prompts_s = max(0.0, prompts_s - num_steps * load.costs.step_s)
    return prompts_s + (num_missing - 0.5) * num_answer * step_s / num_rows


def _mean_prompt_s(view: EngineView) -> float:
    """Seconds of a prompt that waits: what is left of prompts that were begun says nothing of the next ones."""
    load = view.load
    assert load is not None
    if not (count := load.num_waiting + view.rows_since):
        return 0.0
    each = load.waiting_tokens // max(1, load.num_waiting)
    waiting_s = min(load.prompt_s, load.num_waiting * prompt_s(load.costs, each, 0, load.token_budget))
    return (waiting_s + view.prompt_s_since) / count


def shortest(views: Sequence[EngineView], num_answer: float, num_more: float = 0.0) -> tuple[EngineView, float]:
    """The engine in which a new request waits least, and for how long."""
    waits = [(wait_s(view, num_answer, num_more), view.engine, view) for view in views]
    least_s, _, view = min(waits, key=lambda one: one[:2])
    return view, least_s
