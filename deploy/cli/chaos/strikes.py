"""Carries out the strikes of a plan, and notes from when to when each had its target."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from ....stages.errors import NotStartedError
from .balancer import Balancer
from .fleet import ChaosFleet, end, end_process, engine_name, front_name
from .members import FleetMember
from .plan import Plan, Strike
from .relay import Relay
from .rest import wait_for_fronts

DELAYS_S = (0.05, 0.5)  # of a delayed link, each piece anew
JOIN_S = 30.0  # for the links of a strike in turn to be there again
FULL_BYTES = 1  # to which a file may grow on a full disk
AWAY = frozenset({"kill", "drain", "upgrade"})  # an engine is away until its successor is there


@dataclass(eq=False, slots=True)
class StrikeSpan:
    """One strike as it was carried out. Until `healed_s` what it struck may fail, and be noticed to fail."""

    strike: Strike
    began_s: float
    healed_s: float | None = None
    problems: list[str] = field(default_factory=list)
    is_linked: bool = False  # whether all fronts were linked to the engine again when it healed

    @property
    def may_fail(self) -> bool:
        """Whether requests of the front that it strikes may fail."""
        return self.strike.engine is None and self.strike.kind in ("kill", "stop")

    def takes_link(self, front: int, engine: int) -> bool:
        """Whether it may take the link between these two away."""
        strike = self.strike
        if strike.kind in ("delay", "fill-disk") or (strike.kind == "upgrade" and strike.engine is None):
            return False
        return strike.front in (None, front) and strike.engine in (None, engine)

    def overlaps(self, began_s: float, ended_s: float, grace_s: float) -> bool:
        return self.began_s <= ended_s and (self.healed_s is None or began_s <= self.healed_s + grace_s)


class Striker:
    """Carries out a plan. Strikes of one target wait for each other, and those that would leave no engine wait, too."""

    def __init__(self, fleet: ChaosFleet, balancer: Balancer, plan: Plan) -> None:
        self.spans: list[StrikeSpan] = []
        self._fleet, self._balancer, self._plan, self._clock = fleet, balancer, plan, fleet.clock
        self._locks: dict[str, asyncio.Lock] = {}
        self._may_be_away = asyncio.Semaphore(max(1, fleet.size.num_engines - 1))

    async def run(self) -> None:
        """Until all strikes are over, and what they struck is back."""
        began_s = self._clock.now()
        if self._plan.in_turn:
            for strike in self._plan.strikes:
                await asyncio.sleep(strike.at_s)
                await self._strike(strike)
            return
        async with asyncio.TaskGroup() as group:
            for strike in self._plan.strikes:
                group.create_task(self._strike_later(strike, began_s))

    async def _strike_later(self, strike: Strike, began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + strike.at_s - self._clock.now()))
        await self._strike(strike)

    async def _strike(self, strike: Strike) -> None:
        async with self._hold(strike):
            span = StrikeSpan(strike, self._clock.now())
            self.spans.append(span)
            try:
                await self._carry_out(span)
            except NotStartedError as error:
                span.problems.append(str(error))
            span.healed_s = self._clock.now()

    async def _carry_out(self, span: StrikeSpan) -> None:
        match span.strike.kind:
            case "kill":
                await self._kill(span)
            case "stop":
                await self._stop(span)
            case "drain":
                await self._replace(span, away_s=span.strike.for_s)
            case "upgrade":
                await self._upgrade(span)
            case "fill-disk":
                await self._fill_disk(span)
            case _:
                await self._strike_links(span)

    @asynccontextmanager
    async def _hold(self, strike: Strike) -> AsyncIterator[None]:
        names = [] if strike.front is None else [front_name(strike.front)]
        names += [] if strike.engine is None else [engine_name(strike.engine)]
        async with AsyncExitStack() as stack:
            for name in sorted(names):
                await stack.enter_async_context(self._locks.setdefault(name, asyncio.Lock()))
            if strike.kind in AWAY and strike.engine is not None:
                await stack.enter_async_context(self._may_be_away)
            yield

    def _member(self, strike: Strike) -> FleetMember:
        return self._fleet.member(strike.target)

    async def _start(self, strike: Strike) -> None:
        """A successor of a process that is gone."""
        if strike.engine is not None:
            await self._fleet.start_engine(strike.engine)
        else:
            assert strike.front is not None
            await self._fleet.fronts[strike.front].start()
            self._balancer.note_new(strike.front, at_once=True)

    # -- processes

    async def _kill(self, span: StrikeSpan) -> None:
        member = self._member(span.strike)
        member.signal(signal.SIGKILL)
        await asyncio.sleep(span.strike.for_s)
        await self._start(span.strike)

    async def _stop(self, span: StrikeSpan) -> None:
        member = self._member(span.strike)
        member.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(span.strike.for_s)
        finally:
            member.signal(signal.SIGCONT)

    async def _replace(self, span: StrikeSpan, away_s: float) -> None:
        """A stop as an operator does it, and a start after a while."""
        problem = await end(self._member(span.strike), self._clock)
        span.problems += [] if problem is None else [problem]
        await asyncio.sleep(away_s)
        await self._start(span.strike)
        if self._plan.in_turn:
            await self._wait_for_fronts(span)

    async def _wait_for_fronts(self, span: StrikeSpan) -> None:
        """As an operator does, who takes no other engine away before all fronts have this one again."""
        num_fronts, url = self._fleet.size.num_fronts, str(self._member(span.strike).ready["metrics"])
        found = await wait_for_fronts(url, num_fronts, self._clock, JOIN_S)
        span.is_linked = found >= num_fronts
        if not span.is_linked:
            span.problems.append(f"{found} of {num_fronts} fronts were linked to it {JOIN_S:g} s after its start")

    async def _upgrade(self, span: StrikeSpan) -> None:
        """An engine ends and another one takes its place; the successor of a front is there before that leaves."""
        if span.strike.front is None:
            return await self._replace(span, away_s=0.0)
        member = self._member(span.strike)
        before = member.process
        assert before is not None
        await member.start()
        self._balancer.note_new(span.strike.front, at_once=False)
        problem = await end_process(member, before, self._clock)
        span.problems += [] if problem is None else [problem]

    async def _fill_disk(self, span: StrikeSpan) -> None:
        member = self._member(span.strike)
        member.limit_files(FULL_BYTES)
        try:
            await asyncio.sleep(span.strike.for_s)
        finally:
            member.limit_files(None)

    # -- links

    async def _strike_links(self, span: StrikeSpan) -> None:
        strike = span.strike
        relays = self._fleet.relays_of(strike.front, strike.engine)
        for relay in relays:
            _strike_relay(relay, strike.kind)
        if strike.kind != "half":
            await asyncio.sleep(strike.for_s)
        for relay in relays:
            _heal(relay, strike.kind)
        if self._plan.in_turn:
            with suppress(TimeoutError):
                async with asyncio.timeout(JOIN_S):
                    for relay in relays:
                        await relay.wait_for_connection()


def _strike_relay(relay: Relay, kind: str) -> None:
    match kind:
        case "cut":
            relay.is_cut = True
            relay.cut_now()
        case "half":
            relay.halves_next = True
        case "stall":
            relay.stalled = frozenset(relay.draw.choice([("up",), ("down",), ("up", "down")]))
        case "delay":
            relay.delay_s = DELAYS_S
    relay.note_change()


def _heal(relay: Relay, kind: str) -> None:
    match kind:
        case "cut":
            relay.is_cut = False
        case "stall":
            relay.stalled = frozenset()
        case "delay":
            relay.delay_s = None
    relay.note_change()
