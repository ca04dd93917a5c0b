"""The actor that runs an engine process's code in its own process. Ray imports this module on the actor's node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...runtime.env.loops import loop_factory
from ...runtime.processes.auth import FleetKey
from ...runtime.processes.tcp import dial

if TYPE_CHECKING:
    from ...runtime.processes.transport import SocketTransport

DIAL_S = 20.0  # to reach the front process and to prove the key


class EngineActor:
    """Dials the front process, and then is an engine process until the link ends. Call `join`, then `run`.

    These are all its methods, and plain values all that crosses: the rest goes over the link.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._transport: SocketTransport | None = None
        self._link_timeout_s = 0.0

    def join(self, host: str, port: int, secret: bytes, link_timeout_s: float, environment: Mapping[str, str]) -> int:
        """Connects to the front process. Returns the id of this process. Raises `AuthError`, and OSError."""
        os.environ.update(environment)  # before anything reads it
        from ...stages.split import engine_process  # noqa: F401  now, as the link's silence counts from then on

        self._link_timeout_s = link_timeout_s
        self._transport = self._runner.run(dial(host, port, FleetKey(secret), DIAL_S))
        return os.getpid()

    def run(self) -> int:
        """Runs the engine until the front process ends it or is gone. Returns the exit code."""
        from ...stages.split.engine_process import EngineProcess, load

        async def live() -> tuple[int, bool]:
            assert self._transport is not None
            process = EngineProcess(self._transport.sock, (), load, link_timeout_s=self._link_timeout_s)
            return await process.run(), process.is_device_lost

        with self._runner as runner:
            code, is_device_lost = runner.run(live())
        if is_device_lost:
            os._exit(code)  # at once: the driver's own end may wait for the device
        return code
