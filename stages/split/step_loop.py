"""The stages of a step loop whose prompts come from other processes, with what is beside them.

An engine process has one, whether one front asks it or several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...runtime.channel import Channel
from ...runtime.env.env import Env
from ...runtime.health.flight_recorder import task_stacks, thread_stacks
from ...runtime.trace.tracer import Tracer
from ..allocate.prefix_tree import read_prefix_tree
from ..config import EngineConfig
from ..device.device import Device
from ..engine.engine_status import CoreReport
from ..engine.read_status import read_core
from ..engine.wiring import CoreStages
from ..messages import Started, StepTokens, TokenRequest
from ..pipeline import build_core_pipeline
from ..recordings.writer import RecordingWriter
from ..routing.reports import RouterReports
from .compiled_grammars import CompiledGrammars
from .core_exit import CoreExit
from .protocol import StatusQuery, StatusReply


class LoopOwner(Protocol):
    """What hears of a step loop, to tell its fronts."""

    def admitted(self, started: Sequence[Started]) -> None:
        """These sequences get slots. Called before their first step is submitted: a front must know what ended this."""

    def crashed(self, stage: str, error: BaseException, request_ids: Sequence[str]) -> None:
        """A stage has failed at these requests, and starts again."""

    def died(self) -> None:
        """A stage has failed for good."""

    def tick(self, lag_s: float) -> None:
        """Ten times a second while a request is live, otherwise once a second."""


class StepLoop:
    """Runs the prompts of one channel and sends tokens to another. Call `start`, in the end `aclose`.

    Steps are numbered from `first_step`. `is_routed`: a front that routes wants `router_reports`.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: Any,
        device: Device,
        secret: bytes,
        env: Env,
        exit: CoreExit,
        *,
        first_step: int = 0,
        is_routed: bool,
    ) -> None:
        self._config, self._env, self._exit = config, env, exit
        core = self.core = CoreStages(config, loaded, device, secret, first_step)
        self.router_reports = RouterReports(core.schedule.scheduler, core.allocate.allocator) if is_routed else None
        self._grammars = CompiledGrammars(loaded.grammars, env)
        self.pipeline = build_core_pipeline(
            core.schedule, core.allocate, core.execute, core.sample, steps_in_flight=config.steps_in_flight
        )
        self._recorder: RecordingWriter | None = None
        self._entry = ""
        self._last_moved: tuple[object, ...] = ()

    async def start(
        self,
        owner: LoopOwner,
        requests: Channel[TokenRequest],
        tokens: Channel[StepTokens],
        *,
        trace_files: Sequence[int] = (),
        watches_requests: bool = True,
    ) -> None:
        """Starts the stages. `watches_requests` False: the other process watches their channel."""
        core, pipeline = self.core, self.pipeline
        self._entry = requests.name
        core.schedule.on_start.append(owner.admitted)
        pipeline.exit = self._exit
        self._exit.on_end.append(self._grammars.request_ended)
        pipeline.use(self._env, Tracer(self._env, files=trace_files))
        pipeline.give_channel("schedule.in", requests, is_watched=watches_requests)
        pipeline.give_channel("sample.out", tokens)
        pipeline.on_crash.append(owner.crashed)
        pipeline.on_dead.append(owner.died)
        core.execute.device.on_gone.append(partial(pipeline.fail, "execute"))
        if self._config.record is not None:
            self._recorder = core.record(Path(self._config.record), self._config, self._env)
        await pipeline.start()
        assert pipeline.watch is not None
        pipeline.watch.on_tick.append(owner.tick)

    async def aclose(self) -> None:
        """Stops the stages and frees what is beside them."""
        await self.pipeline.stop()
        await self._grammars.aclose()
        if self._recorder is not None:
            await self._recorder.aclose()

    # -- from the fronts

    def arrived(self, request: TokenRequest) -> None:
        """A prompt is about to enter the channel; the exit knows it."""
        if self.router_reports is not None:
            self.router_reports.num_seen += 1
        if self.pipeline.watch is not None:
            self.pipeline.watch.wake()
        if request.params.structured_outputs is not None:
            self._grammars.request_came(request.request_id, request.params.structured_outputs)

    def note_causes(self, causes: Mapping[int, str]) -> None:
        """Entries for the control lane, by sequence."""
        for sequence_id, cause in causes.items():
            self.pipeline.lane.post(sequence_id, cause)

    def answer(self, query: StatusQuery, report: Callable[[CoreReport], object]) -> StatusReply:
        """The answer to a question. That to "books" and "blocks" goes before it, through `report`."""
        match query.what:
            case "books" | "blocks":
                if self.pipeline.watch is not None:
                    self.pipeline.watch.write_stage_times()
                report(self.report(with_blocks=query.what == "blocks"))
                return StatusReply(query.number)
            case "forget_prefixes":
                return StatusReply(query.number, self.core.allocate.reset_prefix_cache())
            case "prefixes":
                return StatusReply(query.number, read_prefix_tree(self.core.allocate.allocator))
            case "inject":
                self.pipeline.inject(query.faults)
                return StatusReply(query.number)
            case "stacks":
                stacks = [*task_stacks(self.pipeline, only=self.pipeline.runners), *thread_stacks()]
                return StatusReply(query.number, [stack | {"process": "engine"} for stack in stacks])
        return StatusReply(query.number, error=f"unknown question {query.what!r}")

    # -- its state

    @property
    def is_device_lost(self) -> bool:
        """Whether the process should end at once, as its device is lost."""
        guard = self.core.execute.device.guard
        return guard is not None and guard.lost is not None

    def has_moved(self) -> bool:
        """Whether what `report` tells may differ from the last call."""
        before, runners = self._last_moved, self.pipeline.runners.values()
        moments = [(runner.last_progress_s, runner.is_busy, runner.num_restarts) for runner in runners]
        depths = [len(channel) for channel in self.pipeline.channels.values()]
        self._last_moved = (*moments, *depths, len(self.core.schedule.scheduler.sequences))
        return self._last_moved != before

    def report(self, *, with_blocks: bool = False) -> CoreReport:
        """The state, with all sequences. The entry's channel is counted where its items come from."""
        status = self.pipeline.status()
        counted_here = [channel for name, channel in status.channels.items() if name != self._entry]
        found = read_core(self.core, with_sequences=True, with_blocks=with_blocks)
        return CoreReport(found, list(status.stages.values()), counted_here)
