"""Engine processes that go by plan, or by order: they get no new requests, and nothing of it counts as a death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ..split.engine_core import STOP_S, EngineCore
from ..split.protocol import Drain
from .core_set import CoreSet
from .fleet_requests import FleetRequests

LOOK_S = 0.02  # between two looks at the requests of a process
EMPTY_S = 0.3  # without a request, until a process counts as empty: a beam search has none between two of its steps

log = get_logger("millrace.stages")


@dataclass(slots=True)
class Departure:
    """How a process goes: `moves` its requests to others as soon as one takes requests, or `at_once`."""

    task: asyncio.Task[None]
    moves: bool = False
    at_once: bool = False


class Departures:
    """Ends the use of engine processes. `on_parted` is called with each whose link is closed."""

    def __init__(
        self, env: Env, table: FleetRequests, cores: CoreSet, on_parted: Callable[[EngineCore], object]
    ) -> None:
        self._env, self._table, self._cores, self._on_parted = env, table, cores, on_parted
        self._departures: dict[int, Departure] = {}

    def begin(self, core: EngineCore, *, moves: bool = False, at_once: bool = False) -> asyncio.Task[None]:
        """From now on a process gets no new requests; its link is closed once it has none, or they have moved.

        Returns the task of that. Called again, it adds to what was said.
        """
        core.is_draining = True
        core.is_parting |= at_once
        self._cores.note_change()
        departure = self._departures.get(core.index)
        if departure is None:
            name = f"departure of engine {core.index}"
            task = asyncio.get_running_loop().create_task(self._part_in_time(core), name=name)
            departure = self._departures[core.index] = Departure(task)
        departure.moves |= moves
        departure.at_once |= at_once
        return departure.task

    async def stop(self) -> None:
        """Ends its tasks. Idempotent."""
        tasks = [departure.task for departure in self._departures.values()]
        self._departures.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _part_in_time(self, core: EngineCore) -> None:
        departure, client = self._departures[core.index], core.client
        empty_since_s, num_come = self._env.now(), self._table.num_come(core.index)
        # one that died meanwhile has a client again once it is reached: nothing of it is kept
        while not (departure.at_once or core.client is not client):
            is_idle = self._table.is_idle(core.index)
            if (is_idle or departure.moves) and self._cores.stands_in(core):
                break
            if not is_idle or self._table.num_come(core.index) != num_come:
                empty_since_s, num_come = self._env.now(), self._table.num_come(core.index)
            elif not core.is_serving or self._env.now() - empty_since_s >= EMPTY_S:
                break
            await self._env.sleep(LOOK_S)
        try:
            await self._part(core)
        except Exception as error:  # a bug here: the place would be lost
            log.error("engine_process.not_parted", engine=core.index, error=type(error).__name__, exc_info=error)
        self._departures.pop(core.index, None)
        self._on_parted(core)

    async def _part(self, core: EngineCore) -> None:
        """Closes the link of a process. Requests that are there go on in others, where they stopped."""
        num_moved = self._table.load_of(core.index).num_requests
        core.is_parting = True
        keeper, core.keeper = core.keeper, None
        if keeper is not None:
            await keeper.stop()
        if core.client is not None:
            if num_moved:
                core.client.cut()  # at once: they wait
            await core.client.stop(STOP_S)
            core.client = None
        core.requests.hold(lambda prompt: False)  # what is kept for it goes to another one
        core.requests.release()
        self._table.note_departure(core.index)
        core.forget_process()
        log.info("engine_process.parted", engine=core.index, num_moved=num_moved)


class DrainOrders:
    """Orders to engines elsewhere to drain. Each stands until its engine has obeyed it, or is another process.

    An order may be lost with a link, or be given while there is none: then it is sent once the link is there again.
    """

    def __init__(self) -> None:
        self._orders: dict[int, str] = {}  # by place: how, as in `Drain`

    def give(self, core: EngineCore, by: str) -> None:
        """From now on the engine gets no new requests."""
        self._orders[core.index] = by
        self._send(core)

    def note_obeyed(self, core: EngineCore) -> None:
        """The engine drains, or has gone."""
        self._orders.pop(core.index, None)

    def repeat(self, core: EngineCore) -> None:
        """The engine was reached again. What was ordered of the process before it is done if this is another one."""
        if not core.has_come_back:
            self.note_obeyed(core)
        elif core.index in self._orders:
            self._send(core)

    def _send(self, core: EngineCore) -> None:
        by = self._orders[core.index]
        core.is_draining = True
        core.post(Drain(by))  # it tells all its fronts
        log.info("engine.drain_sent", engine=core.index, by=by, is_reached=core.is_serving)
