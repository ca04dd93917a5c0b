"""The middleware of a front: requests that another front is to answer, and answers that are about all of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..api.service import Service
from ..errors import ApiError, shorten, wrong_field
from ..http.answer_record import KEY, KEY_HEADER
from ..http.body_reader import read_ahead
from ..http.listening import ListeningSockets
from ..http.query_params import whole_number
from ..http.request_context import OWNER
from ..http.responses import answer
from ..metrics.metrics import CONTENT_TYPE, Metrics
from ..websocket.peer import Peer
from .all_models import AllModels
from .front_metrics import rendered
from .models import is_for_a_model, model_in
from .other_fronts import OtherFronts, is_of_a_front

RESPONSES = "/v1/responses/{id}"
MODELS, MODEL = "/v1/models", "/v1/models/{id}"
OLLAMA_LISTS = ("/api/tags", "/api/ps")
ENGINES = "/admin/engines/{id}"
HEALTH = ("/health", "/health/ready", "/ping", "/healthz", "/readyz", "/v2/health/ready")
ONE_FRONT = frozenset({"model", "front"})  # in an address: one front answers for itself
FRONT_BITS = 44  # of a cursor of /v1/requests, below the front's number
MOST_LISTED = 1_000
INDEX = "each model has an engine of this index; name one by its address, as GET /server_info?model=NAME has it"
AWAY = 503  # status of a front that does not answer

Answer = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]


class AllFronts:
    """See `ServerFronts` of `deploy/server`: this front, as its server uses it."""

    def __init__(self, fronts: OtherFronts) -> None:
        self._fronts, self._root_path = fronts, fronts.config.root_path
        self._member = fronts.member
        self._models_of_all = AllModels(fronts)
        self._turns = itertools.count()
        self._keeping: frozenset[Callable[..., object]] = frozenset()  # handlers whose answers are kept by a key
        self._of_all: dict[str, Answer] = {
            "/metrics": self._metrics,
            "/load": self._load,
            "/v1/requests": self._requests,
            **dict.fromkeys((MODELS, *OLLAMA_LISTS), self._models),
            "/admin/cache/reset": self._reset,
            "/admin/flight": self._flight,
            "/admin/traffic": self._traffic,
        }
        self._of_one: dict[str, Answer] = dict.fromkeys(HEALTH, self._health)
        self._of_one["/server_info"] = self._server_info

    def attach(self, service: Service, metrics: Metrics) -> None:
        self._fronts.attach(service, metrics)

    def listen(self) -> ListeningSockets:
        return self._fronts.listen()

    async def close(self) -> None:
        await self._fronts.close()

    def middleware(self, keeping: Collection[Callable[..., object]]) -> Middleware:
        self._keeping = frozenset(keeping)

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._member.has_news = True
            try:
                if request.match_info.http_exception is not None:
                    return await handler(request)
                return await self._answer(request, handler)
            finally:
                self._member.has_news = True

        return middleware

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical.removeprefix(self._root_path)
        if (made := self._of_one.get(path)) is not None:
            handler = _through(made, handler)
        if is_of_a_front(request):
            return await handler(request)
        models, group, name = self._fronts.models, self._fronts.numbers, None
        if models.has_several and is_for_a_model(request, path):
            name = await model_in(request, path, self._fronts.config)
            group = models.group_of(name)
        key = request.headers.get(KEY_HEADER, "")
        if KEY.fullmatch(key) and request.match_info.handler in self._keeping:
            keeper = self._fronts.keeper_of(request[OWNER], key, group)  # also one that is away
            if keeper == self._fronts.number:
                return await handler(request)
            await read_ahead(request, self._fronts.config)  # within the limits of size and time
            return await self._fronts.pass_on(request, keeper)
        if self._fronts.number not in group:
            group = models.ready(group, name)
            await read_ahead(request, self._fronts.config)
            return await self._fronts.pass_on(request, group[self._turn(len(group))])
        if path.startswith(RESPONSES):
            owner = self._fronts.owner_of(request.match_info["id"].removeprefix("resp_"))
            return await (handler(request) if owner is None else self._fronts.pass_on(request, owner))
        if models.has_several and "model" in request.query and request.method in ("GET", "HEAD"):
            name = request.query["model"]
            group = models.ready(models.group_of(name), name)
            is_own = self._fronts.number in group
            return await (handler(request) if is_own else self._of_front(request, group[self._turn(len(group))]))
        if "front" in request.query and request.method in ("GET", "HEAD"):
            most = len(self._fronts.numbers) - 1
            front = whole_number(request, "front", self._fronts.number, least=0, most=most)
            return await (handler(request) if front == self._fronts.number else self._of_front(request, front))
        if models.has_several and path == MODEL:
            group = models.group_of(name := request.match_info["id"])
            is_own = self._fronts.number in group
            return await (handler(request) if is_own else self._of_front(request, models.ready(group, name)[0]))
        if models.has_several and path.startswith(ENGINES):
            if request.match_info["id"].isdecimal():
                raise wrong_field("id", INDEX, shorten(request.match_info["id"], 32))
            return await self._found(request, handler, "not_found")
        if path.startswith("/v1/requests/"):
            return await self._found(request, handler)
        made = self._of_all.get(path)
        return await (handler(request) if made is None else made(request, handler))

    # -- of one front

    async def _of_front(self, request: web.Request, front: int) -> web.StreamResponse:
        """What a certain front answers, also over a WebSocket."""
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return await self._fronts.pass_on(request, front)
        config = self._fronts.config
        peer = Peer(request, config)
        async with self._fronts.open_socket(request.headers, front, request.raw_path) as socket:
            await peer.open()
            try:
                await relay(peer, socket)
            finally:
                socket.is_over = peer.has_left
                await peer.release()
        return peer.response

    async def _found(
        self, request: web.Request, handler: Handler, unknown: str = "request_not_found"
    ) -> web.StreamResponse:
        """By an id that a client may have chosen: the first front that knows it answers. `unknown`: the error else."""
        try:
            return await handler(request)
        except ApiError as error:
            if error.code != unknown:
                raise
            away: web.Response | None = None
            for front in self._others():
                status, found = await self._fronts.answer_of(request, front)
                if status == AWAY:
                    away = answer(found, status=status)
                elif status != error.status:
                    return answer(found, status=status)
            if away is not None:  # that one may know it
                return away
            raise

    def _others(self) -> list[int]:
        """The other fronts that take requests, as far as is known."""
        ready = {state.number for state in self._member.states if state.state == "ready"}
        return [number for number in self._fronts.numbers[1:] if number in ready]

    # -- of all fronts

    async def _metrics(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            found, ended = await self._member.metrics()
        except TimeoutError:  # better those of this front than none
            return await handler(request)
        body = rendered(found, ended, self._member.states)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response, body = await _json_of(request, handler)
        status = response.status
        is_leaving = body["status"] == "draining"
        is_of_one = is_of_a_front(request) or not ONE_FRONT.isdisjoint(request.query)
        if self._fronts.models.has_several and not is_leaving and not is_of_one:
            status, body = await self._models_of_all.health(request, (status, body))
        body["front"] = self._fronts.number
        body["fronts"] = self._fronts.states
        missing = [state for state in self._member.states if state.state != "ready" and self._member.has_started]
        if status == 200 and missing and not is_of_one:
            text = "; ".join(f"front {state.number} is {state.state}: {state.reason}" for state in missing)
            body["status"] = "degraded"
            body["reason"] = "; ".join(filter(None, [body.get("reason"), text]))
        return answer(body, status=status)

    async def _load(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        _, body = await _json_of(request, handler)
        for front in self._others():
            status, other = await self._fronts.answer_of(request, front)
            if status == 200:
                body["server_load"] += other["server_load"]
                body["estimated_wait_s"] = max(body["estimated_wait_s"], other["estimated_wait_s"])
        return answer(body)

    async def _server_info(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response, body = await _json_of(request, handler)
        if response.status == 200:
            body["process"] |= {"front": self._fronts.number, "fronts": self._fronts.states}
        return answer(body, status=response.status)

    async def _requests(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The running requests of all fronts, one front after another, each in order of arrival."""
        limit = whole_number(request, "limit", MOST_LISTED, least=1, most=MOST_LISTED)
        cursor = whole_number(request, "cursor", 0, least=0, most=2**53)
        first, inner = cursor >> FRONT_BITS, cursor & ((1 << FRONT_BITS) - 1)
        rows: list[Any] = []
        own, live = self._fronts.number, {self._fronts.number, *self._others()}
        for front in sorted(one for one in live if one >= first):
            place = inner if front == first else 0
            if len(rows) == limit:
                return _page(rows, front << FRONT_BITS)
            path = f"{request.path}?limit={limit - len(rows)}&cursor={place}"
            status, body = await self._fronts.answer_of(request, front, path)
            if status != 200:
                if front == own:
                    return answer(body, status=status)
                continue
            rows += [row | {"front": front} for row in body["data"]]
            if body["has_more"]:
                return _page(rows, front << FRONT_BITS | body["next_cursor"])
        return _page(rows, None)

    async def _models(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The models of all fronts, where they have different ones, in the order of the command line at each front."""
        if not self._fronts.models.has_several:
            return await handler(request)
        field = "data" if request.path.endswith(MODELS) else "models"
        found = await self._of_each_model(request, handler)
        return answer(found[0] | {field: [row for body in found for row in body[field]]})

    async def _reset(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """One front of each model tells its engines."""
        if not self._fronts.models.has_several:
            return await handler(request)
        found = await self._of_each_model(request, handler)
        return answer({"freed_blocks": sum(body["freed_blocks"] for body in found)})

    async def _of_each_model(self, request: web.Request, handler: Handler) -> list[dict[str, Any]]:
        """What a front of each model answers, at least one: without models that are not served now."""
        models, found = self._fronts.models, list[dict[str, Any]]()
        away = ApiError("loading", "no model is served now; try again shortly", retry_after_s=1.0)
        for name in models.names:
            group = models.group_of(name)
            try:
                if self._fronts.number in group:
                    found.append((await _json_of(request, handler))[1])
                    continue
                status, body = await self._fronts.answer_of(request, models.ready(group, name)[0])
            except ApiError as error:
                away = error
            else:
                found += [body] if status == 200 else []
        if not found:
            raise away
        return found

    def _turn(self, count: int) -> int:
        """One after the other of so many."""
        return next(self._turns) % count

    async def _traffic(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        several = self._fronts.models.has_several
        return await (self._models_of_all.traffic(request) if several else handler(request))

    async def _flight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Each front writes a file."""
        _, body = await _json_of(request, handler)
        files = {str(self._fronts.number): body.get("file")}
        for front in self._others():
            status, other = await self._fronts.answer_of(request, front)
            files[str(front)] = other.get("file") if status == 200 else None
        return answer(body | {"files": files})


def _through(made: Answer, handler: Handler) -> Handler:
    async def through(request: web.Request) -> web.StreamResponse:
        return await made(request, handler)

    return through


async def relay(peer: Peer, socket: Any) -> None:
    """Carries messages both ways until one side ends."""

    async def back() -> None:
        while (message := await socket.receive()) is not None:
            await peer.send(message)

    async def forth() -> None:
        while (message := await peer.receive()) is not None:
            await socket.send(message)

    tasks = [asyncio.ensure_future(back()), asyncio.ensure_future(forth())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _page(rows: list[Any], next_cursor: int | None) -> web.Response:
    return answer({"object": "list", "data": rows, "has_more": next_cursor is not None, "next_cursor": next_cursor})


async def _json_of(request: web.Request, handler: Handler) -> tuple[web.Response, dict[str, Any]]:
    """This front's own answer, and what it says."""
    response = await handler(request)
    assert isinstance(response, web.Response) and isinstance(response.body, bytes)
    return response, orjson.loads(response.body)
