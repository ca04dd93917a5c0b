"""Replays a recording: the real schedule and allocate stages, call by call, in virtual time.

Each call gets its recorded inputs, and its decisions are compared with the recorded ones. Schedule reads a clock only
to decide whether a plan waits; the recording has that for each call. Otherwise both stages use no clock and no
randomness, so decisions differ only if code or settings do.
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ...runtime.channel import ControlLane
from ...runtime.simulation.manual_env import ManualEnv, run_at_once
from ...runtime.stage import Context
from ...runtime.trace.tracer import Tracer
from ..allocate.prefix_cache import PrefixCache
from ..allocate.stage import Allocate
from ..allocate.tiers.host_tier import HostTier
from ..errors import ConfigError
from ..messages import PlanReport, Rates, StepGrant, StepPlan
from ..schedule.ngram_drafter import GuessesTokens
from ..schedule.policy import BUILT_IN, AgeingPriority, Policy
from ..schedule.scheduler import StepLimits
from ..schedule.stage import Schedule
from .field_values import Fields, shown
from .format import grant_fields, plain, plan_fields, report_fields
from .reader import AllocateCall, CacheResetCall, Call, Recording, RecordingError, ReportTaken, ScheduleCall
from .recorded_engine import RecordedEngine

STAGES_REFUSE = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, MemoryError)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that differs from the recorded one."""

    line: int
    time_s: float
    decision: str  # "plan", "report", "grant", "failed" or "blocks freed"
    step: int | None
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        where = f"line {self.line}, {self.time_s:.6f} s" + ("" if self.step is None else f", step {self.step}")
        then, now = _narrow(self.recorded, self.replayed)
        return f"{where}: {self.decision}.{self.field} was {then} and is {now}"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a stage in a call: as recorded, and as replayed."""

    kind: str
    recorded: Any
    replayed: Any


class ReplayedCore:
    """The schedule and allocate stages of an engine, driven call by call.

    With a `tracer` made of `env` they write their trace as in an engine; without one nothing is traced. Without a
    `drafter`, the only guesses are those in the inputs.
    """

    def __init__(
        self,
        engine: RecordedEngine,
        policy: Policy | None = None,
        env: ManualEnv | None = None,
        tracer: Tracer | None = None,
        drafter: GuessesTokens | None = None,
    ) -> None:
        limits = StepLimits(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            steps_in_flight=engine.steps_in_flight,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            itl_target_ms=engine.itl_target_ms,
            num_speculative_tokens=engine.most_drafts,
            short_length=engine.short_length,
            max_loras=engine.max_loras,
            kv_layout=engine.kv_layout,
            num_lanes=engine.pipeline_parallel_size,
        )
        cache = PrefixCache(engine.block_size, states=engine.states) if engine.enable_prefix_caching else None
        on_host = (engine.num_host_blocks, engine.block_size, engine.num_more_host_blocks, engine.kv_layout)
        host = HostTier.of(*on_host, engine.states, max_model_len=engine.max_model_len)
        sizes = (engine.num_blocks, engine.block_size, engine.max_num_seqs, engine.max_model_len)
        self.env = env or ManualEnv()
        self.tracer = tracer or Tracer(self.env, enabled=False)
        self.lane = ControlLane("control")
        self.schedule = Schedule(limits, engine.max_waiting, policy or built_in_policy(engine), drafter)
        self.allocate = Allocate(*sizes, cache, host, engine.kv_layout, engine.pipeline_parallel_size)
        self.schedule.call_log = self.allocate.call_log = self._captured = _CapturedCalls()
        run_at_once(self.schedule.setup(self.context("schedule")))
        run_at_once(self.allocate.setup(self.context("allocate")))

    def context(self, name: str) -> Context:
        """The context of a stage with that name."""
        source = self.tracer.source(name)
        return Context(self.env, self.tracer, source, self.lane, lambda request_id: True, _escalate)

    def run_schedule(
        self, batch: Sequence[Any], is_early: bool | None = None
    ) -> tuple[Sequence[StepPlan], Sequence[int]]:
        """One `handle` of schedule.

        `is_early`: whether it is too early to plan; None: it decides by its clock. Returns its plans, and the sequences
        that it gave up.
        """
        self.schedule.early_override = is_early
        run_at_once(self.schedule.handle(batch, DEAF))
        return self._captured.plans, self._captured.failed

    def run_allocate(self, batch: Sequence[StepPlan | Rates]) -> Sequence[tuple[StepGrant | None, PlanReport]]:
        """One `handle` of allocate.

        Returns a grant and a report for each plan; the grant is None if it was void.
        """
        run_at_once(self.allocate.handle(batch, DEAF))
        return self._captured.answers


class Replay:
    """A replay of a recording.

    `calls` runs it; `core` is its current state, `difference` the first difference.

    `policy` replaces the recorded one. Without it only built-in policies are found: a name in a file is never imported.
    Raises `RecordingError` for calls that the stages reject.
    """

    def __init__(self, recording: Recording, policy: Policy | None = None, core: ReplayedCore | None = None) -> None:
        self.recording = recording
        self.core = core or ReplayedCore(recording.engine, policy)
        self.difference: Difference | None = None
        self.time_s = 0.0
        self.num_calls = self.num_decisions = 0
        self._hash = hashlib.sha256()
        self._plans: deque[StepPlan] = deque()  # not taken by allocate yet
        self._reports: deque[PlanReport] = deque()  # not taken by schedule yet

    @property
    def decision_hash(self) -> str:
        """SHA-256 over all decisions so far, in order.

        Equal decisions give equal hashes on any machine.
        """
        return self._hash.hexdigest()

    def run(self) -> Replay:
        """Runs to the end, or to the first difference."""
        for _ in self.calls():
            pass
        return self

    def calls(self) -> Iterator[tuple[Call, Sequence[Decision]]]:
        """Runs call by call; stops after the first call that decides differently."""
        for call in self.recording:
            yield call, self.take(call)
            if self.difference is not None:
                return

    def take(self, call: Call) -> Sequence[Decision]:
        """Runs one call of the recording. Returns the recorded and the new decisions."""
        self.time_s = call.time_s
        self.core.env.time_s = self.recording.began_s + call.time_s  # on the engine's clock
        try:
            decisions = self._run(call)
        except STAGES_REFUSE as error:
            raise RecordingError(
                f"{self.recording.path}:{call.line}: the stages reject this call ({type(error).__name__}: {error})"
            ) from error
        self.num_calls += 1
        for decision in decisions:
            self._compare(call, decision)
        return decisions

    def copy(self) -> Replay:
        """An independent replay at the same place. It writes no trace."""
        other = copy.copy(self)
        tracer = Tracer(self.core.env, enabled=False)
        shared = {id(self.core.tracer): tracer}  # it has thread-local state and cannot be copied
        other.core, other._plans, other._reports = copy.deepcopy((self.core, self._plans, self._reports), shared)
        other._hash = self._hash.copy()
        return other

    def _run(self, call: Call) -> list[Decision]:
        match call:
            case ScheduleCall():
                return self._schedule(call)
            case AllocateCall():
                return self._allocate(call)
            case CacheResetCall():
                return [Decision("blocks freed", call.num_freed, self.core.allocate.reset_prefix_cache())]

    def _schedule(self, call: ScheduleCall) -> list[Decision]:
        batch = [self._take_report(each) if isinstance(each, ReportTaken) else each for each in call.taken]
        for sequence_id, cause in call.lane:
            self.core.lane.post(sequence_id, cause)
        plans, failed = self.core.run_schedule(batch, is_early=call.is_early)
        self._plans += plans
        made = [plain(plan_fields(plan)) for plan in plans]
        decisions = [Decision("plan", *pair) for pair in _pairs(call.plans, made)]
        if call.failed or failed:
            decisions.append(Decision("failed", call.failed, list(failed)))
        return decisions

    def _take_report(self, recorded: ReportTaken) -> PlanReport:
        report = self._reports.popleft()
        assert report.step == recorded.step, (
            f"the call has the report of step {recorded.step}, but the next is {report.step}"
        )
        return report

    def _allocate(self, call: AllocateCall) -> list[Decision]:
        plans = [self._plans.popleft() for _ in call.reports]
        answers = self.core.run_allocate([*call.rates, *plans])
        decisions = []
        for recorded_report, recorded_grant, (grant, report) in zip(call.reports, call.grants, answers, strict=True):
            self._reports.append(report)
            decisions.append(Decision("report", recorded_report, plain(report_fields(report))))
            decisions.append(self._granted(recorded_grant, grant))
        return decisions

    def _granted(self, recorded: Fields | None, grant: StepGrant | None) -> Decision:
        has_kinds = self.recording.engine.has_kinds
        return Decision("grant", recorded, None if grant is None else plain(grant_fields(grant, has_kinds=has_kinds)))

    def _compare(self, call: Call, decision: Decision) -> None:
        self._hash.update(orjson.dumps([decision.kind, decision.replayed]))
        self.num_decisions += 1
        if self.difference is None and decision.recorded != decision.replayed:
            self.difference = _difference(call, decision)


def built_in_policy(engine: RecordedEngine) -> Policy:
    """The policy that a recording names, if it is built in. Raises `ConfigError` for others."""
    if engine.priority_ageing_s is not None and engine.scheduler == "priority":
        return AgeingPriority(engine.priority_ageing_s)
    if engine.scheduler not in BUILT_IN:
        raise ConfigError(
            f"scheduler = {shown(engine.scheduler)} in the recording: not a built-in policy; give --scheduler, as a "
            "name in a recording is never imported"
        )
    return BUILT_IN[engine.scheduler]()


class _CapturedCalls:
    """The call log of a replay: keeps the outputs of the last call."""

    plans: Sequence[StepPlan] = ()
    failed: Sequence[int] = ()
    answers: Sequence[tuple[StepGrant | None, PlanReport]] = ()

    def schedule(
        self,
        batch: Sequence[Any],
        causes: Mapping[int, str],
        plans: Sequence[StepPlan],
        failed: Sequence[int],
        is_early: bool,
    ) -> None:
        self.plans, self.failed = plans, failed

    def allocate(
        self, batch: Sequence[StepPlan | Rates], answers: Sequence[tuple[StepGrant | None, PlanReport]]
    ) -> None:
        self.answers = answers

    def reset_prefix_cache(self, num_freed: int) -> None:
        pass

    def crash(self, stage: str) -> None:
        raise AssertionError(f"stage {stage} reports a crash, but recover was not called")


class _NullOutlet:
    """An outlet that drops everything: the call log has the outputs."""

    def send(self, item: Any, port: str = "out") -> None:
        pass

    async def flush(self) -> None:
        pass

    def fail(self, item: Any, error: BaseException) -> None:
        pass

    def reply(self, item: Any) -> None:
        pass


DEAF = _NullOutlet()


def _escalate(error: BaseException) -> None:
    raise error


def _pairs(recorded: Sequence[Fields], replayed: Sequence[Fields]) -> Iterator[tuple[Fields | None, Fields | None]]:
    """Pairs of decisions in order; None where one side has fewer."""
    for i in range(max(len(recorded), len(replayed))):
        yield recorded[i] if i < len(recorded) else None, replayed[i] if i < len(replayed) else None


def _difference(call: Call, decision: Decision) -> Difference:
    then, now = decision.recorded, decision.replayed
    where = (call.line, call.time_s, decision.kind)
    if not isinstance(then, dict) or not isinstance(now, dict):
        step = next((each["step"] for each in (now, then) if isinstance(each, dict)), None)
        return Difference(*where, step, "number" if isinstance(now, int) else "all", then, now)
    name = next(name for name in [*now, *then] if name not in then or name not in now or then[name] != now[name])
    return Difference(*where, now["step"], name, then.get(name), now.get(name))


def _narrow(then: Any, now: Any) -> tuple[str, str]:
    """Both values, for people: of lists only the first row that differs."""
    if isinstance(then, list) and isinstance(now, list):
        row = next((i for i, pair in enumerate(zip(then, now, strict=False)) if pair[0] != pair[1]), None)
        if row is None:
            return f"of {len(then)} rows", f"of {len(now)}"
        return f"{shown(then[row])} in row {row}", shown(now[row])
    return shown(then), shown(now)
