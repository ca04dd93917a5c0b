"""The allocate stage: owns the KV blocks, and grants for each plan what may run.

The decisions are in `allocator.py`, the state of the blocks in `tiers/block_pool.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...kernels.layout.kv_layout import KVLayout
from ...runtime.histogram import Histogram
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.trace.step_rows import LaneRows, StepRows
from ...runtime.trace.tracer import EventKind
from ..messages import PlanReport, Rates, StepGrant, StepPlan
from .allocator import Allocator
from .kv_trace import KVTrace
from .prefix_cache import PrefixCache
from .tiers.host_tier import HostTier

if TYPE_CHECKING:
    from ..call_log import CallLog

STEP_GRANTED = int(EventKind.STEP_GRANTED)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's buckets


class Allocate(Stage[StepPlan, StepGrant]):
    """Answers each plan with a report to schedule and, if not void, a grant to execute.

    `call_log` records each call and its results.
    """

    inputs: ClassVar = {"rates": Rates, "in": StepPlan}
    outputs: ClassVar = {"out": StepGrant, "report": PlanReport}
    on_crash: ClassVar = Crash.RECOVER

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        cache: PrefixCache | None = None,
        host: HostTier | None = None,
        layout: KVLayout | None = None,
        num_lanes: int = 1,
    ) -> None:
        sizes = (num_blocks, block_size, num_slots, max_model_len)
        self.allocator = Allocator(*sizes, cache, host, layout, num_lanes)
        self.call_log: CallLog | None = None
        self.step_tokens = Histogram(STEP_TOKENS)  # tokens computed in each step with rows
        self._block_size, self._num_lanes = block_size, num_lanes
        self._batch: Sequence[StepPlan | Rates] = ()  # the current batch, or the last one
        self._answered = 0  # messages of the batch already answered
        self._context: Context | None = None
        self._recompute = self._swap = self._rope = 0  # the method of a preemption, as names in the trace
        self._rows: StepRows | LaneRows | None = None
        self._kv: KVTrace | None = None
        self._sequence_ids = np.full(num_slots, -1, np.int64)  # [S] the running sequence, for the trace

    async def setup(self, context: Context) -> None:
        self._context = context
        self._recompute, self._swap = context.tracer.source("recompute"), context.tracer.source("swap")
        self._rope = context.tracer.source("rope")
        if self._rows is None:
            where = context.tracer, context.source, len(self._sequence_ids)
            self._rows = StepRows(*where) if self._num_lanes == 1 else LaneRows(*where, self._num_lanes)
            self._kv = KVTrace(context, self.allocator)

    async def handle(self, batch: Sequence[StepPlan | Rates], out: Outlet[Any]) -> None:
        self._batch, self._answered = batch, 0
        answers: list[tuple[StepGrant | None, PlanReport]] = []
        for message in batch:
            if isinstance(message, Rates):
                self.allocator.use_rates(message)
            else:
                answers.append(self._answer(message, out))
            self._answered += 1
        if self.call_log is not None:
            self.call_log.allocate(batch, answers)

    def _answer(self, plan: StepPlan, out: Outlet[Any]) -> tuple[StepGrant | None, PlanReport]:
        grant, report = self.allocator.serve(plan)
        if grant is not None and len(grant.slots):
            self.step_tokens.observe(grant.num_computed)
        self._trace(plan, grant, report)
        out.send(report, port="report")  # before the grant: schedule must have it before the step can be done
        if grant is not None:
            out.send(grant)
        return grant, report

    async def recover(self, batch: Sequence[StepPlan | Rates], error: BaseException, out: Outlet[Any]) -> None:
        """Resets the allocator and reports it: schedule then recomputes everything."""
        if self._batch is not batch:
            return await self.handle(batch, out)  # the crash came before the batch was touched
        if self.call_log is not None:
            self.call_log.crash("allocate")
        for message in batch[self._answered :]:
            if not isinstance(message, Rates):
                report = self.allocator.reset(message)
                self._trace(message, None, report)
                out.send(report, port="report")

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache.

        Returns the number of blocks freed. Running sequences keep their blocks.
        """
        num_freed = self.allocator.reset_prefix_cache()
        if self.call_log is not None:
            self.call_log.reset_prefix_cache(num_freed)
        return num_freed

    def _trace(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport) -> None:
        assert self._context is not None and self._kv is not None
        tracer, source = self._context.tracer, self._context.source
        if not tracer.enabled:
            return
        if grant is not None:
            num_rows = num_tokens = num_decodes = len(grant.slots)
            if not grant.is_decode:
                num_tokens = int(grant.num_certain.sum())
                num_decodes = int(np.count_nonzero(grant.num_certain == 1))
            emit = tracer.bind()
            emit(STEP_GRANTED, source, grant.step, num_rows, num_tokens, num_decodes, report.num_free)
            self._trace_rows(grant)
        for slot in (*plan.preempted, *report.preempted):
            num_tokens = report.swapped.get(slot, 0)
            how, num_blocks = self._swap if num_tokens else self._recompute, -(-num_tokens // self._block_size)
            if slot in plan.dropped:
                how = self._rope  # recomputed, with the rotary factors of a long sequence
            tracer.emit(EventKind.PREEMPTED, source, plan.step, slot, how, num_blocks, num_tokens)
        self._kv.served(plan, grant, report)

    def _trace_rows(self, grant: StepGrant) -> None:
        assert self._rows is not None
        for started in grant.started:
            self._sequence_ids[started.slot] = started.sequence_id
        if grant.is_decode and self._rows.go_on(grant.step, grant.slots, grant.starts):
            return
        ids = self._sequence_ids[grant.slots]
        self._rows.step(grant.step, grant.slots, ids, grant.starts, grant.num_certain)
