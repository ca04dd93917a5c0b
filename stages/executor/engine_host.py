"""Where an engine process runs, for executors that start it elsewhere than as a child of the front process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from ...runtime.processes.transport import Transport


class EngineHost(Protocol):
    """A process that runs an engine, seen from the front process. All talk goes over `transport`."""

    @property
    def link_timeout_s(self) -> float | None:
        """As of `Link`."""

    @property
    def death_s(self) -> float:
        """From the end of the link to that of the process, at most: then it is killed."""

    @property
    def transport(self) -> Transport:
        """The connection to it."""

    @property
    def pid(self) -> int:
        """Its id, on the machine where it runs."""

    async def wait(self) -> str:
        """Waits for its end and describes it, as "exit status 1". After `kill` this takes a moment."""

    def kill(self) -> None:
        """Kills it. Does nothing if it has ended."""


StartHost = Callable[[], Awaitable[EngineHost]]  # raises `ConfigError`, `NotStartedError`, and OSError
