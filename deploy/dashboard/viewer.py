"""The base of a dashboard viewer: its subscriptions, the data sent to it, and the protocol of `feed.py`.

The subclasses provide the data of a running engine (`live.py`) or of a recording (`playback/viewer.py`).
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
from ..websocket.envelopes import error_members, is_utf8, parse
from ..websocket.peer import INTERNAL_ERROR, INVALID_PAYLOAD, Peer
from .messages import KINDS, Hello, Subscribe, Topics, read_message
from .patch import merge_patch

INTERVAL_S = 0.25  # between two updates
MAX_MESSAGE_BYTES = 16 * 1024

Update = dict[str, Any]
Read = Callable[[str, Update], None]  # puts the changes of a topic into an update

log = get_logger("millrace.deploy")


class Viewer:
    """A viewer on one socket. Subclasses decide on data and permissions."""

    kinds: Mapping[str, type[Body]] = KINDS  # accepted messages

    def __init__(self, peer: Peer, config: ServerConfig) -> None:
        self.peer = peer
        self.topics = Topics()
        self._config = config
        self._wants_something = asyncio.Event()
        self._known: dict[str, Any] = {}  # topic -> the data sent last
        self._numbers: dict[str, int] = {}  # topic that only grows -> number of rows sent

    async def run(self) -> None:
        """Serves the viewer until its socket closes."""
        if not await self._greet():
            return
        pushing = asyncio.get_running_loop().create_task(self._push())
        try:
            while (data := await self.peer.receive()) is not None:
                if not await self._take(data):
                    return
        finally:
            pushing.cancel()

    # -- for subclasses

    def check(self, hello: Hello) -> None:
        """Raises `ApiError` for a viewer without permission."""

    def introduction(self) -> dict[str, Any]:
        """The server's hello."""
        raise NotImplementedError

    def handle_message(self, message: Body) -> None:
        """Handles a message other than hello and subscribe. An `ApiError` is sent to the viewer."""
        raise NotImplementedError

    def changed(self, topics: Topics) -> None:
        """Called before `self.topics` becomes `topics`."""

    async def refresh(self) -> None:
        """Called before each update, for slow work."""

    def fill(self, update: Update) -> None:
        """Puts the changes of the subscribed topics into the update, by `read`."""
        raise NotImplementedError

    async def wait_for_next_update(self) -> None:
        """Waits between two updates."""
        await asyncio.sleep(INTERVAL_S)

    # -- messages of the viewer

    async def _greet(self) -> bool:
        """Waits for the hello and checks its keys; before that nothing is sent. False if the viewer is refused."""
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
                raise ApiError("invalid_value", "type: the first message must be hello", param="type")
            self.check(hello)
        except ApiError as error:
            await self.peer.end(POLICY_VIOLATION, error)
            return False
        await self.peer.send(orjson.dumps(self.introduction()))
        return True

    async def _take(self, data: bytes) -> bool:
        """Handles one message. False if the socket is closed for it."""
        try:
            message = self._read(data)
            if isinstance(message, Subscribe):
                self._subscribe(message.topics)
            elif not isinstance(message, Hello):
                self.handle_message(message)
        except ApiError as error:
            if not is_utf8(data):
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

    # -- updates to the viewer

    async def _push(self) -> None:
        try:
            while True:
                await self._wants_something.wait()
                await self.refresh()
                update: Update = {"type": "update", "now_s": None, "full": {}, "patch": {}}
                self.fill(update)
                await self.peer.send(orjson.dumps(update))
                await self.wait_for_next_update()
        except ConnectionError:
            pass  # the viewer is gone, or its socket is being closed with a reason
        except Exception as error:
            log.error("dashboard.failed", error=type(error).__name__, exc_info=error)
            await self.peer.end(INTERNAL_ERROR, ApiError("internal_error", "internal error"))

    def read(self, readers: Mapping[str, Read], update: Update) -> None:
        """Calls the readers of the subscribed topics."""
        for name, reader in readers.items():
            if getattr(self.topics, name) is not None:
                reader(name, update)

    def reset(self) -> None:
        """Makes the next update send every topic in full."""
        self._known.clear()
        self._numbers.clear()

    def tree(self, name: str, data: Any, update: Update) -> None:
        """Adds the changes of a topic that is a tree of plain data."""
        if name not in self._known:
            update["full"][name] = data
        elif patch := merge_patch(self._known[name], data):
            update["patch"][name] = patch
        self._known[name] = data

    def grown(self, name: str, since: Callable[[int], tuple[list[Any], int]], num_skipped: int, update: Update) -> None:
        """Adds the new rows of a topic that only grows; `since` returns (rows after a number, new number)."""
        is_new = name not in self._numbers
        rows, self._numbers[name] = since(self._numbers.get(name, 0))
        if is_new or rows:
            update["full" if is_new else "patch"][name] = {"rows": rows, "num_skipped": num_skipped}
