"""Bugs of a fleet to plant: each is a context manager that puts one into the real classes. Seeds must find them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from millrace.runtime.channel import Channel
from millrace.runtime.processes.frames import LinkError
from millrace.stages.fleet import fleet_processes
from millrace.stages.fleet.fleet_requests import FleetRequests
from millrace.stages.fleet.merged_channel import CoreEnd, CoreTokens, MergedChannel
from millrace.stages.fleet.resuming import Resuming
from millrace.stages.fleet.stage import Merge
from millrace.stages.split.process_client import EngineClient
from millrace.stages.split.remote_core import RemoteCore
from tests.simulation.fleet import run_fleet_seed
from tests.simulation.machines import run_machines_seed
from tests.simulation.planting import Bug, changed
from tests.simulation.traffic import run_traffic_seed


def resumed_from_the_start() -> AbstractContextManager[None]:
    """Requests are resumed without what they have generated."""

    def change(prompts_to_resume: Any) -> Any:
        def lossy(self: FleetRequests, *arguments: Any) -> Any:
            nothing = np.zeros(0, np.int32)
            found = prompts_to_resume(self, *arguments)
            return [replace(one, generated=dict.fromkeys(one.generated or {}, nothing)) for one in found]

        return lossy

    return changed(FleetRequests, "prompts_to_resume", change)


def late_frame_taken() -> AbstractContextManager[None]:
    """The last step of a lost link is taken once more, after its end."""

    def change(unbind: Any) -> Any:
        def late(self: CoreEnd) -> None:
            unbind(self)
            last = [item.tokens for item in self._merged.queued if item.core == self._core][-1:]
            for step in last:
                if self._on_arrival is not None:
                    self._on_arrival(step)
                self._put(step)

        return late

    return changed(CoreEnd, "unbind", change)


def link_open_while_requests_move() -> AbstractContextManager[None]:
    """A process that is to be replaced counts as dead, and its link stays open."""

    def change(kill: Any) -> Any:
        def hasty(self: EngineClient) -> None:
            if not self._started.done():
                kill(self)
            elif not self.died.done():
                self.died.set_result("it hangs")

        return hasty

    return changed(EngineClient, "kill", change)


def merged_by_core() -> AbstractContextManager[None]:
    """Steps are merged core by core, and not in the order of their arrival."""

    def change(recv_all: Any) -> Any:
        return lambda self, now=None: sorted(recv_all(self, now), key=lambda item: -item.core)

    return changed(MergedChannel, "recv_all", change)


def noted_when_merged() -> AbstractContextManager[None]:
    """Tokens are noted when they are merged, so those on the way are not known when their process dies."""

    @contextmanager
    def planted() -> Iterator[None]:
        with MonkeyPatch.context() as patch:
            recv_all = MergedChannel.recv_all

            def arrive(self: CoreEnd, item: Any) -> None:
                self._num_owned += 1
                self._put(item)

            def note_and_recv(self: MergedChannel, now: float | None = None) -> list[CoreTokens]:
                items = recv_all(self, now)
                for item in items:
                    noting = self._ends[item.core]._on_arrival
                    assert noting is not None
                    noting(item.tokens)
                return items

            patch.setattr(CoreEnd, "arrive", arrive)
            patch.setattr(MergedChannel, "recv_all", note_and_recv)
            yield

    return planted()


def slots_not_shifted() -> AbstractContextManager[None]:
    """The slots of all processes are the same ones."""
    return changed(Merge, "shifted", lambda shifted: staticmethod(lambda step, by: step))


def credits_of_the_fleet() -> AbstractContextManager[None]:
    """The first link gets the credits of all."""

    def change(recv_all: Any) -> Any:
        def unfair(self: MergedChannel, now: float | None = None) -> list[CoreTokens]:
            items: list[CoreTokens] = Channel.recv_all(self, now)
            for end in self._ends:
                count, end._num_owned = end._num_owned, 0
                self._ends[0].num_owed += count
            if items and self._ends[0]._link is not None:
                self._ends[0]._link.wake()
            return items

        return unfair

    return changed(MergedChannel, "recv_all", change)


def end_told_to_another() -> AbstractContextManager[None]:
    """Another process is told that a request has ended."""

    def change(ended: Any) -> Any:
        def misled(self: RemoteCore, *arguments: Any) -> None:
            ended(self, *arguments)
            num_cores = len(self.processes.cores)
            self._gone[-1:] = [(a, b, None if c is None else (c + 1) % num_cores) for a, b, c in self._gone[-1:]]

        return misled

    return changed(RemoteCore, "_request_ended", change)


def death_of_another() -> AbstractContextManager[None]:
    """The requests of another process are resumed when one dies."""

    def change(note_death: Any) -> Any:
        return lambda self, core=0: note_death(self, (core + 1) % len(self._work))

    return changed(FleetRequests, "note_death", change)


def all_suspects_at_once() -> AbstractContextManager[None]:
    """A suspect's trial is over as soon as it was sent."""

    def change(_: Any) -> Any:
        async def hasty(self: Resuming, core: Any, suspects: Sequence[str]) -> None:
            for request_id in suspects:
                self._table.begin_trial(request_id, core.index)
                await self._send(request_id, core)
                self._table.end_trial(request_id)

        return hasty

    return changed(Resuming, "_try", change)


def silent_link_left_open() -> AbstractContextManager[None]:
    """The requests of a silent machine move, and its link stays open."""

    def change(leave: Any) -> Any:
        return lambda self, reason: self._lost(LinkError(reason))

    return changed(EngineClient, "leave", change)


def searches_not_pinned() -> AbstractContextManager[None]:
    """Each step of a beam search goes to any model, as a request of its own."""
    return changed(fleet_processes, "_search_of", lambda search_of: lambda exit, request_id: None)


TRAFFIC_BUGS: dict[str, Bug] = {searches_not_pinned.__name__: searches_not_pinned}
MACHINE_BUGS: dict[str, Bug] = {silent_link_left_open.__name__: silent_link_left_open}
FLEET_BUGS: dict[str, Bug] = {
    bug.__name__: bug
    for bug in (
        resumed_from_the_start,
        late_frame_taken,
        link_open_while_requests_move,
        merged_by_core,
        noted_when_merged,
        slots_not_shifted,
        credits_of_the_fleet,
        end_told_to_another,
        death_of_another,
        all_suspects_at_once,
    )
}


def find_fleet_bug(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed that finds the planted bug, and what it says; or None."""
    run_seed = run_machines_seed if name in MACHINE_BUGS else run_fleet_seed
    run_seed = run_traffic_seed if name in TRAFFIC_BUGS else run_seed
    with (FLEET_BUGS | MACHINE_BUGS | TRAFFIC_BUGS)[name]():
        for seed in seeds:
            try:
                run_seed(seed)
            except Exception as error:
                assert not isinstance(error, (AttributeError, TypeError, NameError)), "the bug itself is broken"
                return seed, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None
