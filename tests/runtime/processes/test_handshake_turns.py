"""What strangers cost a port: a share of a core, in turns between addresses, with TLS and without."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import pytest
import trustme

from millrace.runtime.processes.handshake_turns import ACCEPT_S, CpuBudget, HandshakeTurns, _counted, source_of
from millrace.runtime.processes.tcp import _met
from millrace.runtime.processes.tls import FleetTls
from millrace.runtime.processes.transport import SocketTransport
from millrace.runtime.simulation.env import SimEnv
from millrace.runtime.simulation.testing import sim_test
from tests.runtime.processes.test_tcp import KEY
from tests.runtime.processes.test_tls import TlsCore, issue, with_core

pytestmark = pytest.mark.security


def test_a_budget_has_a_burst_and_comes_back_with_time() -> None:
    budget = CpuBudget(100.0, share=0.1, burst_s=0.5)
    assert budget.is_whole(100.0) and budget.pause_s(100.0) == 0.0
    budget.use(0.5, 100.0)
    assert budget.left_s(100.0) == 0.0 and not budget.is_whole(100.0)
    budget.use(0.3, 100.0)
    assert budget.pause_s(100.0) == pytest.approx(3.0) and budget.pause_s(100.0, bursts=1.0) == 0.0
    budget.use(0.3, 100.0)
    assert budget.pause_s(100.0, bursts=1.0) == pytest.approx(1.0)
    assert budget.left_s(107.0) == pytest.approx(0.1)
    budget.use(-5.0, 107.0)
    assert budget.left_s(107.0) == budget.left_s(1e6) == 0.5


async def counted(work: Coroutine[Any, Any, str], costs: list[float]) -> str:
    return await _counted(work, costs.append)


def busy(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_the_cpu_time_of_all_pieces_counts_and_that_of_waits_does_not() -> None:
    async def work() -> str:
        busy(0.02)
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            busy(0.02)
        await asyncio.sleep(0.0)
        return "done"

    async def main() -> None:
        costs: list[float] = []
        task = asyncio.create_task(counted(work(), costs))
        await asyncio.sleep(0.1)
        task.cancel()
        assert await task == "done"
        assert 0.04 <= sum(costs) < 0.06 and len(costs) == 3

    asyncio.run(main())


@sim_test(seeds=4)
async def test_beyond_the_burst_handshakes_take_turns_and_the_address_that_used_least_is_first(env: SimEnv) -> None:
    turns, began = HandshakeTurns(), list[tuple[str, float]]()
    turns.budget.use(turns.budget.left_s(env.now()), env.now())

    async def run(address: str, name: str) -> None:
        await turns.turn(address)
        began.append((name, env.now() - start_s))

    async def use() -> None:
        busy(1e-3)

    await turns.run("a", use)
    turns.budget.use(1e-3, env.now())
    start_s = env.now()
    tasks = [asyncio.ensure_future(run(*one)) for one in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"))]
    gone = asyncio.ensure_future(run("c", "c1"))
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.wait([*tasks, gone])
    assert [name for name, _ in began][0] == "b1" and {name for name, _ in began} == {"a1", "a2", "a3", "b1"}
    assert began[0][1] >= 0.01, "what was used must come back first"
    await asyncio.sleep(100.0)
    await turns.run("d", use)
    assert turns._used_s.keys() == {"d"}, "after a while without handshakes all addresses are alike again"
    turns.close()


@sim_test(seeds=2)
async def test_far_beyond_the_burst_no_connection_is_accepted_for_a_while(env: SimEnv) -> None:
    turns, start_s = HandshakeTurns(), env.now()
    for _ in range(1_000):
        await turns.may_accept()
    assert env.now() == start_s and turns.accepting.left_s(start_s) == pytest.approx(0.5 - 1_000 * ACCEPT_S)
    assert turns.budget.is_whole(start_s), "handshakes have theirs"
    turns.accepting.use(1.0, start_s)
    await turns.may_accept()
    assert env.now() - start_s == pytest.approx(1.0, abs=0.01), "0.1 s of CPU time at a tenth of a core"


@pytest.mark.parametrize("rate", [1_000, 3_000])
@sim_test(seeds=1)
async def test_strangers_that_only_connect_leave_a_front_its_turn(env: SimEnv, rate: int) -> None:
    """Connections come at a fixed rate, and leave as the 32nd newer one comes. The front's is not dropped."""
    turns, entered_s = HandshakeTurns(), list[float]()
    turns.budget.use(1.0, env.now())
    turns.accepting.use(1.0, env.now())
    queue, waiting = deque[str](), deque[asyncio.Task[None]]()

    async def stranger() -> None:
        await turns.turn("10.0.0.1")
        await asyncio.sleep(60.0)

    async def front() -> None:
        await turns.turn("10.0.0.2")
        entered_s.append(env.now())

    async def accept() -> None:
        while True:
            await turns.may_accept()
            while not queue:  # noqa: ASYNC110
                await asyncio.sleep(1.0 / rate)
            if queue.popleft() == "10.0.0.2":
                tasks.append(asyncio.ensure_future(turns.run("10.0.0.2", front)))
            else:
                waiting.append(asyncio.ensure_future(turns.run("10.0.0.1", stranger)))
                if len(waiting) > 31:
                    waiting.popleft().cancel()
            await asyncio.sleep(0.0)

    tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(accept())]
    for number in range(rate * 3 // 5):
        if len(queue) < 32:
            queue.append("10.0.0.1")
        if number == rate // 5:
            queue[-1], dialed_s = "10.0.0.2", env.now()
        await asyncio.sleep(1.0 / rate)
    assert entered_s and entered_s[0] - dialed_s <= 2.0, "with a full queue each one waits"
    for one in [*tasks, *waiting]:
        one.cancel()
    await asyncio.wait([*tasks, *waiting])
    turns.close()


@sim_test(seeds=2)
async def test_fresh_addresses_do_not_keep_one_that_shook_hands_from_its_turn(env: SimEnv) -> None:
    turns, began = HandshakeTurns(), list[str]()

    async def use() -> None:
        busy(2e-3)

    async def run(address: str) -> None:
        await turns.turn(address)
        began.append(address)
        turns.budget.use(0.005, env.now())

    await turns.run("front", use)
    turns.budget.use(1.0, env.now())
    tasks = [asyncio.ensure_future(run("front"))]
    for number in range(100):
        tasks.append(asyncio.ensure_future(run(f"10.0.0.{number}")))
        await asyncio.sleep(0.01)
    assert "front" in began[:2]
    now_s, used_s = env.now(), turns._used_of("front", env.now())
    assert turns._used_of("front", now_s + 10.0) == pytest.approx(used_s / 2), "what was used is forgotten with time"
    for one in tasks:
        one.cancel()
    await asyncio.wait(tasks)
    turns.close()


def test_a_source_is_an_ipv4_address_or_a_64_bit_network() -> None:
    assert source_of("10.0.0.1") == source_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert source_of("2001:db8:0:1::1") == "2001:db8:0:1::/64" and source_of("fe80::1%eth0") == "fe80::/64"
    assert source_of("name") == "name"


@pytest.mark.slow
def test_a_flood_of_tls_handshakes_takes_a_share_of_the_loop_and_a_front_gets_in(tmp_path) -> None:
    files = issue(trustme.CA(key_type=trustme.KeyType.ECDSA), tmp_path)
    stranger = ssl.create_default_context(cafile=files.ca)
    flood_s, share = 3.0, 0.1

    async def flood(core: TlsCore, until_s: float) -> int:
        """Handshakes without a certificate, one after another: each costs the listener a signature."""
        count = 0
        while time.monotonic() < until_s:
            try:
                _, writer = await asyncio.open_connection(*core.listener.address, ssl=stranger)
                writer.transport.abort()
                count += 1
            except OSError:  # refused: it shows no certificate
                count += 1
        return count

    async def test(core: TlsCore) -> None:
        loop = asyncio.get_running_loop()
        assert core.listener._turns is not None
        turns = core.listener._turns
        turns.budget = CpuBudget(loop.time(), share, burst_s=0.02)
        began_s, used_s = time.monotonic(), list[float]()
        use = turns.budget.use

        def note(cost_s: float, now_s: float) -> None:
            used_s.append(cost_s)
            use(cost_s, now_s)

        turns.budget.use = note  # type: ignore[method-assign]
        floods = [asyncio.ensure_future(flood(core, began_s + flood_s)) for _ in range(8)]
        await asyncio.sleep(0.5)
        near = await from_another_address(core, FleetTls(files, "dialer"))
        near.close()
        counts = await asyncio.gather(*floods)
        took_s = time.monotonic() - began_s
        assert sum(counts) > 8
        assert sum(used_s) <= share * took_s + 0.1, f"{sum(used_s):.3f} s for {sum(counts)} in {took_s:.1f} s"

    with_core(test, FleetTls(files, "listener"))


async def from_another_address(core: TlsCore, tls: FleetTls) -> SocketTransport:
    """A front that dials from 127.0.0.2."""
    sock = socket.socket()
    sock.bind(("127.0.0.2", 0))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, core.listener.address)
    async with asyncio.timeout(10.0):
        return await _met(sock, KEY, tls, "dialer", "127.0.0.1")
