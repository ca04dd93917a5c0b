"""The engine process: loads the model, runs the step loop, and reports to the front process.

The front process starts it as `python -P -m` and this module's name (`runtime/processes/child.py`). It ends when the
front process says so or has ended, or when its pipeline is dead. The front process can then resume every request.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from socket import socket
from typing import Any

from ...model.errors import ModelError
from ...runtime.env import log as logs
from ...runtime.env.env import Env, LiveEnv
from ...runtime.env.log import get_logger
from ...runtime.env.loops import loop_factory
from ...runtime.health.flight_recorder import stack_of
from ...runtime.processes.child import end_with_parent, joined
from ...runtime.processes.frames import LinkError
from ...runtime.processes.link import Link
from ...runtime.processes.link_channels import InboundChannel, OutboundChannel
from ...runtime.processes.transport import SocketTransport
from ...runtime.processes.type_fields import VersionError
from ...runtime.processes.wire import WireError
from ...runtime.startup.load_progress import LoadProgress
from ...runtime.startup.phases import Phases
from ...runtime.workers.thread_start import ThreadNotStarted
from ..config import EngineConfig, not_for_encoders
from ..device.device import Device
from ..errors import ConfigError, Failed
from ..loading.model_files import check_same_files, file_digests
from ..messages import Started, StepTokens, TokenRequest
from ..pipeline import ENTRY_CAPACITY, TEXT_CAPACITY, TO_DETOKENIZE, TO_SCHEDULE
from ..sample.processor_chain import ProcessorChain, load_processors
from .core_adapters import CoreAdapters
from .core_exit import CoreExit
from .protocol import (
    CODEC,
    Admitted,
    Broken,
    ControlCauses,
    Crashed,
    DropAdapter,
    EngineReady,
    ModelLoading,
    NotStarted,
    ReadAdapter,
    RequestsEnded,
    Setup,
    StatusQuery,
    StatusReply,
    Stop,
)
from .step_loop import StepLoop

PROGRESS_S = 0.5  # between two messages about loading

Load = Callable[[EngineConfig, Env, Phases], tuple[Any, Device]]  # run in a thread: the model and its device

log = get_logger("millrace.stages")


class EngineProcess:
    """The engine process's main object; call `run` once, on the event loop."""

    def __init__(self, sock: socket, files: Sequence[int], load: Load, *, link_timeout_s: float | None = None) -> None:
        """`link_timeout_s` as of `Link`; the front process must have the same."""
        self._sock = sock
        self._files = files
        self._load = load
        self._env = LiveEnv()
        self._link = Link(
            SocketTransport(sock), CODEC, self._receive, self._lost, timeout_s=link_timeout_s, only_reports=True
        )
        self._exit = CoreExit(self._post)
        self._requests: InboundChannel[TokenRequest] = InboundChannel(
            "->".join(TO_SCHEDULE), ENTRY_CAPACITY, self._env.now, self._arrived
        )
        self._tokens: OutboundChannel[StepTokens] = OutboundChannel(
            "->".join(TO_DETOKENIZE), TEXT_CAPACITY, self._env.now, on_refused=self._refused
        )
        self._link.add_inbound(self._requests)
        self._link.add_outbound(self._tokens)
        self._over = asyncio.Event()
        self._setup: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
        self._loop: StepLoop | None = None
        self._adapters: CoreAdapters | None = None
        self._readings: set[asyncio.Task[None]] = set()  # of adapters
        self._is_lost = False

    @property
    def is_device_lost(self) -> bool:
        """Whether the process ends because its device is lost."""
        return self._loop is not None and self._loop.is_device_lost

    async def run(self) -> int:
        """Runs until a `Stop`, the end of the front process, or a failure. Returns the exit code."""
        self._link.start()
        over = asyncio.ensure_future(self._over.wait())
        starting = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait([over, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.result():
                await asyncio.sleep(0)  # lets the last message leave
                return 1
            await over
            return 1 if self._is_lost else 0
        finally:
            starting.cancel()
            over.cancel()
            await asyncio.wait([starting, over])
            await self._end()

    # -- starting

    async def _start(self) -> bool:
        """Loads the model and starts the stages; returns whether it succeeded.

        Reports a failure to the front process.
        """
        setup = await self._setup
        phases = Phases(self._env.now)
        try:
            if setup.log is not None:
                logs.configure(**setup.log)
            if setup.cpus and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, setup.cpus)  # before any thread that computes
            end_with_parent(self._sock)
            telling = asyncio.ensure_future(self._tell_progress(phases.progress))
            try:
                loaded, device, files = await self._env.run_in_thread(self._load_checked, setup, phases)
            finally:
                telling.cancel()
            with phases("pipeline"):
                await self._start_stages(setup, loaded, device)
        except (ConfigError, ModelError) as error:
            kind = "ConfigError" if isinstance(error, ConfigError) else "ModelError"
            self._post(NotStarted(kind, str(error)))
            return False
        except (ThreadNotStarted, OSError, MemoryError) as error:
            self._post(NotStarted(type(error).__name__, str(error) or "no memory"))
            return False
        except Exception as error:
            log.error("engine_process.not_started", error=type(error).__name__, exc_info=error)
            self._post(NotStarted(type(error).__name__, f"{type(error).__name__}; see the server's log"))
            return False
        if loaded.info.attention_backend == "native":
            self._env.yield_to("device", loaded.own_cpu)
            self._env.yield_this_thread()
        gc.collect()
        gc.freeze()
        if not self._post(EngineReady(loaded.info, dict(phases.seconds), files)):
            self._post(NotStarted("VersionError", "the server is of another version; restart it"))
            return False
        return True

    async def _tell_progress(self, progress: LoadProgress) -> None:
        while True:
            await self._env.sleep(PROGRESS_S)
            self._post(ModelLoading(progress.state()))

    def _load_checked(self, setup: Setup, phases: Phases) -> tuple[Any, Device, dict[str, str]]:
        """Loads the model, and checks that its files are those of the first process. Runs in a thread."""
        if setup.files is not None:
            check_same_files(self._digests(setup), setup.files)
        loaded, device = self._load(setup.config, self._env, phases)
        files = self._digests(setup)
        if setup.files is not None:
            check_same_files(files, setup.files)  # again: they may have changed during the load
        return loaded, device, files

    @staticmethod
    def _digests(setup: Setup) -> dict[str, str]:
        return digests_of(setup.config, with_times=not setup.is_elsewhere)

    async def _start_stages(self, setup: Setup, loaded: Any, device: Device) -> None:
        if not loaded.info.num_blocks:
            raise not_for_encoders(setup.config)
        secret = self._env.secret("prefix.secret", 16) if setup.prefix_key is None else setup.prefix_key
        if processors := load_processors(setup.config.logits_processor):
            loaded.sampler.use(ProcessorChain(processors))
        loop = self._loop = StepLoop(
            setup.config,
            loaded,
            device,
            secret,
            self._env,
            self._exit,
            first_step=setup.first_step,
            is_routed=setup.prefix_key is not None,
        )
        if (lines := loop.core.schedule.scheduler.adapters) is not None:
            slots = lines.slots
            self._adapters = CoreAdapters(loaded.read_adapter, lambda digest: slots.of(digest) is not None)
            loaded.runner.find_adapters(self._adapters.get)
        await loop.start(self, self._requests, self._tokens, trace_files=self._files, watches_requests=False)

    # -- messages from the front process

    def _receive(self, word: Any) -> None:
        match word:
            case ControlCauses():
                if self._loop is not None:
                    self._loop.note_causes(word.causes)
            case RequestsEnded():
                self._exit.forget(word.request_ids)
            case StatusQuery():
                self._reply(self._answer(word))
            case ReadAdapter():
                reading = asyncio.ensure_future(self._read_adapter(word))
                self._readings.add(reading)
                reading.add_done_callback(self._readings.discard)
            case DropAdapter():
                if self._adapters is not None:
                    self._adapters.drop(word)
            case Setup():
                self._setup.set_result(word)
            case Stop():
                self._over.set()
            case _:
                raise LinkError(f"{type(word).__name__} is not a message of the front process")

    async def _read_adapter(self, word: ReadAdapter) -> None:
        if self._adapters is None:
            return self._reply(StatusReply(word.number, error="the engine serves no adapters"))
        self._reply(StatusReply(word.number, await self._adapters.read(self._env, word)))

    def _arrived(self, request: TokenRequest) -> None:
        self._exit.take(request)
        if self._loop is not None:
            self._loop.arrived(request)

    def _lost(self, error: LinkError | None) -> None:
        if error is not None:
            log.error("link.broken", end="engine", reason=str(error))
        self._is_lost = True
        self._over.set()

    def _answer(self, query: StatusQuery) -> StatusReply:
        if self._loop is None:
            return StatusReply(query.number, error="the engine is loading")
        return self._loop.answer(query, self._post)

    # -- messages to the front process

    def _post(self, word: Any) -> bool:
        """Sends a message; returns whether it can be encoded for the front process's version."""
        try:
            self._link.post(word)
        except WireError as error:
            log.error("link.refused", word=type(word).__name__, reason=str(error))
            return False
        return True

    def _reply(self, reply: StatusReply) -> None:
        if not self._post(reply):
            self._post(StatusReply(reply.number, error="the answer cannot be sent; see the server's log"))

    def _refused(self, step: StepTokens, error: WireError) -> None:
        """Fails the requests of a step that cannot be encoded for the link."""
        code = "engine_version" if isinstance(error, VersionError) else "internal_error"
        self._exit.fail(step, Failed(f"its tokens cannot be sent to the server's first process: {error}", code=code))

    def tick(self, lag_s: float) -> None:
        """See `LoopOwner`. Reports changes."""
        assert self._loop is not None
        if self._loop.has_moved():
            self._post(self._loop.report())
        self.report_to_router()

    def report_to_router(self) -> None:
        """Sends what is new to a front that routes."""
        if self._loop is not None and self._loop.router_reports is not None:
            for report in self._loop.router_reports.new():
                self._post(report)

    def died(self) -> None:
        """See `LoopOwner`. Reports it at once, and ends the process."""
        assert self._loop is not None
        health = self._loop.pipeline.health
        self._post(Broken(health.stage or "", health.reason or ""))
        self._is_lost = True
        self._over.set()

    def admitted(self, started: Sequence[Started]) -> None:
        """See `LoopOwner`."""
        self._post(Admitted([one.sequence_id for one in started]))
        self._link.flush()

    def crashed(self, stage: str, error: BaseException, request_ids: Sequence[str]) -> None:
        """See `LoopOwner`."""
        self._post(Crashed(stage, type(error).__name__, stack_of(error), list(request_ids)))

    # -- the end

    async def _end(self) -> None:
        if self._is_lost:
            self._link.close()  # first: the front process must not see the end of channels that a successor continues
        for reading in self._readings:
            reading.cancel()
        if self._loop is not None:
            await self._loop.aclose()
        await self._env.aclose()
        self._link.close()


def digests_of(config: EngineConfig, *, with_times: bool) -> dict[str, str]:
    """The digests of the files of a model that was loaded. Runs in a thread."""
    from ..loading.early import resolve  # imported while the model is loaded

    # loaded before, so the Hub need not be asked; by other addresses files are pinned again, to find their folder
    has_address = config.model is not None and "://" in config.model and not config.model.startswith("hf://")
    root = resolve(config if has_address else replace(config, offline=True))
    return file_digests(root, with_times=with_times)


def load(config: EngineConfig, env: Env, phases: Phases) -> tuple[Any, Device]:
    """Loads a real model. Runs in a thread."""
    with phases("import"):
        from ..loading.model import LoadedModel, load_model
    loaded = load_model(config, phases, env)
    if not isinstance(loaded, LoadedModel):
        raise not_for_encoders(config)
    return loaded, loaded.make_device()


def main(arguments: Sequence[str], load: Load = load) -> int:
    """The entry point of the process. Returns its exit code."""
    sock, files = joined(arguments)

    async def live() -> tuple[int, bool]:
        process = EngineProcess(sock, files, load)
        return await process.run(), process.is_device_lost

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code, is_device_lost = runner.run(live())
    logs.shutdown()
    if is_device_lost:
        os._exit(code)  # at once: the driver's own end may wait for the device, and a successor waits for this process
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
