"""Links in virtual time: slow, cut and half-open connections, silent ends, and machines with other clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from millrace.runtime.processes.frames import LinkError
from millrace.runtime.processes.link import Link
from millrace.runtime.processes.link_channels import InboundChannel, OutboundChannel
from millrace.runtime.processes.wire import Codec
from millrace.runtime.simulation.env import SimEnv
from millrace.runtime.simulation.run import run
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.simulation.transport import SimConnection
from millrace.stages.exit.request_times import RequestTimes, metrics
from millrace.stages.messages import StepTokens, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.schedule.policy import AgeingPriority
from millrace.stages.schedule.sequence import Sequence
from millrace.stages.split.protocol import CODEC, StatusQuery, StatusReply
from tests.counts import count

pytestmark = pytest.mark.simulation
TIMEOUT_S = 10.0
NUM_ITEMS = 40
FAULTS = ("link.cut", "link.half", "link.stall", "link.partition")


class SimPair:
    """Two linked ends: requests go there, steps come back. The ends' clocks are ahead of virtual time by `ahead_s`."""

    def __init__(
        self,
        env: SimEnv,
        ahead_s: tuple[float, float] = (0.0, 0.0),
        delay_s: tuple[float, float] = (0.0, 0.001),
        is_started: bool = True,
    ) -> None:
        self.connection = SimConnection(env, delay_s)
        self.lost: tuple[list[tuple[float, LinkError | None]], ...] = ([], [])
        self.words: tuple[list[Any], list[Any]] = ([], [])
        self.here, self.there = (self._link(env, place, ahead_s[place]) for place in (0, 1))
        self.requests: OutboundChannel[TokenRequest] = OutboundChannel("requests", 4, env.now)
        self.arriving: InboundChannel[TokenRequest] = InboundChannel("requests", 4, env.now)
        self.tokens: OutboundChannel[StepTokens] = OutboundChannel("tokens", 8, env.now)
        self.coming: InboundChannel[StepTokens] = InboundChannel("tokens", 8, env.now)
        self.here.add_outbound(self.requests)
        self.here.add_inbound(self.coming)
        self.there.add_inbound(self.arriving)
        self.there.add_outbound(self.tokens)
        for link in (self.here, self.there) if is_started else ():
            link.start()

    def _link(self, env: SimEnv, place: int, ahead_s: float) -> Link:
        return Link(
            self.connection.ends[place],
            CODEC,
            self.words[place].append,
            lambda error: self.lost[place].append((env.now(), error)),
            timeout_s=TIMEOUT_S,
            clock=lambda: env.now() + ahead_s,
        )

    def close(self) -> None:
        self.here.close()
        self.there.close()


def request(number: int, arrival_s: float = 0.0, priority: int = 0) -> TokenRequest:
    ids = np.arange(number % 7 * 500 + 1, dtype=np.int32)
    return TokenRequest(f"r{number}", 0, ids, SamplingParams(max_tokens=1, seed=0), number, priority, arrival_s)


def step(number: int, began_s: float | None = None) -> StepTokens:
    ids = np.full(1, number, np.int64)
    return StepTokens(number, ids, ids, ids, ids, np.zeros(1, np.int8), began_s=began_s)


async def stream(pair: SimPair) -> tuple[list[int], list[int]]:
    """Sends items both ways until all have arrived or the link is lost. Returns the numbers that arrived."""
    there: list[int] = []
    here: list[int] = []

    async def ask() -> None:
        for number in range(NUM_ITEMS):
            await pair.requests.send(request(number))
        pair.requests.close()

    async def answer() -> None:
        async for item in pair.arriving:
            there.append(item.first_sequence_id)
            await pair.tokens.send(step(item.first_sequence_id))
        pair.tokens.close()

    async def read() -> None:
        async for item in pair.coming:
            number = item.step
            here.append(number)

    tasks = [asyncio.ensure_future(part()) for part in (ask, answer, read)]
    for _ in range(10_000):
        if tasks[2].done() or (pair.lost[0] and pair.lost[1]):
            break
        await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return there, here


async def drawn(env: SimEnv) -> tuple[list[int], list[int]]:
    pair = SimPair(env)
    try:
        return await stream(pair)
    finally:
        pair.close()


@sim_test(seeds=count(4, 300))
async def test_items_arrive_once_and_in_order_however_the_connection_cuts_them(env: SimEnv) -> None:
    pair = SimPair(env, delay_s=(0.0, 0.05))
    assert await stream(pair) == (list(range(NUM_ITEMS)),) * 2
    assert pair.lost == ([], [])
    pair.close()


@sim_test(seeds=count(8, 2_000), fault_probability=0.05)
async def test_a_faulty_connection_delivers_a_prefix_and_both_ends_learn_of_its_end(env: SimEnv) -> None:
    pair = SimPair(env)
    there, here = await stream(pair)
    assert there == list(range(len(there))) and here == list(range(len(here))) and len(here) <= len(there)
    assert len(here) == NUM_ITEMS or (len(pair.lost[0]) == len(pair.lost[1]) == 1)
    for _, error in [*pair.lost[0], *pair.lost[1]]:
        assert error is None or "has sent nothing for 10 s" in str(error) or "in the middle of a frame" in str(error)
    pair.close()


def test_each_fault_of_a_connection_strikes() -> None:
    struck = set()
    for seed in range(count(12, 200)):
        result = run(drawn, seed=seed, fault_probability=0.1)
        struck |= {name for name in FAULTS if result.faults_fired[name]}
    assert struck == set(FAULTS)


@sim_test(seeds=count(4, 300))
async def test_silence_loses_the_link_at_both_ends_within_a_second_of_the_timeout(env: SimEnv) -> None:
    pair = SimPair(env)
    await asyncio.sleep(env.random("test").uniform(60, 70))
    assert pair.lost == ([], []), "an idle link lives on its pings"
    began_s = env.now()
    pair.connection.block()
    await asyncio.sleep(60.0)
    for (lost_s, error), *others in pair.lost:
        assert "the other end has sent nothing for 10 s" in str(error) and not others
        assert TIMEOUT_S - 1.0 <= lost_s - began_s <= TIMEOUT_S + 1.01


@sim_test(seeds=count(4, 300))
async def test_a_half_open_connection_is_lost_by_the_end_that_hears_nothing_and_then_by_the_other(env: SimEnv) -> None:
    pair = SimPair(env)
    await asyncio.sleep(5.5)
    began_s = env.now()
    pair.connection.ends[1].lose_what_is_sent()
    await asyncio.sleep(60.0)
    [(here_s, error)], [(there_s, end)] = pair.lost
    assert "has sent nothing" in str(error) and end is None
    assert here_s - began_s <= TIMEOUT_S + 1.01 and there_s - here_s < 0.01


@sim_test(seeds=count(6, 300))
async def test_machines_that_stand_still_one_after_the_other_keep_their_link(env: SimEnv) -> None:
    pair = SimPair(env)
    for _ in range(5):
        await asyncio.sleep(env.random("test").uniform(3.0, 5.0))
        pair.connection.block()  # the other machine stands still
        await asyncio.sleep(env.random("test").uniform(0.0, 9.0))
        env.loop.stand_still(env.random("test").uniform(30.0, 3_000.0))  # and now this one does, too
        await asyncio.sleep(env.random("test").uniform(0.0, 8.0))  # it is the first to go on
        pair.connection.unblock()
    await asyncio.sleep(20.0)
    assert pair.lost == ([], [])
    pair.connection.block()
    await asyncio.sleep(TIMEOUT_S + 1.1)
    assert [len(lost) for lost in pair.lost] == [1, 1], "without a standstill it is lost as ever"


@sim_test(seeds=count(4, 300))
async def test_an_end_that_never_says_hello_is_lost_too(env: SimEnv) -> None:
    connection, lost = SimConnection(env), list[Any]()
    link = Link(connection.ends[0], Codec([]), lost.append, lost.append, timeout_s=TIMEOUT_S, clock=env.now)
    link.start()
    await asyncio.sleep(TIMEOUT_S + 1.0)
    assert len(lost) == 1 and "has sent nothing for 10 s" in str(lost[0])


@sim_test(seeds=count(2, 300))
async def test_requests_of_machines_an_hour_apart_are_served_in_the_order_of_their_age(env: SimEnv) -> None:
    ageing_s, hour_s = 5.0, 3_600.0
    fronts = [SimPair(env, (ahead_s, 0.0), (0.001, 0.02)) for ahead_s in (hour_s, -hour_s, 0.0)]
    await asyncio.sleep(20.0)
    draw, keys = env.random("test"), list[tuple[float, float]]()
    policy = AgeingPriority(ageing_s)
    for number in range(30):
        front, priority = draw.choice(fronts), draw.randrange(3)
        arrival_s = env.now()
        front_clock: Callable[[], float] = front.here._clock
        await front.requests.send(request(number, front_clock(), priority))
        await asyncio.sleep(0.2)
        [came] = front.arriving.recv_all()
        sequence = SimpleNamespace(arrival_s=came.arrival_s, priority=came.priority)
        keys.append((arrival_s + priority * ageing_s, policy.weight(cast(Sequence, sequence))))
    assert all(abs(key - right) < 0.02 for right, key in keys), "half of the least round trip, 40 ms, at most"
    for front in fronts:
        front.close()


@sim_test(seeds=count(4, 300))
async def test_times_to_the_first_token_are_right_though_the_engines_clock_is_an_hour_ahead(env: SimEnv) -> None:
    pair = SimPair(env, (0.0, 3_600.0), (0.001, 0.004))
    for number in range(5):
        times = RequestTimes(env.now())
        await pair.requests.send(request(number, env.now()))
        await asyncio.sleep(0.3)
        [came] = pair.arriving.recv_all()
        waited_s = pair.there._clock() - came.arrival_s
        await pair.tokens.send(step(number, pair.there._clock()))
        await asyncio.sleep(0.2)
        [answer] = pair.coming.recv_all()
        times.begin(answer.began_s)
        times.first_token_s = times.last_token_s = env.now()
        shown = metrics(times, 1, 1, 0)
        assert shown["time_to_first_token_ms"] == pytest.approx(500.0)
        assert shown["queue_time_ms"] == pytest.approx(300.0, abs=4.0) and waited_s == pytest.approx(0.3, abs=0.004)
    pair.close()


@sim_test(seeds=count(4, 300))
async def test_a_request_that_waited_for_a_late_end_arrives_with_its_own_time(env: SimEnv) -> None:
    for ahead_s in (0.0, 3_600.0):
        pair = SimPair(env, (0.0, ahead_s), (0.001, 0.02), is_started=False)
        pair.here.start()
        await asyncio.sleep(6.0)
        await pair.requests.send(request(1, env.now()))
        await asyncio.sleep(1.0)
        pair.there.start()
        await asyncio.sleep(0.5)
        [came] = pair.arriving.recv_all()
        assert env.now() - (came.arrival_s - ahead_s) == pytest.approx(1.5, abs=0.03)
        pair.close()


@sim_test(seeds=4)
async def test_ends_on_one_clock_shift_nothing(env: SimEnv) -> None:
    pair = SimPair(env, delay_s=(0.0, 0.05))
    await asyncio.sleep(3.0)
    await pair.requests.send(request(1, 1234.5))
    await asyncio.sleep(0.5)
    assert pair.arriving.recv_all()[0].arrival_s == 1234.5
    pair.here.post(StatusQuery(1, "books"))
    pair.there.post(StatusReply(1))
    await asyncio.sleep(0.5)
    assert [len(words) for words in pair.words] == [1, 1]
    pair.close()


def test_the_same_seed_has_the_same_trace() -> None:
    first, second = (run(drawn, seed=5, fault_probability=0.02) for _ in range(2))
    assert first.value == second.value and first.trace_hash == second.trace_hash
