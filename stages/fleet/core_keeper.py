"""Keeps each engine process of a fleet alive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.pipeline import Health
from ..exit.outboxes import Outboxes
from ..split.engine_core import EngineCore
from ..split.process_client import EngineClient
from ..split.process_keeper import ProcessKeeper
from .fleet_requests import FleetRequests

log = get_logger("millrace.stages")


class CoreKeeper(ProcessKeeper):
    """As `ProcessKeeper`, for one of several engine processes.

    Requests are resumed in the others at once, so `on_orphans` is called before a successor starts. Deaths of a process
    that has brought tokens do not count as those that give it up: its requests have come further, elsewhere. With
    `on_given_up` the engine ends all requests if this was the last process.
    """

    def __init__(
        self,
        env: Env,
        table: FleetRequests,
        core: EngineCore,
        exit: Outboxes,
        start_process: Callable[[], Awaitable[EngineClient]],
        on_death: Callable[[str], object],
        *,
        on_orphans: Callable[[], object],
        on_ready: Callable[[], object],
        on_given_up: Callable[[Health], object],
    ) -> None:
        super().__init__(env, table, core.requests, exit, start_process, on_death)
        self._core = core
        self._on_orphans, self._on_ready, self._on_given_up = on_orphans, on_ready, on_given_up
        self._step_at_start = core.last_step

    async def _replace(self, pid: int | None, how: str) -> EngineClient | None:
        began_s, how = self._note_death(pid, how)
        self._requests.hold(lambda prompt: False)  # what is kept for it goes to another one
        self._requests.release()
        guilty = self._table.note_death(self._core.index)
        has_served, self._step_at_start = self._core.last_step > self._step_at_start, self._core.last_step
        if guilty is not None:
            self._end_guilty(guilty)
        self._on_orphans()
        if guilty is None and not has_served:
            if self._is_worn_out():
                self._give_up(f"engine process {self._core.index} keeps ending, the last time by {how}")
                return None
            self._deaths_s.append(began_s)
        client = await self._start()
        if client is None or client.died.done():
            return client
        log.info("engine_process.replaced", took_s=round(self._env.now() - began_s, 3), engine=self._core.index)
        self.away = None
        self._on_ready()
        return client

    def _give_up(self, reason: str) -> None:
        self.away = Health("dead", stage="engine", reason=reason)
        log.error("engine_process.given_up", reason=reason, num_deaths=self.num_deaths, engine=self._core.index)
        guilty = self._table.note_death(self._core.index)  # nothing is there, unless a bug came before this was noted
        if guilty is not None:
            self._end_guilty(guilty)
        self._on_orphans()
        self._on_given_up(self.away)

    async def _resume(self, client: Any) -> int:
        raise AssertionError("requests are resumed by the fleet")
