"""The engine processes of a fleet, and which of them gets a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..messages import TokenRequest
from ..routing.router import RoutedRequest
from ..split.engine_core import EngineCore
from .dispatcher import CoreLoad, choose
from .fleet_requests import FleetRequests
from .fleet_router import FleetRouter
from .traffic.fleet_traffic import FleetTraffic


class CoreSet:
    """Sends requests to engine processes. All prompts of a request go to the same one.

    A send never waits, so a process is not lost between its choice and the send.
    """

    def __init__(
        self,
        cores: Sequence[EngineCore],
        table: FleetRequests,
        router: FleetRouter | None = None,
        traffic: FleetTraffic | None = None,
    ) -> None:
        """`router` None: the process with the least work gets a request."""
        self.cores, self._table, self._router = cores, table, router
        self._traffic = FleetTraffic() if traffic is None else traffic
        self.only: EngineCore | None = None  # that gets all requests, during its warm-up
        self.on_waiting: Callable[[], object] = lambda: None  # a request waits in the table, to be sent as others go on
        self.next_change = asyncio.Event()
        for core in cores:
            core.requests.on_room = self.note_change

    def serving(self) -> list[EngineCore]:
        """Those that take requests of clients."""
        taking = [core for core in self.cores if core.is_serving and not core.is_draining]
        return self._of_clients(taking)

    def place(self, prompt: TokenRequest) -> bool:
        """Sends a prompt where the others of its request are, or to the process that the router chooses.

        False if no process takes it now. A prompt whose request waits to be resumed waits with it, and so does a step
        of a beam search that no process with the search's model takes: those behind it may go to others. While all
        processes with that model drain, the step goes to one of them, as what is there ends there.
        """
        routed, loads, split = None, list[CoreLoad](), None
        if prompt.request_id not in self._table:
            adapter, model = adapter_of(prompt), self._table.model_of(prompt.request_id)
            taking = self._of_begun(adapter, model)
            if not taking and model is not None and self._candidates(adapter):
                self._table.sent(prompt, None)
                self.on_waiting()
                return True
            cores, split = self._traffic.choose(prompt, taking)
            if not (loads := self._loads(cores)):
                return False
            routed = None if self._router is None else self._router.routed(prompt)
            index = choose(loads) if self._router is None or routed is None else self._router.choose(routed, loads)
        elif (index := self._table.core_of(prompt.request_id)) is None:
            self._table.sent(prompt, None)
            return True
        is_sent = index is not None and self.send(prompt, self.cores[index], routed)
        if is_sent and index is not None and self._router is not None and routed is not None:
            self._router.note_choice(prompt.request_id, index, routed, loads)
        if is_sent and split is not None:
            self._traffic.note_sent(prompt.request_id, split)
        if is_sent:
            self._traffic.copy(prompt)
        return is_sent

    def send(self, prompt: TokenRequest, core: EngineCore, routed: RoutedRequest | None = None) -> bool:
        """Sends a prompt to one process. False if that does not take it now, or has another model than its request."""
        is_sent = core.is_serving and self.fits(prompt.request_id, core) and core.requests.try_send(prompt)
        if is_sent:
            self._table.note_model(prompt.request_id, core.model_digest)
        if is_sent and self._router is not None:
            self._router.note_sent(core.index, self._router.routed(prompt) if routed is None else routed)
        return is_sent

    def has_room(self, core: EngineCore) -> bool:
        """Whether a process takes a prompt now."""
        return not core.is_draining and takes_more(core)

    def choose(self, adapter: str, model: str | None = None) -> EngineCore | None:
        """The process in which a request goes on, with the adapter and model of these digests; None: none has room."""
        drains = self.is_hopeless(model)
        index = choose(self._loads(self._of_begun(adapter, model) if drains else self._candidates(adapter, model)))
        return None if index is None else self.cores[index]

    def fits(self, request_id: str, core: EngineCore) -> bool:
        """Whether a process has the model that a request stays with."""
        return has_model(core, self._table.model_of(request_id))

    def stands_in(self, core: EngineCore) -> bool:
        """Whether another process takes requests that this one has begun."""
        return any(one is not core and one.model_digest == core.model_digest for one in self.serving())

    def is_hopeless(self, model: str | None) -> bool:
        """Whether requests of this model go on nowhere now, though others are served."""
        serving = self.serving()
        return bool(serving) and not any(has_model(core, model) for core in serving)

    def _of_begun(self, adapter: str, model: str | None) -> Sequence[EngineCore]:
        """As `_candidates`; if all processes with a model that was begun drain, those of them."""
        if model is None or any(has_model(core, model) for core in self.serving()):
            return self._candidates(adapter, model)
        return self._candidates(adapter, model, drains=True)

    def _candidates(self, adapter: str, model: str | None = None, *, drains: bool = False) -> Sequence[EngineCore]:
        """Those that may get a request with this adapter and model now. Silent ones only if there are no others."""
        cores = self.cores if self.only is None else (self.only,)
        with_room = [core for core in cores if (takes_more(core) if drains else self.has_room(core))]
        with_room = [core for core in with_room if can_run(core, adapter, model)]
        with_room = self._of_clients(with_room)
        return [core for core in with_room if not core.is_silent] or with_room

    def _of_clients(self, cores: list[EngineCore]) -> list[EngineCore]:
        """Those of them that serve clients: all but the engines of a shadow."""
        if self._traffic.rules.shadow is None:
            return cores
        return [core for core in cores if self._traffic.serves_clients(core)]

    def _loads(self, cores: Sequence[EngineCore]) -> list[CoreLoad]:
        if self._table.num_trials_now:  # a new request beside a suspect might end the process in its stead
            cores = [core for core in cores if not self._table.is_trying(core.index)] or cores
        return [self._table.load_of(core.index) for core in cores]

    def note_change(self) -> None:
        """A process takes requests again, or has room for more."""
        change, self.next_change = self.next_change, asyncio.Event()
        change.set()

    async def wait(self) -> None:
        """Waits for the next change."""
        await self.next_change.wait()


def adapter_of(prompt: TokenRequest) -> str:
    """The digest of a prompt's adapter; "" for the base model."""
    return "" if prompt.adapter is None else prompt.adapter.digest


def takes_more(core: EngineCore) -> bool:
    """Whether a process has room for a prompt, also one that drains."""
    return core.is_serving and not core.is_parting and len(core.requests) < core.requests.capacity


def can_run(core: EngineCore, adapter: str, model: str | None) -> bool:
    """Whether answers with the adapter and model of these digests may go on in a process."""
    return has_adapter(core, adapter) and has_model(core, model)


def has_model(core: EngineCore, model: str | None) -> bool:
    """Whether a process has the model of this digest; None: that of a request which none has begun."""
    return model is None or core.model_digest == model


def has_adapter(core: EngineCore, adapter: str) -> bool:
    """Whether a process can run requests with the adapter of this digest; all can with ""."""
    return not adapter or core.adapters.holds(adapter)
