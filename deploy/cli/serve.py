"""`millrace serve`: runs an engine behind the HTTP server until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from ...runtime.env.limits import LIMIT_FLAGS, address_space_left, raise_open_files
from ...runtime.env.log import configure, get_logger, shutdown
from ...runtime.env.loops import loop_factory
from ...runtime.env.service_manager import ServiceManager
from ...runtime.workers.thread_start import ThreadNotStarted, start_thread
from ...stages.config import EngineConfig
from ...stages.engine_settings import ModelImpl
from ...stages.errors import ConfigError
from ..config import ServerConfig
from ..http.listening import ListeningSockets
from . import standard_streams

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from ...stages.engine.engine import Engine
    from ..server.server import Server

log = get_logger("millrace.deploy")

MIN_OPEN_FILES = 48  # for the engine, its helpers, and some connections
MIN_MEMORY_BYTES = 1024 * 2**20  # for libraries and threads, without any model
STOP_S = 3.0  # after `lame_duck_s` and `shutdown_timeout_s`: the process ends then, whatever hangs
EARLY_S = 2.0  # from a signal during the start to the end of the process, whatever still loads
WAIT_S = 0.2  # for weights to load from local files, before the remaining imports; a download takes longer

Mode = Literal["inline", "split"]
MakeEngine = Callable[[EngineConfig], "AbstractAsyncContextManager[Engine]"]


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 0 after a stop by signal, even if requests were cut short."""
    is_elsewhere = engine_config.executor == "ray"
    mode = choose_mode(server_config.mode, engine_config.data_parallel_size, is_elsewhere=is_elsewhere)
    return run_with(options, engine_config, server_config, partial(_make_engine, mode))


def run_with(
    options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig, make_engine: MakeEngine
) -> int:
    """Runs the server with an engine of `make_engine`."""
    with_messages = server_config.log_error_messages
    configure(server_config.log_format, server_config.log_level, with_error_messages=with_messages)
    log_notes(options)
    gc.disable()  # until the server is ready: start-up objects live on, and scanning them takes a tenth of the start
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve(engine_config, server_config, make_engine, options.sources))
    finally:
        gc.unfreeze()
        gc.enable()


def log_notes(options: argparse.Namespace) -> None:
    """Logs what is to be told of the command line."""
    for name in options.trimmed:
        log.warning("setting.trimmed", name=name, source=options.sources[name])  # white space around a key
    for note in getattr(options, "notes", ()):  # flags of vLLM
        log.info("flag.accepted", flag=note.flag, ours=note.ours or None, reason=note.reason or None)


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    make_engine: MakeEngine,
    sources: Mapping[str, str] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, for `lame_duck_s` more, then drains. A second signal ends the process at once.

    `sources` maps each setting to its source, for the start-up log.
    """
    manager = ServiceManager.take(os.environ)
    check_limits()
    engine_config.check_files()
    server_config.check_folders()
    stop = StopSignals(server_config.lame_duck_s + server_config.shutdown_timeout_s + STOP_S)
    with closing(ListeningSockets.open(server_config)) as listening:  # first: what it needs may belong to another
        return await _serve(engine_config, server_config, make_engine, sources or {}, listening, stop, manager)


async def _serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    make_engine: MakeEngine,
    sources: Mapping[str, str],
    listening: ListeningSockets,
    stop: StopSignals,
    manager: ServiceManager,
) -> int:
    started: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
    serving = asyncio.ensure_future(_serve_engine(started, engine_config, make_engine, stop, manager))
    stop.on_early = serving.cancel
    try:
        await asyncio.sleep(0)  # the model begins to load, here or in the engine process
        from ..server.server import Server  # meanwhile, as this import takes half a second

        async with Server(server_config, listening, os.environ) as server:
            server.service.sources = sources
            started.set_result(server)
            return await serving
    except asyncio.CancelledError:
        if not stop.event.is_set():
            raise
        return 0  # stopped before there was anything to drain
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        stop.close()


async def _serve_engine(
    started: asyncio.Future[Server],
    engine_config: EngineConfig,
    make_engine: MakeEngine,
    stop: StopSignals,
    manager: ServiceManager,
) -> int:
    making = make_engine(engine_config)
    started.add_done_callback(partial(_show_progress, making))
    async with making as engine:
        server = await started
        server.attach(engine)
        engine.give_way()
        stop.on_early = None
        gc.collect()
        gc.freeze()  # the model and its modules live as long as the process: no collection needs to scan them
        gc.enable()
        _print_ready(server, engine.info.model_impl)
        manager.ready(f"{server.service.model_names[0]} on {server.url}")
        with _tells_that_it_moves(server, manager):
            await stop.event.wait()
            manager.stopping()
            if server.config.lame_duck_s:
                log.info("server.leaving", live=len(server.service.live), lame_duck_s=server.config.lame_duck_s)
                await server.leave()
            log.info("server.draining", live=len(server.service.live), timeout_s=server.config.shutdown_timeout_s)
            is_clean = await server.drain()
            await server.stop()
    log.info("server.stopped", is_clean=is_clean)
    return 0


@contextmanager
def _tells_that_it_moves(server: Server, manager: ServiceManager) -> Iterator[None]:
    """Calls `manager.alive` twice as often as it asks for, on this loop, while the server is not stuck."""
    loop, timer = asyncio.get_running_loop(), None

    def beat(interval_s: float) -> None:
        nonlocal timer
        if not server.service.is_stuck:
            manager.alive()
        timer = loop.call_later(interval_s, beat, interval_s)

    if manager.watchdog_s is not None:
        beat(manager.watchdog_s / 2)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def _show_progress(making: object, started: asyncio.Future[Server]) -> None:
    """Lets `/health` tell how far loading is, or what a front waits for, as soon as there is a server."""
    if not started.cancelled() and started.exception() is None:
        service = started.result().service
        service.load_progress = getattr(making, "load_progress", None)
        service.why_waiting = getattr(making, "why_waiting", service.why_waiting)


def _print_ready(server: Server, model_impl: ModelImpl) -> None:
    """Prints the ready line: JSON for a parent process, addresses for a person at a terminal."""
    names = list(server.service.model_names)
    line = {"event": "ready", "url": server.url, "models": names, "model_impl": model_impl, "pid": os.getpid()}
    text = _addresses(server, model_impl) if sys.stdout.isatty() else json.dumps(line, separators=(",", ":"))
    if (error := standard_streams.print_line(text)) is not None:
        log.warning("ready_line.not_printed", reason=error.strerror)


def _addresses(server: Server, model_impl: ModelImpl) -> str:
    """What one can open now, one address a line."""
    if server.config.uds is not None:
        return f"ready: {server.url}"
    root = server.url + server.config.root_path
    rows = {"API": f"{root}/v1", "dashboard": f"{root}/dashboard", "docs": f"{root}/docs"}
    if server.config.disable_docs:
        del rows["docs"]
    names = ", ".join(server.service.model_names)
    if model_impl == "transformers":
        names += " (through transformers)"
    return "\n".join([f"ready: model {names}", *(f"  {name:<10}{url}" for name, url in rows.items())])


def check_limits() -> None:
    """Raises the limit of open files. `ConfigError` if this process may have too few of them, or too little memory."""
    num_files, left = raise_open_files(), address_space_left()
    if num_files < MIN_OPEN_FILES:
        raise ConfigError(
            f"this process may open {num_files} files: must be at least {MIN_OPEN_FILES}; raise that with ulimit -n"
        )
    if left is not None and left < MIN_MEMORY_BYTES:
        raise ConfigError(
            f"this process may map {left >> 20} MiB more memory: must be at least {MIN_MEMORY_BYTES >> 20} MiB, and "
            f"what the model needs; raise that with {LIMIT_FLAGS}"
        )


class StopSignals:
    """Handles SIGTERM and SIGINT: the first signal sets `event`, the second ends the process with code 1.

    So does the time `limit_s` after the first. It needs no thread, and no loop that runs. While there is `on_early`,
    the process starts: it then ends with code 0 after `EARLY_S` at the latest, as there is nothing to drain, and a
    thread that loads a model cannot be ended.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self.event = asyncio.Event()
        self.on_early: Callable[[], Any] | None = None  # called instead of draining, while the engine starts
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.event.is_set():
            os._exit(1)
        self.event.set()
        loop = asyncio.get_running_loop()
        if self.on_early is None:
            self._timer = loop.call_later(self._limit_s, self._end)
        else:
            self._timer = loop.call_later(min(EARLY_S, self._limit_s), self._end_early)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s + 1.0)  # its signal ends the process if the loop is blocked
        if self.on_early is not None:
            self.on_early()

    def close(self) -> None:
        """Ends the time limit."""
        if self._timer is not None:
            self._timer.cancel()
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _end_early(self) -> None:
        log.info("server.start_abandoned", reason=f"what it began to load or to reach has not ended in {EARLY_S:g} s")
        shutdown(1.0)  # of the log
        os._exit(0)

    def _end(self) -> None:
        log.error("server.killed", reason=f"it did not stop within {self._limit_s:g} s")
        shutdown(1.0)  # of the log
        os._exit(1)


def choose_mode(
    requested: Literal["auto", "inline", "split"], num_engines: int = 1, *, is_elsewhere: bool = False
) -> Mode:
    """The requested mode; "auto" is "inline", the simpler one, on all machines, and "split" for several engines.

    With `is_elsewhere`, engines run where an executor places them, also a single one. Raises `ConfigError` for such
    engines, and for several, in this process.

    On two cores (Zen 4) "split" gains nothing: 1.02, 1.00 and 1.00 times the tokens/s of "inline" for SmolLM2's shape
    in W2, W4 and with 64 streams, and 0.98, 0.93 and 0.90 times for the bundled model with its short steps
    (tests/bench/results/split-mode-cpu.json). `tests/bench/split_mode.py` measures other machines.
    """
    if num_engines > 1 or is_elsewhere:
        if requested == "inline":
            setting = "executor = ray" if is_elsewhere else f"data_parallel_size = {num_engines}"
            message = f"mode = inline: {setting} has its engines in processes of their own"
            raise ConfigError(f"{message}; leave mode out")
        return "split"
    return "inline" if requested == "auto" else requested


def _make_engine(mode: Mode, config: EngineConfig) -> AbstractAsyncContextManager[Engine]:
    if mode == "split":
        _import_beside("aiohttp")
        if config.executor == "ray":
            from ..ray.ray_engine import RayEngine

            return RayEngine(config)
        if config.data_parallel_size > 1:
            from ...stages.fleet.fleet_engine import FleetEngine

            return FleetEngine(config)
        from ...stages.split.split_engine import SplitEngine

        return SplitEngine(config)
    # imports little, so that weights are packed during the remaining imports
    from ...runtime.startup.phases import Phases
    from ...stages.loading.early import EarlyLoading

    opening = EarlyLoading(config, Phases(time.monotonic))
    try:
        opening.wait_until_packing(WAIT_S)
        _import_beside("aiohttp")
        from ...stages.engine.engine import Engine
        from ..server import server  # noqa: F401  before the engine starts and measures its speed

        return Engine(config, opening=opening)
    except BaseException:
        opening.close()
        raise


def _import_beside(module: str) -> None:
    """Imports a module on a thread.

    For aiohttp, whose client reads the system's certificates twice: half of its import time, without the GIL.
    """
    with suppress(ThreadNotStarted):  # then it is imported later
        start_thread(Thread(target=import_module, args=(module,), name="millrace-import", daemon=True))
