"""One viewer of the dashboard: what it wants to see, and what it knows already.

Knows the messages of `feed.py`, and how what is new is told. Refuses to know what the figures mean, and where they come
from: of an engine that runs (`live.py`), or of a recording (`played.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ...runtime.env.log import get_logger
from ..api.schema.body import Body
from ..config import ServerConfig
from ..errors import ApiError
from ..http.websocket_frames import POLICY_VIOLATION
from ..websocket.envelopes import error_members, parse
from ..websocket.peer import INTERNAL_ERROR, INVALID_PAYLOAD, Peer
from .messages import KINDS, Hello, Subscribe, Topics, read_message
from .patch import merge_patch

INTERVAL_S = 0.25  # between two updates
MAX_MESSAGE_BYTES = 16 * 1024

Update = dict[str, Any]
Read = Callable[[str, Update], None]  # puts the news of a topic into an update

log = get_logger("millrace.deploy")


class Viewer:
    """One socket. What is shown to it, and to whom, its subclasses say."""

    kinds: Mapping[str, type[Body]] = KINDS  # of messages that it may send

    def __init__(self, peer: Peer, config: ServerConfig) -> None:
        self.peer = peer
        self.topics = Topics()
        self._config = config
        self._wants_something = asyncio.Event()
        self._known: dict[str, Any] = {}  # topic -> what it was told last
        self._numbers: dict[str, int] = {}  # topic that only grows -> how much of it was told

    async def run(self) -> None:
        """Serves the viewer until it is gone."""
        if not await self._greet():
            return
        pushing = asyncio.get_running_loop().create_task(self._push())
        try:
            while (data := await self.peer.receive()) is not None:
                if not await self._take(data):
                    return
        finally:
            pushing.cancel()

    # -- what each kind of viewer does its own way

    def check(self, hello: Hello) -> None:
        """Raises `ApiError` for one that may not look."""

    def introduction(self) -> dict[str, Any]:
        """What the server says of itself."""
        raise NotImplementedError

    def hear(self, message: Body) -> None:
        """A message that is neither a hello nor a subscription. `ApiError` is told to the viewer."""
        raise NotImplementedError

    def changed(self, topics: Topics) -> None:
        """It will want these `topics`, which are not yet `self.topics`."""

    async def think(self) -> None:
        """Before each update: what takes a while."""

    def fill(self, update: Update) -> None:
        """Puts in what is new in the topics that are wanted, by `read`."""
        raise NotImplementedError

    async def rest(self) -> None:
        """Between two updates."""
        await asyncio.sleep(INTERVAL_S)

    # -- what it says

    async def _greet(self) -> bool:
        """Waits for the hello and looks at its keys. Nothing of the server is told before."""
        timeout_s = self._config.header_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                data = await self.peer.receive()
        except TimeoutError:
            message = f"the hello did not arrive within {timeout_s:g} s"
            await self.peer.end(POLICY_VIOLATION, ApiError("request_timeout", message))
            return False
        if data is None:
            return False
        try:
            hello = self._read(data)
            if not isinstance(hello, Hello):
                raise ApiError("invalid_value", "type: the first message is hello", param="type")
            self.check(hello)
        except ApiError as error:
            await self.peer.end(POLICY_VIOLATION, error)
            return False
        await self.peer.send(orjson.dumps(self.introduction()))
        return True

    async def _take(self, data: bytes) -> bool:
        """One message. False if it is the last that is read."""
        try:
            message = self._read(data)
            if isinstance(message, Subscribe):
                self._subscribe(message.topics)
            elif not isinstance(message, Hello):
                self.hear(message)
        except ApiError as error:
            if error.code == "invalid_json":
                await self.peer.end(INVALID_PAYLOAD, error)
                return False
            await self.peer.send(b'{"type":"error",%b}' % error_members(error))
        return True

    def _read(self, data: bytes) -> Body:
        return read_message(parse(data, MAX_MESSAGE_BYTES), self._config.strict_fields, self.kinds)

    def _subscribe(self, topics: Topics) -> None:
        for name in Topics.model_fields:
            if getattr(topics, name) is None or getattr(topics, name) != getattr(self.topics, name):
                self._known.pop(name, None)
                self._numbers.pop(name, None)
        self.changed(topics)
        self.topics = topics
        if any(getattr(topics, name) is not None for name in Topics.model_fields):
            self._wants_something.set()
        else:
            self._wants_something.clear()

    # -- what it is told

    async def _push(self) -> None:
        try:
            while True:
                await self._wants_something.wait()
                await self.think()
                update: Update = {"type": "update", "now_s": None, "full": {}, "patch": {}}
                self.fill(update)
                await self.peer.send(orjson.dumps(update))
                await self.rest()
        except ConnectionError:
            pass  # gone, or about to be told why it ends
        except Exception as error:
            log.error("dashboard.failed", error=type(error).__name__, exc_info=error)
            await self.peer.end(INTERNAL_ERROR, ApiError("internal_error", "internal error"))

    def read(self, readers: Mapping[str, Read], update: Update) -> None:
        """Lets the readers of the topics that are wanted put their news in."""
        for name, reader in readers.items():
            if getattr(self.topics, name) is not None:
                reader(name, update)

    def forget(self) -> None:
        """Everything is told in full again."""
        self._known.clear()
        self._numbers.clear()

    def tree(self, name: str, data: Any, update: Update) -> None:
        """A topic that is a tree of plain data: what has changed since it was told."""
        if name not in self._known:
            update["full"][name] = data
        elif news := merge_patch(self._known[name], data):
            update["patch"][name] = news
        self._known[name] = data

    def grown(self, name: str, since: Callable[[int], tuple[list[Any], int]], num_skipped: int, update: Update) -> None:
        """A topic of rows that only come: those `since` the number that it knows."""
        is_new = name not in self._numbers
        rows, self._numbers[name] = since(self._numbers.get(name, 0))
        if is_new or rows:
            update["full" if is_new else "patch"][name] = {"rows": rows, "num_skipped": num_skipped}
