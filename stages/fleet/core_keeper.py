"""Keeps each engine process of a fleet alive."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from ...runtime.env.awake_time import AwakeTimer
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.pipeline import Health
from ..exit.outboxes import Outboxes
from ..split.engine_core import EngineCore
from ..split.process_client import EngineClient
from ..split.process_keeper import ProcessKeeper
from .fleet_requests import FleetRequests

NUM_AT_ONCE = 2  # deaths in a row after each of which a successor is started at once
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0  # before a start after more of them: each pause is twice the last one
HEALTHY_S = 1.0  # life that ends a row of deaths; a process whose start took longer must have lived longer than that
HEALTHY_LINK_S = 10.0  # likewise, of a connection to an engine elsewhere, however long that was away before
DOUBT_S = 5.0  # for a connection to be there again after its end, before that counts as the end of the engine
FIRST_RETRY_S, LONGEST_RETRY_S = 60.0, 300.0  # between two starts of a process that was given up

log = get_logger("millrace.stages")


class RestartPauses:
    """How long to wait before a process is started again: longer with each death that came soon after its start.

    So restarts take at most about half of the time. A connection to an engine elsewhere counts as a process. Does not
    depend on a clock: callers tell the times.
    """

    def __init__(self, healthy_s: float = HEALTHY_S, *, starts_cost: bool = True) -> None:
        """`starts_cost`: a start takes work here, so it must be shorter than the life after it."""
        self.num_retries = 0  # starts after it was given up, since it last was healthy
        self._healthy_s, self._starts_cost = healthy_s, starts_cost
        self._num_deaths = 0  # in a row
        self._ready_s: float | None = None  # when the last start was over; None: nothing lives
        self._start_s = 0.0  # how long it took

    def note_ready(self, now_s: float, start_s: float) -> None:
        """A process serves; its start took `start_s`."""
        self._ready_s, self._start_s = now_s, start_s if self._starts_cost else 0.0

    def note_death(self, now_s: float) -> float:
        """The process has ended, by plan or not. Returns the pause before the next start; 0 if none had started."""
        if self._ready_s is None:
            return 0.0
        if now_s - self._ready_s >= max(self._healthy_s, self._start_s):
            self._num_deaths = self.num_retries = 0
        self._num_deaths, self._ready_s = self._num_deaths + 1, None
        num_pauses = self.num_pauses
        return 0.0 if num_pauses <= 0 else min(FIRST_BACKOFF_S * 2.0 ** min(num_pauses - 1, 10), LONGEST_BACKOFF_S)

    @property
    def num_pauses(self) -> int:
        """In this row of deaths; 0 or less: there was none."""
        return self._num_deaths - NUM_AT_ONCE

    def next_retry_s(self) -> float:
        """The pause before the next start of a process that was given up."""
        self.num_retries += 1
        return min(FIRST_RETRY_S * 2.0 ** min(self.num_retries - 1, 10), LONGEST_RETRY_S)


def link_pauses() -> RestartPauses:
    """Those of connections to an engine elsewhere: their start lasts while that is away, and costs nothing."""
    return RestartPauses(HEALTHY_LINK_S, starts_cost=False)


class CoreKeeper(ProcessKeeper):
    """As `ProcessKeeper`, for one of several engine processes.

    Requests are resumed in the others at once, so `on_orphans` is called before a successor starts. Deaths of a process
    that has brought tokens do not count as those that give it up: its requests have come further, elsewhere. Nor does
    the end of a connection to one that lives. With `on_given_up` the engine ends all requests if this was the last
    process. One that was given up is tried again every few minutes, and given up again if that fails. `start` without a
    client starts the first process, too. `pauses` are those of the place of the process, which may have had other
    keepers.
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
        pauses: RestartPauses | None = None,
    ) -> None:
        super().__init__(env, table, core.requests, exit, start_process, on_death, engine=core.index)
        self._core, self._fleet_table = core, table
        self._doubted: str | None = None  # the request that ended the engine, if the engine has ended
        self._on_orphans, self._on_ready, self._on_given_up = on_orphans, on_ready, on_given_up
        self._step_at_start = core.last_step
        self._pauses = RestartPauses() if pauses is None else pauses

    def start(self, client: EngineClient | None) -> None:
        if client is None:
            self.away = Health("loading", stage="engine", reason="the engine was not reached yet")
        else:
            self._pauses.note_ready(self._env.now(), 0.0)
        super().start(client)

    def note_unreached(self, reason: str) -> None:
        """Its engine cannot be reached yet, for this reason."""
        if self.away is not None and self.away.state == "loading":
            self.away = Health("loading", stage="engine", reason=reason)

    async def stop(self) -> None:
        """As in `ProcessKeeper`. The engine does not come back any more, so a request in doubt ends."""
        await super().stop()
        if self._doubted is not None:
            self._end_doubt(self._doubted)

    async def _keep(self, client: EngineClient | None) -> None:
        if client is None:
            client = await self._join()
        while True:
            await super()._keep(client)
            client = await self._start_slowly()

    async def _join(self) -> EngineClient | None:
        """Starts the first process, or the first after one that went by plan. None if that is given up."""
        await self._wait(self._pauses.note_death(self._env.now()), "by plan")
        start_s = self._env.now()
        client = await self._start()
        if client is not None:
            self._has_started(client, start_s, start_s)
        return client

    async def _replace(self, pid: int | None, how: str) -> EngineClient | None:
        if self._core.is_parting:
            await asyncio.Future[None]()  # it is no death, and this keeper is about to be stopped
        began_s, how = self._note_death(pid, how)
        self._requests.hold(lambda prompt: False)  # what is kept for it goes to another one
        self._requests.release()
        guilty = self._table.note_death(self._core.index)
        has_served, self._step_at_start = self._core.last_step > self._step_at_start, self._core.last_step
        if guilty is not None:
            self._judge(guilty)
        self._on_orphans()
        if guilty is None:
            pause_s = self._pauses.note_death(began_s)
            if not has_served:
                if self._pauses.num_retries or self._is_worn_out():
                    self._give_up(f"engine process {self._core.index} keeps ending, the last time by {how}")
                    return None
                self._deaths_s.append(began_s)
            await self._wait(pause_s, how)
        start_s = self._env.now()
        client = await self._start()
        if client is not None:
            self._has_started(client, start_s, began_s)
        return client

    def _judge(self, guilty: str) -> None:
        """Ends the request that an engine died of; if perhaps only its connection ended, after a while."""
        if not self._core.may_come_back:
            return self._end_guilty(guilty)
        self._fleet_table.doubt(guilty)
        self._doubted = guilty
        AwakeTimer(DOUBT_S, self._end_doubt, guilty)

    def _end_doubt(self, guilty: str) -> None:
        """The engine has not come back."""
        if self._doubted == guilty:
            self._doubted = None
            self._end_guilty(guilty)

    async def _wait(self, pause_s: float, how: str) -> None:
        """Waits before a successor is started, so that a process that ends soon does not only start."""
        if pause_s > 0.0:
            if self._pauses.num_pauses == 1:  # once in a row of deaths
                most = {"pause_s": pause_s, "longest_pause_s": LONGEST_BACKOFF_S}
                log.warning("engine_process.backed_off", engine=self._core.index, how=how, **most)
            reason = f"engine processes end soon after their start ({how}); the next one starts"
            self.away = Health("loading", stage="engine", reason=f"{reason} in {pause_s:g} s")
            await self._env.sleep(pause_s)
            self.away = Health("loading", stage="engine", reason=f"{reason} now")

    async def _start_slowly(self) -> EngineClient:
        """Starts a process that was given up, after a pause of minutes, until one is ready."""
        assert self.away is not None
        given_up, began_s = self.away, self._env.now()
        for attempt in itertools.count(1):
            pause_s = self._pauses.next_retry_s()
            log.info("engine_process.retry_planned", engine=self._core.index, pause_s=pause_s)
            await self._env.sleep(pause_s)
            start_s = self._env.now()
            self.away = Health("loading", stage="engine", reason=f"{given_up.reason}; it is tried again")
            try:
                client = await self._start_process()
            except Exception as error:  # as in `_start`
                self._note_failed_start(error, attempt)
                self.away = given_up
                self._on_given_up(given_up)
                continue
            self._failed_start = None
            self._has_started(client, start_s, began_s)
            break
        return client

    def _has_started(self, client: EngineClient, start_s: float, began_s: float) -> None:
        """A process is ready, whose start began at `start_s`; the last one had gone at `began_s`."""
        now_s = self._env.now()
        self._pauses.note_ready(now_s, now_s - start_s)
        if self._core.has_come_back:
            self._doubted = None
            self._fleet_table.note_return(self._core.index)
            if self._deaths_s and self._deaths_s[-1] == began_s:
                self._deaths_s.pop()
        else:
            self._fleet_table.note_successor(self._core.index)
            if self._doubted is not None:
                self._end_doubt(self._doubted)
        if client.died.done():
            return
        log.info("engine_process.replaced", engine=self._core.index, took_s=round(now_s - began_s, 3))
        self.away = None
        self._on_ready()

    def _give_up(self, reason: str) -> None:
        self.away = Health("dead", stage="engine", reason=reason)
        log.error("engine_process.given_up", engine=self._core.index, reason=reason, num_deaths=self.num_deaths)
        guilty = self._table.note_death(self._core.index)  # nothing is there, unless a bug came before this was noted
        if guilty is not None:
            self._end_guilty(guilty)
        self._on_orphans()
        self._on_given_up(self.away)

    async def _resume(self, client: Any) -> int:
        raise AssertionError("requests are resumed by the fleet")
