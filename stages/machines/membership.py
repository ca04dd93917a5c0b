"""Which engines a front has: those that its sources name, each in a place of its own while it is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ...runtime.env.log import get_logger
from ...runtime.pipeline import Health
from ..errors import ConfigError
from ..fleet.hosts import MAX_ENGINES, MAX_TOLD, NOT_REACHED, Fleet, list_of_reasons
from ..split.protocol import EngineReady
from .engine_peers import EnginePeer, name_of
from .engine_sources import Address, EngineSource, SourceError

log = get_logger("millrace.stages")


class Members:
    """The engines that are named, by place. An engine at another address is another engine.

    Without sources that change there is a place for each engine, else there are `MAX_ENGINES`.
    """

    def __init__(self, sources: Sequence[EngineSource], make_peer: Callable[[Address], EnginePeer]) -> None:
        self._sources, self._make_peer = sources, make_peer
        self._named: dict[int, Sequence[Address]] = {}  # by source: what it named last
        self._errors: dict[int, str] = {}  # by source: why it cannot be read
        self._left_out: set[str] = set()  # engines for which there was no place
        self._leaving: dict[int, str] = {}  # by place
        self._fleet: Fleet | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_fixed = all(source.period_s is None for source in sources)
        self.peers: list[EnginePeer | None] = []  # by place; None: it is free
        self.unreached: dict[str, str] = {}  # why, by the name of an engine, while the front waits for its first one
        self.standard: tuple[str, EngineReady] | None = None  # the engine by which all are judged: its name, and it

    @classmethod
    def of(cls, peers: Sequence[EnginePeer]) -> Members:
        """These engines, for as long as the front lives."""
        members = cls((), _no_peer)
        members.peers = list(peers)
        return members

    @property
    def present(self) -> Mapping[int, EnginePeer]:
        """The engines that are named, by place."""
        return {place: peer for place, peer in enumerate(self.peers) if peer is not None and place not in self._leaving}

    # -- before the front starts

    async def open(self) -> None:
        """Looks at all sources once. Raises `ConfigError` for too many engines, or one that is named twice."""
        await asyncio.gather(*(self._look(number) for number in range(len(self._sources))))
        names = [name_of(address) for named in self._named.values() for address in named]
        if self.is_fixed:
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ConfigError(f"engine {twice} is named twice; name each once")
            if len(names) > MAX_ENGINES:
                raise ConfigError(f"{len(names)} engines: a front has at most {MAX_ENGINES}; start more fronts")
        self.peers = [None] * (len(names) if self.is_fixed else MAX_ENGINES)
        self._change()

    def note_unreached(self, name: str, reason: str) -> None:
        """An engine cannot be reached yet, for this reason."""
        self.unreached[name] = reason

    @property
    def why_waiting(self) -> Health | None:
        """Why the front has no engine yet; None: it is not known, or before `open`."""
        if not self.peers:
            return None
        if not any(peer is not None for peer in self.peers):
            errors = [error for error in self._errors.values() if error]
            unnamed = "no engine is named yet"
            details = "; ".join([unnamed, *errors[:MAX_TOLD]])
            return Health("loading", stage="engine", reason=unnamed, details=details)
        if not self.unreached:
            return None
        details = list_of_reasons(list(self.unreached.values()))
        return Health("loading", stage="engine", reason=NOT_REACHED, details=details)

    @property
    def period_s(self) -> float | None:
        """Of the source that is looked at most often."""
        return min((source.period_s for source in self._sources if source.period_s is not None), default=None)

    async def look_again(self) -> None:
        """Looks at the sources that may have changed, before `follow`."""
        changing = [number for number, source in enumerate(self._sources) if source.period_s is not None]
        await asyncio.gather(*map(self._look, changing))
        self._change()

    # -- while it runs

    def follow(self, fleet: Fleet) -> None:
        """From now on tells the fleet of engines that come and go, until `aclose`."""
        self._fleet = fleet
        for number, source in enumerate(self._sources):
            if source.period_s is not None:
                self._start(self._follow(number, source.period_s), f"engines of {source.text}")

    async def aclose(self) -> None:
        """Ends its tasks. Idempotent."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, number: int, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            before = self._named.get(number)
            await self._look(number)
            if self._named.get(number) != before:
                self._change()

    async def _look(self, number: int) -> None:
        source, error = self._sources[number], ""
        try:
            self._named[number] = await source.look()
        except SourceError as failed:
            error = str(failed)
        if error and error != self._errors.get(number):
            log.warning("engines.unknown", source=source.text, reason=error)
        self._errors[number] = error

    def _change(self) -> None:
        """Compares what the sources name with the places."""
        wanted = {name_of(address): address for named in self._named.values() for address in named}
        present = {peer.name: place for place, peer in self.present.items()}
        for name in present.keys() - wanted.keys():
            self._leave(present[name], name)
        new = [name for name in wanted if name not in present]
        free = [place for place, peer in enumerate(self.peers) if peer is None]
        for name, place in zip(new, free, strict=False):
            self.peers[place] = self._make_peer(wanted[name])
            log.info("engine.named", engine=name, place=place)
            if self._fleet is not None:
                self._fleet.join(place)
        left_out = set(new[len(free) :])
        if left_out - self._left_out:
            reason = f"a front has at most {MAX_ENGINES} engines; start more fronts"
            log.error("engines.left_out", engines=sorted(left_out), reason=reason)
        self._left_out = left_out

    def _leave(self, place: int, name: str) -> None:
        log.info("engine.unnamed", engine=name, place=place)
        if self._fleet is None:
            self.peers[place] = None
        else:
            self._leaving[place] = name
            self._start(self._free(self._fleet, place), f"end of engine {name}")

    async def _free(self, fleet: Fleet, place: int) -> None:
        """The place is free once the engine has none of this front's requests."""
        await fleet.leave(place)
        self.peers[place] = None
        del self._leaving[place]
        self._change()


def _no_peer(address: Address) -> EnginePeer:
    raise AssertionError("no source names it")
