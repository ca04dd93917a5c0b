"""An engine process that the fronts of one server share, at a Unix socket in their private folder.

The supervisor starts it as `python -P -m` and this module's name; see `deploy/front_processes`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import Any

from ....model.errors import ModelError
from ....runtime.env import log as logs
from ....runtime.env.env import Env, LiveEnv
from ....runtime.env.log import get_logger
from ....runtime.env.loops import loop_factory
from ....runtime.processes.child import joined
from ....runtime.startup.phases import Phases
from ....runtime.workers.thread_start import ThreadNotStarted
from ....stages.config import EngineConfig
from ....stages.engine.warm_up import warm_up
from ....stages.errors import ConfigError
from ....stages.machines.engine_server import EngineServer
from ....stages.machines.route_engine import warm_up_own
from ....stages.split.engine_process import load
from ...front_processes.front_member import ChildLink
from ...front_processes.sockets import UnixListener
from ...front_processes.words import CoreLoading, CoreReady, CoreSetup, StartFailed

PROGRESS_S = 0.5  # between two messages about loading

log = get_logger("millrace.deploy")


def main(arguments: Sequence[str]) -> int:
    """Runs one engine until the supervisor stops it. Returns the exit code."""
    sock, _ = joined(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code, is_device_lost = runner.run(_live(sock))
    if is_device_lost:
        os._exit(code)  # at once: the driver's own end may wait for the device
    return code


async def _live(sock: socket) -> tuple[int, bool]:
    link = ChildLink(sock)
    link.start()
    setup: CoreSetup = await link.setup
    if setup.log is not None:
        logs.configure(**setup.log)
    if setup.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cpus)  # before any thread that computes
    env = LiveEnv(setup.config.seed)
    engine: EngineServer | None = None
    try:
        limits: dict[str, Any] = {"link_timeout_s": setup.link_timeout_s}
        engine = EngineServer(setup.config, env, _load_share(setup.num_engines), prefix_key=setup.prefix_key, **limits)
        listener = UnixListener(Path(setup.path), engine.take)
        if not await _started(link, engine):
            return 0, False
        listener.start()
        link.post(CoreReady())
        code = await _run(link, engine, listener, setup.shutdown_timeout_s)
        return code, engine.is_device_lost
    except (ConfigError, ModelError) as error:
        link.post(StartFailed("ConfigError" if isinstance(error, ConfigError) else "ModelError", str(error)))
    except (ThreadNotStarted, OSError, MemoryError) as error:
        link.post(StartFailed(type(error).__name__, str(error) or "no memory"))
    except Exception as error:
        log.error("engine_process.not_started", error=type(error).__name__, exc_info=error)
        link.post(StartFailed(type(error).__name__, f"{type(error).__name__}; see the server's log"))
    finally:
        if engine is not None:
            await engine.aclose()
        await env.aclose()
        link.close()
    return 1, engine is not None and engine.is_device_lost


async def _started(link: ChildLink, engine: EngineServer) -> bool:
    """Loads the model and warms up. False if the process is to stop before that is done. Raises what prevents it."""

    async def start() -> None:
        await engine.start()
        await warm_up_own(engine, warm_up)
        gc.collect()
        gc.freeze()

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            link.post(CoreLoading(engine.load_progress.state()))

    starting, telling = asyncio.ensure_future(start()), asyncio.ensure_future(tell())
    stopping = asyncio.ensure_future(link.stopping.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        starting.result()
        return True
    finally:
        for task in (starting, telling, stopping):
            task.cancel()
        await asyncio.wait([starting, telling, stopping])


async def _run(link: ChildLink, engine: EngineServer, listener: UnixListener, timeout_s: float) -> int:
    """Serves fronts until the supervisor says stop, or the step loop is dead."""
    try:
        if not await engine.serve_until(link.stopping):
            return 1
    finally:
        listener.close()
    await engine.drain(timeout_s)
    return 0


def _load_share(num_engines: int) -> Any:
    """Loads a model with a share of this machine's memory. Refuses those that fronts cannot share."""

    def load_share(config: EngineConfig, env: Env, phases: Phases) -> Any:
        loaded, device = load(replace(config, data_parallel_size=num_engines), env, phases)
        if not loaded.info.num_blocks:
            raise ConfigError("front_processes: must be 1 for an encoder model, which generates nothing")
        return loaded, device

    return load_share


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
