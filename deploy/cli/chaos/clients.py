"""The clients of a run: each asks, reads as it likes, and asks again."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from .awake_clock import AwakeClock
from .balancer import Balancer
from .cases import Case
from .history import ClientRequest

if TYPE_CHECKING:
    import aiohttp

SLOW_BUFFER_BYTES = 4096  # of a client that reads slowly: so that its server notices
SLOW_S = (0.02, 0.2)  # between two lines that it reads
MAX_SLOW_S = 6.0  # that it is slow for
PAUSE_AFTER_ERROR_S = 0.5


class Clients:
    """`num_clients` clients that ask until `stop`. `histories` has each request, also while it lasts."""

    def __init__(
        self, balancer: Balancer, clock: AwakeClock, cases: Sequence[Case], seed: int, num_clients: int, rate: float
    ) -> None:
        """`rate`: requests a second of all clients together, as long as none waits for an answer."""
        self._clock = clock
        self.histories: list[ClientRequest] = []
        self._balancer, self._cases, self._seed = balancer, cases, seed
        self._pause_s = num_clients / rate
        self._num_clients = num_clients
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = asyncio.Event()
        self._has_asked = asyncio.Condition()

    def start(self) -> None:
        for number in range(self._num_clients):
            self._tasks.append(asyncio.create_task(self._run(number), name=f"client {number}"))

    async def wait_for(self, num_requests: int) -> None:
        """Waits until so many requests have begun."""
        async with self._has_asked:
            await self._has_asked.wait_for(lambda: len(self.histories) >= num_requests)

    async def stop(self, timeout_s: float) -> None:
        """No more requests; waits for the answers of those that there are."""
        self._is_over.set()
        await self._clock.wait(self._tasks, timeout_s)
        in_time = [task for task in self._tasks if task.done()]
        await self.aclose()
        for task in in_time:
            task.result()

    async def aclose(self) -> None:
        """Ends all clients now. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, number: int) -> None:
        import aiohttp

        draw = random.Random(f"client {self._seed} {number}")
        is_slow = number % 8 == 7
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_slow_socket if is_slow else None)
        size: dict[str, Any] = {"read_bufsize": SLOW_BUFFER_BYTES} if is_slow else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, **size) as session:
            await self._pause(draw.uniform(0.0, self._pause_s))
            while not self._is_over.is_set():
                history = self._begin(number, draw)
                async with self._has_asked:
                    self._has_asked.notify_all()
                await self._ask(session, history, draw, is_slow)
                pause_s = draw.expovariate(1.0 / self._pause_s)
                await self._pause(pause_s if history.end in ("done", "left") else max(pause_s, PAUSE_AFTER_ERROR_S))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._is_over.wait()
        except TimeoutError:
            pass

    def _begin(self, client: int, draw: random.Random) -> ClientRequest:
        case, is_stream = draw.choice(self._cases), draw.random() < 0.7
        front = self._balancer.choose(client)
        history = ClientRequest(len(self.histories), client, front, case, is_stream, self._clock.now())
        self.histories.append(history)
        return history

    async def _ask(
        self, session: aiohttp.ClientSession, history: ClientRequest, draw: random.Random, is_slow: bool
    ) -> None:
        import aiohttp

        leaves_after = draw.randint(0, 12) if history.is_stream and draw.random() < 0.12 else None
        stream = {"stream": True, "stream_options": {"include_usage": True}} if history.is_stream else {}
        url = self._balancer.url(history.front) + history.case.path
        try:
            async with session.post(url, json=history.case.body | stream) as response:
                history.status = response.status
                if response.status != 200:
                    history.error = _code(await response.read())
                    history.end = "refused"
                elif not history.is_stream:
                    history.take(orjson.loads(await response.read()), self._clock.now())
                    history.num_ends = 1
                else:
                    await self._read(response, history, draw if is_slow else None, leaves_after)
        except (aiohttp.ClientError, ConnectionError, TimeoutError, orjson.JSONDecodeError) as error:
            history.error = f"{type(error).__name__}: {error}"[:200]
            history.end = "broken"
            self._balancer.note_failure(history.front)
        if history.end == "open":
            history.end = "broken" if history.error or not history.num_ends else "done"
        history.ended_s = self._clock.now()

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        history: ClientRequest,
        slow: random.Random | None,
        leaves_after: int | None,
    ) -> None:
        began_s, num_lines = self._clock.now(), 0
        async for line in response.content:
            history.take_line(line, self._clock.now())
            num_lines += bool(line.strip())
            if leaves_after is not None and num_lines > leaves_after:
                history.end = "left"
                return
            if slow is not None and self._clock.now() - began_s < MAX_SLOW_S:
                await asyncio.sleep(slow.uniform(*SLOW_S))


def _slow_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
    return sock


def _code(body: bytes) -> str:
    try:
        error = orjson.loads(body)["error"]
        return str(error.get("code") or error.get("type"))
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return body[:100].decode(errors="replace")
