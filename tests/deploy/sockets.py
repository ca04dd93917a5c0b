"""A server and its engine in this process, and a client of `/v1/stream` that sorts what it gets by request."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.stages.config import EngineConfig
from millrace.stages.testing.scripted.engine import SMALL, ScriptedEngine
from millrace.stages.testing.scripted.script import Script

Message = dict[str, Any]
ENDLESS = Script(eos_probability=0.0)


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 200))

    return run


@dataclass
class Serving:
    """What runs."""

    server: Server
    engine: ScriptedEngine
    http: aiohttp.ClientSession

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Client]:
        """A socket, open within the block."""
        async with self.http.ws_connect(f"{self.server.url}/v1/stream", autoclose=False, **options) as socket:
            yield Client(socket)

    async def check_quiet(self) -> None:
        """Nothing is left of any request."""
        await until(lambda: not self.server.service.live)
        await self.engine.check_quiet()

    async def check_ended(self, num_steps: int = 150) -> None:
        """The same, and so few steps later that no answer of 400 tokens has come to its own end."""
        before = self.engine.model.num_steps
        await self.check_quiet()
        assert self.engine.model.num_steps - before < num_steps


@asynccontextmanager
async def serving(
    *, step_s: float = 0.0, script: Script | None = None, engine: EngineConfig = SMALL, **server: Any
) -> AsyncIterator[Serving]:
    """A scripted engine behind a server on a free port."""
    async with (
        Server(ServerConfig(port=0, **server)) as running,
        ScriptedEngine(engine, script, step_s=step_s) as model,
    ):
        running.attach(model)
        async with aiohttp.ClientSession() as http:
            yield Serving(running, model, http)


async def until(holds: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Waits for something to become true."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - there is no notification for it
            await asyncio.sleep(0.002)


@dataclass
class Client:
    """One socket. `received` has all messages in their order."""

    socket: aiohttp.ClientWebSocketResponse
    received: list[Message] = field(default_factory=list)

    async def send(self, type: str, **members: Any) -> None:
        await self.socket.send_str(json.dumps({"type": type, **members}))

    async def create(self, id: str, prompt: str = "a", *, credit: int | None = None, **more: Any) -> None:
        """Asks for a completion; `resume` and `stats` are the message's, the rest is the body's."""
        message = {name: more.pop(name) for name in ("resume", "stats") if name in more}
        body = {"prompt": prompt, "temperature": 0, **more}
        await self.send("create", id=id, endpoint="completions", body=body, credit=credit, **message)

    async def receive(self, timeout_s: float = 60.0) -> Message:
        """The next message."""
        async with asyncio.timeout(timeout_s):  # its own would begin anew at each ping
            got = await self.socket.receive()
        assert got.type is aiohttp.WSMsgType.TEXT, (got, self.socket.close_code)
        message: Message = json.loads(got.data)
        self.received.append(message)
        return message

    async def receive_until(self, type: str, id: str | None = None) -> Message:
        """The next message of that type (of that request)."""
        while True:
            message = await self.receive()
            if message["type"] == type and id in (None, message.get("id")):
                return message
            assert message["type"] != "error" or type == "error", message

    async def receive_exactly(self, num_chunks: int, id: str) -> None:
        """So many chunks of a request, and then nothing for a while."""
        for _ in range(num_chunks):
            await self.receive_until("chunk", id)
        assert not await self.receive_waiting(0.05)

    async def receive_waiting(self, quiet_s: float = 0.1) -> list[Message]:
        """All that comes until nothing does for a while."""
        messages = []
        while True:
            try:
                messages.append(await self.receive(quiet_s))
            except TimeoutError:
                return messages

    async def close_code(self) -> int | None:
        """Reads to the end."""
        while (await self.socket.receive(timeout=60)).type is aiohttp.WSMsgType.TEXT:
            pass
        return self.socket.close_code

    def cut(self) -> None:
        """The connection breaks, without a word."""
        connection = self.socket._response.connection
        assert connection is not None and connection.transport is not None
        connection.transport.abort()

    def of(self, id: str, type: str = "chunk") -> list[Message]:
        """What came for a request."""
        return [message for message in self.received if message.get("id") == id and message["type"] == type]

    def text(self, id: str) -> str:
        """Of a completion."""
        return text_of(self.of(id))


def text_of(chunks: list[Message]) -> str:
    """Of a completion's chunks."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["body"]["choices"])
