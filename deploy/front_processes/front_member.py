"""A front's end of the link to the supervisor."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...runtime.env.log import get_logger
from ...runtime.processes.child import end_with_parent
from ...runtime.processes.frames import LinkError
from ...runtime.processes.lasting_starter import continue_with_starter
from ...runtime.processes.link import Link
from ...runtime.processes.transport import SocketTransport
from ...runtime.startup.load_progress import LoadState
from ...stages.traffic.traffic_rules import TrafficRules
from .words import (
    CODEC,
    LINK_TIMEOUT_S,
    EndProcess,
    FleetStates,
    FrontState,
    LoadingState,
    MetricsAsked,
    MetricsSum,
    MetricsTaken,
    MetricsWanted,
    TrafficSettings,
    settings_of,
    traffic_of,
)

TELL_S = 1.0  # between two times at which a front that has done something tells its metrics
ANSWER_S = 3.0  # that the supervisor may take

log = get_logger("millrace.deploy")


class ChildLink:
    """A child's end, a front's or an engine's.

    `setup` is the first message; `stopping` is set when the process is to end. With `ends_process` it ends at once if
    the supervisor has gone, and the private folder with it.
    """

    def __init__(
        self, sock: socket.socket, on_word: Callable[[Any], None] = lambda word: None, *, ends_process: bool = True
    ) -> None:
        self.setup: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stopping = asyncio.Event()
        self._on_word = on_word
        self._sock, self._ends_process = sock, ends_process
        self._link = Link(SocketTransport(sock), CODEC, self._receive, self._lost, timeout_s=LINK_TIMEOUT_S)

    def start(self) -> None:
        """Begins to receive."""
        if self._ends_process:
            continue_with_starter()  # one that is stopped would not see the end of the link
            end_with_parent(self._sock)
        self._link.start()

    def post(self, word: Any) -> None:
        """Sends a message."""
        self._link.post(word)

    def close(self) -> None:
        """Sends what is left, and ends the link."""
        self._link.flush()
        self._link.close()

    def _receive(self, word: Any) -> None:
        if not self.setup.done():
            self.setup.set_result(word)
        elif isinstance(word, EndProcess):
            self.stopping.set()
        else:
            self._on_word(word)

    def _lost(self, error: LinkError | None) -> None:
        if error is not None:
            log.error("link.broken", end="child", reason=str(error))
        if not self._ends_process:
            return
        if self.setup.done():
            shutil.rmtree(self.setup.result().folder, ignore_errors=True)
        os._exit(1)


class FrontMember:
    """What one front knows of the others, and asks the supervisor."""

    def __init__(self, sock: socket.socket, *, ends_process: bool = True) -> None:
        self.link = ChildLink(sock, self._receive, ends_process=ends_process)
        self.states: Sequence[FrontState] = ()  # of all fronts, as last told
        self.on_loading: Callable[[LoadState], object] = lambda state: None  # how far the engines are
        self._traffic: TrafficRules | None = None  # as last told
        self._on_traffic: Callable[[TrafficRules], object] = lambda rules: None
        self.own_metrics: Callable[[], bytes] | None = None
        self.has_engines = asyncio.Event()  # all have been ready once
        self.has_started = False  # it takes requests
        self.has_news = False  # since its metrics were told
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[MetricsSum]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def state_of(self, number: int) -> FrontState | None:
        """The state of a front; None if there is none of that number, or it is not known."""
        return next((state for state in self.states if state.number == number), None)

    async def metrics(self) -> tuple[Mapping[int, bytes], bytes]:
        """The metrics of all fronts, and of those that have ended. `TimeoutError` if the supervisor hangs."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.link.post(MetricsAsked(number))
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await answer
        finally:
            del self._asked[number]
        return found.fronts, found.ended

    def follow_traffic(self, on_traffic: Callable[[TrafficRules], object]) -> None:
        """Calls this with the rules that were set at a front, for all: those told already, and those to come."""
        self._on_traffic = on_traffic
        if self._traffic is not None:  # it came right after the setup
            on_traffic(self._traffic)

    def tell_traffic(self, rules: TrafficRules, model: str | None = None) -> None:
        """These rules were set at this front: all of a model follow them, and those that start later; None: all."""
        self.link.post(settings_of(rules, model))

    def follow(self, rules: TrafficRules) -> None:
        """This front follows these rules now, as if it had been told."""
        self._traffic = rules
        self._on_traffic(rules)

    def tell_metrics(self, own_metrics: Callable[[], bytes]) -> None:
        """From now on tells them each second in which there was news."""
        self.own_metrics = own_metrics
        self._tell()

    def _tell(self) -> None:
        if self.has_news and self.own_metrics is not None:
            self.has_news = False
            self.link.post(MetricsTaken(-1, self.own_metrics()))
        self._timer = asyncio.get_running_loop().call_later(TELL_S, self._tell)

    def tell_last_metrics(self) -> None:
        """Tells its metrics once more, before its engine stops."""
        if self._timer is not None:
            self._timer.cancel()
        if self.own_metrics is not None:
            self.link.post(MetricsTaken(-1, self.own_metrics()))
            self.own_metrics = None

    def close(self) -> None:
        """Ends the link."""
        if self._timer is not None:
            self._timer.cancel()
        self.link.close()

    def _receive(self, word: Any) -> None:
        match word:
            case FleetStates():
                self.states = word.fronts
                if word.has_engines:
                    self.has_engines.set()
            case LoadingState():
                self.on_loading(word.state)
            case TrafficSettings():
                self.follow(traffic_of(word))
            case MetricsWanted():
                if self.own_metrics is not None:
                    self.link.post(MetricsTaken(word.number, self.own_metrics()))
            case MetricsSum() if (answer := self._asked.get(word.number)) is not None and not answer.done():
                answer.set_result(word)
