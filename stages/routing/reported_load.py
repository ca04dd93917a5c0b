"""What an engine reports of its scheduler."""

from __future__ import annotations

from ..allocate.allocator import Allocator
from ..schedule.scheduler import Scheduler
from ..schedule.step_timing.step_time_model import StepTimeCosts
from ..schedule.work_left import WorkLeft
from .engine_load import EngineLoad


def load_of(scheduler: Scheduler, allocator: Allocator, costs: StepTimeCosts, num_seen: int) -> EngineLoad:
    """The report of an engine that has seen so many of a router's prompts."""
    left, limits = WorkLeft.of(scheduler), scheduler.limits
    capacity = _capacity_tokens(allocator, left, limits.max_model_len)
    return EngineLoad(
        num_seen,
        costs.prompt_s(left.num_prompt, left.num_pairs, limits.max_num_batched_tokens),
        left.num_rows,
        left.num_waiting,
        left.context_tokens,
        left.waiting_tokens,
        capacity,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        costs,
        int(capacity * allocator.free_share),
    )


def _capacity_tokens(allocator: Allocator, left: WorkLeft, max_model_len: int) -> int:
    """Tokens that the cache holds. Of several kinds, in sequences as long as those there are: windows keep the last."""
    layout, pool = allocator.layout, allocator.pool
    if layout is None or len(layout.kinds) == 1:
        return pool.num_blocks * pool.block_size
    num_sequences = left.num_rows + left.num_waiting
    length = (left.context_tokens + left.waiting_tokens) // num_sequences if num_sequences else max_model_len
    return layout.num_tokens_at(max(1, length))
