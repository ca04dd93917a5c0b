"""The WebSockets of one server: who is there, what they have under way, and what waits for somebody to come back."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from aiohttp import web

from ...runtime.env.log import get_logger
from ..api.openai.generation import Generation
from ..api.responses.service import Responses
from ..api.service import Service
from ..errors import ApiError, not_serving, unforeseen
from ..http.connections import error_response
from ..http.json_limits import INLINE_BYTES
from ..http.request_context import OWNER, REQUEST_ID
from ..metrics.metrics import Metrics
from .base_session import SocketSession
from .peer import GOING_AWAY, INTERNAL_ERROR, TRY_AGAIN_LATER, Peer
from .responses_session import ResponsesSession
from .session import Session
from .stream import Stream

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import RequestOutbox

MAX_ORPHANS = 1024  # requests whose socket was cut

log = get_logger("millrace.deploy")

P = ParamSpec("P")
T = TypeVar("T")


class Hub:
    """All sessions of one server, on its loop. `watch` the engine once it is there."""

    def __init__(self, generation: Generation, responses: Responses, metrics: Metrics, threads: Executor) -> None:
        self.generation = generation
        self.service: Service = generation.service
        self.config = generation.service.config
        self.metrics = metrics
        self._threads = threads
        self._responses = responses
        self._sessions: set[SocketSession] = set()
        self._by_token: dict[str, Stream] = {}
        self._orphans: set[Stream] = set()  # without a socket
        self._by_answer: dict[str, Stream] = {}  # those under way in the engine
        self._tasks: set[asyncio.Task[Any]] = set()

    def watch(self, engine: Engine) -> None:
        """From now on streams hear of their requests' ends, read or not."""
        assert engine.pipeline.exit is not None
        engine.pipeline.exit.on_end.append(self._request_ended)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/stream`."""
        return await self._serve(request, lambda peer: Session(self, peer, request[OWNER]))

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/responses`."""
        owner, request_id = request[OWNER], request[REQUEST_ID]
        return await self._serve(request, lambda peer: ResponsesSession(self, peer, owner, request_id, self._responses))

    async def _serve(self, request: web.Request, make_session: Callable[[Peer], SocketSession]) -> web.StreamResponse:
        self.service.require_engine()
        peer = Peer(request, self.config)
        try:
            await peer.open()
        except ConnectionError:  # nobody is there to read this
            return error_response(ApiError("bad_request", "the client left before its handshake was answered"))
        session = make_session(peer)
        try:
            if len(self._sessions) >= self.config.ws_max_sockets:
                message = f"{self.config.ws_max_sockets} sockets are open; try again shortly"
                await peer.end(TRY_AGAIN_LATER, ApiError("too_many_connections", message, retry_after_s=1.0))
                return peer.response
            self._sessions.add(session)
            await session.run()
        except ConnectionError:
            pass  # the client is gone: its session has seen to its requests
        except Exception as error:
            log.error("socket.failed", error=type(error).__name__, exc_info=error)
            await peer.end(INTERNAL_ERROR, unforeseen(request[REQUEST_ID]))
        finally:
            self._sessions.discard(session)
            await peer.release()
        return peer.response

    # -- an orderly end

    def drain(self) -> None:
        """The server takes nothing new: sockets with nothing under way are told, and nobody is waited for who is not
        there."""
        for stream in list(self._orphans):
            stream.stop("server_shutdown")
        for session in list(self._sessions):
            session.end_if_drained()

    async def close(self) -> None:
        """Says goodbye to everybody."""
        error = not_serving(self.service.health)
        await asyncio.gather(*(session.peer.end(GOING_AWAY, error) for session in self._sessions))
        for task in list(self._tasks):
            task.cancel()

    # -- for streams

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something in a task of its own, which is kept until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def compute(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` makes of a message of that length: in a thread if it is long."""
        if num_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def open(self, stream: Stream, prefix: str, request_id: str) -> str:
        """Counts a request in, as `Service.open`."""
        answer_id = self.service.open(prefix, request_id, stream.owner)
        self._by_answer[answer_id] = stream
        return answer_id

    def close_request(self, answer_id: str, cause: str) -> None:
        """Forgets a request, and ends it with `cause` if it had not ended."""
        self._by_answer.pop(answer_id, None)
        self.service.close(answer_id, cause)

    def abort(self, answer_id: str) -> None:
        """Ends a request in the engine, if it is there."""
        if self.service.engine is not None:
            self.service.engine.abort(answer_id, "cancel")

    def keep(self, stream: Stream) -> None:
        """The stream may be asked for by its token."""
        assert stream.token is not None
        self._by_token[stream.token] = stream

    def forget(self, stream: Stream) -> None:
        """Not any more."""
        self._orphans.discard(stream)
        if stream.token is not None:
            self._by_token.pop(stream.token, None)

    def adopt(self, stream: Stream) -> bool:
        """The stream has lost its socket. False if it can not be waited for that its client comes back."""
        if self.service.is_draining or len(self._orphans) >= MAX_ORPHANS:
            return False
        self._orphans.add(stream)
        return True

    def take_back(self, stream: Stream) -> None:
        """The stream has a socket again."""
        self._orphans.discard(stream)

    def find(self, token: str, id: str, owner: str) -> Stream:
        """The stream of that token, if it is the owner's and has that id. `ApiError` 404 tells none of it apart."""
        stream = self._by_token.get(token)
        if stream is None or stream.id != id or not hmac.compare_digest(stream.owner, owner):
            message = "no such request can be resumed: its time has passed, or id or token is wrong; create it anew"
            raise ApiError("request_not_found", message, param="token")
        return stream

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if (stream := self._by_answer.get(outbox.request_id)) is not None:
            stream.wake()
