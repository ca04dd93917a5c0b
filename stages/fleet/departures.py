"""Engine processes that go by plan: they get no new requests, and nothing of it counts as a death."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ..split.engine_core import STOP_S, EngineCore
from .core_set import CoreSet
from .fleet_requests import FleetRequests

LOOK_S = 0.02  # between two looks at the requests of a process

log = get_logger("millrace.stages")


class Departures:
    """Ends the use of engine processes. `on_parted` is called with each whose link is closed."""

    def __init__(
        self, env: Env, table: FleetRequests, cores: CoreSet, on_parted: Callable[[EngineCore], object]
    ) -> None:
        self._env, self._table, self._cores, self._on_parted = env, table, cores, on_parted

    async def finish(self, core: EngineCore, limit_s: float | None = None) -> None:
        """Gives a process no new requests, and closes its link once it has none.

        After `limit_s` its requests go on in other processes, as soon as one takes requests.
        """
        core.is_draining = True
        self._cores.note_change()
        began_s = self._env.now()
        while not self._table.is_idle(core.index):
            if limit_s is not None and self._env.now() - began_s >= limit_s and self._cores.serving():
                break
            await self._env.sleep(LOOK_S)
        await self.part(core)

    async def part(self, core: EngineCore) -> None:
        """Closes the link of a process. Requests that are there go on in others, where they stopped."""
        num_moved = self._table.load_of(core.index).num_requests
        keeper, core.keeper = core.keeper, None
        if keeper is not None:
            await keeper.stop()
        if core.client is not None:
            await core.client.stop(0.0 if num_moved else STOP_S)
            core.client = None
        core.requests.hold(lambda prompt: False)  # what is kept for it goes to another one
        core.requests.release()
        self._table.note_departure(core.index)
        core.forget_process()
        log.info("engine_process.parted", engine=core.index, num_moved=num_moved)
        self._on_parted(core)
