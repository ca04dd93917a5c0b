"""The allocate stage: owns the KV blocks, and says for each plan what may run.

The thinking is in `allocator.py`, the books in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..runtime.histogram import Histogram
from ..runtime.stage import Context, Crash, Outlet, Stage
from ..runtime.trace import EventKind
from ..runtime.trace_rows import StepRows
from .allocator import Allocator
from .host import HostTier
from .kv_trace import KVTrace
from .messages import PlanReport, StepGrant, StepPlan
from .prefix import PrefixCache

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's buckets


class Allocate(Stage[StepPlan, StepGrant]):
    """Answers each plan with a report to schedule and, unless nothing can run, a grant to execute."""

    inputs: ClassVar = {"in": StepPlan}
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
    ) -> None:
        self.allocator = Allocator(num_blocks, block_size, num_slots, max_model_len, cache, host)
        self.step_tokens = Histogram(STEP_TOKENS)  # computed in each step that has rows
        self._block_size = block_size
        self._batch: Sequence[StepPlan] = ()  # in hand, or last
        self._answered = 0  # plans of it
        self._context: Context | None = None
        self._recompute = self._swap = 0  # how a sequence is preempted, as names in the trace
        self._rows: StepRows | None = None
        self._kv: KVTrace | None = None
        self._sequence_ids = np.full(num_slots, -1, np.int64)  # [S] who runs there, for the trace

    async def setup(self, context: Context) -> None:
        self._context = context
        self._recompute, self._swap = context.tracer.source("recompute"), context.tracer.source("swap")
        if self._rows is None:
            self._rows = StepRows(context.tracer, context.source, len(self._sequence_ids))
            self._kv = KVTrace(context, self.allocator)

    async def handle(self, batch: Sequence[StepPlan], out: Outlet[Any]) -> None:
        self._batch, self._answered = batch, 0
        for plan in batch:
            grant, report = self.allocator.serve(plan)
            if grant is not None and len(grant.slots):
                self.step_tokens.observe(grant.num_computed)
            self._trace(plan, grant, report)
            out.send(report, port="report")  # first: schedule must have it before the step can be done
            if grant is not None:
                out.send(grant)
            self._answered += 1

    async def recover(self, batch: Sequence[StepPlan], error: BaseException, out: Outlet[Any]) -> None:
        """Starts with clean books and says so: schedule then computes everything anew."""
        if self._batch is not batch:
            return await self.handle(batch, out)  # the crash came before any of it was touched
        for plan in batch[self._answered :]:
            report = self.allocator.reset(plan)
            self._trace(plan, None, report)
            out.send(report, port="report")

    def _trace(self, plan: StepPlan, grant: StepGrant | None, report: PlanReport) -> None:
        assert self._context is not None and self._kv is not None
        tracer, source = self._context.tracer, self._context.source
        if not tracer.enabled:
            return
        if grant is not None:
            num_rows = num_decodes = len(grant.slots)
            if not grant.is_decode:
                num_decodes = int(np.count_nonzero(grant.num_tokens == 1))
            counts = (num_rows, grant.num_computed, num_decodes, report.num_free)
            tracer.emit(EventKind.STEP_GRANTED, source, grant.step, *counts)
            self._trace_rows(grant)
        for slot in (*plan.preempted, *report.preempted):
            num_tokens = report.swapped.get(slot, 0)
            how, num_blocks = self._swap if num_tokens else self._recompute, -(-num_tokens // self._block_size)
            tracer.emit(EventKind.PREEMPTED, source, plan.step, slot, how, num_blocks, num_tokens)
        self._kv.served(plan, grant, report)

    def _trace_rows(self, grant: StepGrant) -> None:
        assert self._rows is not None
        for started in grant.started:
            self._sequence_ids[started.slot] = started.sequence_id
        if grant.is_decode and self._rows.go_on(grant.step, grant.slots):
            return
        ids = self._sequence_ids[grant.slots]
        self._rows.step(grant.step, grant.slots, ids, grant.starts, grant.num_tokens)
