"""What an engine reports of its scheduler."""

from __future__ import annotations

from ..schedule.scheduler import Scheduler
from ..schedule.step_timing.step_time_model import StepTimeCosts
from ..schedule.work_left import WorkLeft
from .engine_load import EngineLoad


def load_of(scheduler: Scheduler, costs: StepTimeCosts, capacity_tokens: int, num_seen: int) -> EngineLoad:
    """The report of an engine whose cache holds so many tokens, and that has seen so many of a router's prompts."""
    left, limits = WorkLeft.of(scheduler), scheduler.limits
    return EngineLoad(
        num_seen,
        costs.prompt_s(left.num_prompt, left.num_pairs, limits.max_num_batched_tokens),
        left.num_rows,
        left.num_waiting,
        left.context_tokens,
        left.waiting_tokens,
        capacity_tokens,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        costs,
    )
