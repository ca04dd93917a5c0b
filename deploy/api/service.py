"""State shared by the handlers of one server: engine, live requests, drain flag."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ...runtime.env.log import get_logger
from ...runtime.pipeline import Health
from ...runtime.startup.load_progress import LoadProgress, LoadState
from ...stages.messages import AdapterRef
from ..config import ServerConfig
from ..errors import ApiError, did_you_mean, not_serving, shorten, wrong_field
from ..metrics.ignored_fields import IgnoredFields
from ..metrics.watchdog import Watchdog
from .chat_format import ChatFormat, check_parsers
from .fronts import Fronts
from .schema.body import Body
from .schema.validation import read_body

if TYPE_CHECKING:
    from ...stages.adapters.registry import AdapterRegistry
    from ...stages.engine.engine import Engine

ANSWER_S = 1.0  # for the answers to requests that a drain has aborted
MAX_ENDED = 1_000  # finished requests whose owners are kept, so that their timings can be queried

B = TypeVar("B", bound=Body)

log = get_logger("millrace.deploy")


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A request in progress."""

    owner: str  # owner of the API key
    client_id: str  # its X-Request-Id
    session: str = ""  # as in the engine's `Request`


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What one cache holds, and its bounds; None: not known, or not bounded by that."""

    name: str
    entries: int | None
    max_entries: int | None
    bytes: int | None = None
    max_bytes: int | None = None


class Service:
    """Opens requests to the engine and closes them.

    One per server, used on its event loop only. The constructor raises `ConfigError` for an unknown parser.
    """

    def __init__(self, config: ServerConfig, threads: Executor | None = None) -> None:
        check_parsers(config)
        self.config = config
        self.watchdog = Watchdog(config, threads)
        self.ignored_fields = IgnoredFields()
        self.engine: Engine | None = None
        self.fronts: Fronts | None = None  # of a server that has several
        self.is_traced = False  # whether spans are exported
        self.load_progress: LoadProgress | None = None  # of the engine that is not attached yet
        self.why_waiting: Callable[[], Health | None] = lambda: None  # why there is no engine, besides that it loads
        self.chat_format: ChatFormat | None = None
        self.model_names: tuple[str, ...] = config.served_model_name
        self.created = int(time.time())
        self.is_leaving = False  # it says that it is not ready, and still takes requests
        self.is_draining = False
        self.is_closing = False  # the drain has reached its limit: what is still unanswered is refused
        self.live: dict[str, ActiveRequest] = {}
        self.sources: Mapping[str, str] = {}  # setting -> where its value came from; empty if built in code
        self.ended: dict[str, ActiveRequest] = {}  # the last MAX_ENDED, by answer id
        self.caches: list[Callable[[], CacheUse]] = []  # of routes, for /server_info
        self._handlers: set[asyncio.Task[Any]] = set()  # of HTTP requests without an answer yet
        self._ended = asyncio.Event()  # a request, or the handler of one

    def attach(self, engine: Engine) -> None:
        """Sets the engine, once it is built. Raises `ConfigError` if one of its adapters has the model's name."""
        self.engine = engine
        self.chat_format = ChatFormat(self.config, engine)
        self.model_names = self.model_names or tuple(engine.served_names) or (engine.info.model_id,)
        if engine.adapters is not None:
            engine.adapters.exclude(self.model_names)

    @property
    def mark(self) -> str:
        """What is random in ids that live in this front begins with this; empty if there is one front."""
        return "" if self.fronts is None else self.fronts.mark

    def front_of(self, marked: str | None) -> int | None:
        """The other front in which an id lives, by what is random in it; None for this one's."""
        return None if self.fronts is None or marked is None else self.fronts.owner_of(marked)

    @property
    def health(self) -> Health:
        """Whether the server can take requests, and the reason if it cannot."""
        if self.is_draining or self.is_leaving:
            return Health("draining", reason="the server is shutting down")
        return self._engine_health

    @property
    def is_stuck(self) -> bool:
        """Whether the engine makes no progress: only a restart helps, if anything does."""
        return self._engine_health.state in ("stalled", "dead")

    @property
    def load_state(self) -> LoadState | None:
        """How far loading the model is; None once there is an engine, or if it is not known."""
        return None if self.engine is not None or self.load_progress is None else self.load_progress.state()

    @property
    def _engine_health(self) -> Health:
        """Whether the engine can compute, be the server draining or not."""
        if self.engine is None:
            if (waiting := self.why_waiting()) is not None:
                return waiting
            state = self.load_state
            return Health("loading", reason="the model is loading" + (f": {state.to_text()}" if state else ""))
        stall = self.watchdog.stall
        if stall is not None and self.engine.health.is_ready and self.engine.is_stopped_by(stall):
            return Health("stalled", stage=stall.name, reason=stall.reason)
        return self.engine.health

    def read_body(self, kind: type[B], raw: Mapping[str, Any]) -> tuple[B, list[str]]:
        """As the function `read_body`, by the server's settings. Ignored fields are logged and counted."""
        return read_body(kind, raw, self.config.strict_fields, self.ignored_fields.note)

    def refuse_if_draining(self) -> None:
        """Raises `ApiError` 503 if the server is draining. Called once, where a request comes in."""
        if self.is_draining:
            raise not_serving(self.health, retry_after_s=self.config.shutdown_timeout_s)

    def require_engine(self) -> Engine:
        """The engine; raises `ApiError` 503 unless it takes requests.

        It does during a drain, for those that came in before.
        """
        health = self._engine_health
        if self.engine is None or not (health.is_ready or (health.state == "loading" and self.engine.takes_requests)):
            raise not_serving(health)
        return self.engine

    def require_some_engine(self) -> Engine:
        """The engine, ready or not, for inspection; raises `ApiError` 503 before it is attached."""
        if self.engine is None:
            raise not_serving(self.health)
        return self.engine

    def require_chat_format(self) -> ChatFormat:
        """The model's chat format; raises `ApiError` 503 unless the engine is ready."""
        self.require_engine()
        assert self.chat_format is not None
        return self.chat_format

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a model that is not served here. None means the served model.

        Ollama's clients add a tag to names that have none: `name:latest` is `name`.
        """
        if name is not None and name not in self.model_names and name.removesuffix(":latest") not in self.model_names:
            adapters = None if self.engine is None else self.engine.adapters
            if adapters is not None and name in adapters:
                problem = "is a LoRA adapter, and adapters do not serve embeddings"
                raise wrong_field("model", problem, shorten(repr(name), 128), code="model_not_found")
            near = "" if adapters is None else adapters.near_misses(name)
            near = near or did_you_mean(name, self.model_names)
            problem = f"not served here{near}; GET /v1/models lists the served names"
            raise wrong_field("model", problem, shorten(repr(name), 128), code="model_not_found")

    def adapter_of(self, name: str | None) -> AdapterRef | None:
        """The LoRA adapter that a model's name stands for: its own name, or `base:name`; None for the served model.

        Raises `ApiError` 404 for any other name. May be called in a thread.
        """
        adapters = None if self.engine is None else self.engine.adapters
        if name is not None and name not in self.model_names and adapters is not None:
            bases = [base for base in self.model_names if name.startswith(f"{base}:")]
            for own in (name, *(name[len(base) + 1 :] for base in bases), name.removesuffix(":latest")):
                if own in adapters:
                    return AdapterRef(own)
        self.require_model(name)
        return None

    def answered_model(self, name: str | None) -> str:
        """The model's name in an answer to a request that named it so: the adapter's, or the first served name."""
        adapter = self.adapter_of(name)
        return self.model_names[0] if adapter is None else adapter.name

    def require_adapters(self) -> AdapterRegistry:
        """The names of the LoRA adapters; raises `ApiError` 404 if the server serves none."""
        adapters = self.require_engine().adapters
        if adapters is None:
            raise ApiError("not_found", "this server serves no adapters; start it with --enable-lora")
        return adapters

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters that may be named now."""
        adapters = None if self.engine is None else self.engine.adapters
        return () if adapters is None else tuple(entry.name for entry in adapters)

    def cache_salt(self, wanted: str | None, owner: str) -> str:
        """The prefix-cache salt of a request: the client's own, or `owner/salt`.

        The owner is added under `cache_salt_per_key`. A client's salt cannot hold a `/`, so it cannot equal the salt of
        another key.
        """
        return f"{owner}/{wanted or ''}" if self.config.cache_salt_per_key else wanted or ""

    def open(self, prefix: str, client_id: str, owner: str, answer_id: str | None = None, *, session: str = "") -> str:
        """Registers a request and returns the id of its answer. The caller must `close` it.

        The id is `answer_id`, or `prefix` plus the client's id. A random suffix makes it unique if it is in use.
        Raises `ApiError` 503 unless the engine is ready.
        """
        self.require_engine()
        answer_id = answer_id or prefix + client_id
        while answer_id in self.live:
            answer_id = f"{prefix}{client_id}-{secrets.token_hex(4)}"
        self.live[answer_id] = ActiveRequest(owner, client_id, session)
        return answer_id

    def close(self, answer_id: str, cause: str) -> None:
        """Removes a request, and aborts it with `cause` if it has not ended."""
        assert self.engine is not None
        if self.engine.abort(answer_id, cause):
            log.info("request.aborted", request_id=answer_id, cause=cause)
        live = self.live.pop(answer_id, None)
        if live is not None:
            self.ended.pop(answer_id, None)
            self.ended[answer_id] = live
            if len(self.ended) > MAX_ENDED:
                del self.ended[next(iter(self.ended))]
        self._ended.set()

    @property
    def num_handlers(self) -> int:
        """The number of HTTP requests without an answer yet, in the engine or not."""
        return len(self._handlers)

    @contextmanager
    def handling(self) -> Iterator[None]:
        """For the time in which the current task makes an answer: `drain` waits for its end, or cancels it."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            yield
        finally:
            self._handlers.discard(task)
            self._ended.set()

    def abort(self, some_id: str, owner: str) -> str | None:
        """Aborts the owner's request with that answer id or X-Request-Id.

        None if the owner has none in progress.
        """
        for answer_id, live in self.live.items():
            if live.owner == owner and some_id in (answer_id, live.client_id):
                assert self.engine is not None
                self.engine.abort(answer_id, "cancel")
                return answer_id
        return None

    async def drain(self, timeout_s: float) -> bool:
        """Stops admission and waits for the requests that have come in; False if any had to be aborted.

        Requests that remain after `timeout_s` are aborted, and their handlers get `ANSWER_S` to answer the clients.
        Handlers without a request in the engine, or with one that does not end, then answer 503.
        """
        self.is_draining = True
        if await self._wait_until(self._is_empty, timeout_s):
            return True
        for request_id in list(self.live):
            if self.engine is not None:
                self.engine.abort(request_id, "server_shutdown")
        await self._wait_until(lambda: not self.live, ANSWER_S)
        self.is_closing = True
        for task in self._handlers:
            task.cancel()
        await self._wait_until(self._is_empty, ANSWER_S / 2)
        return False

    def _is_empty(self) -> bool:
        return not (self.live or self._handlers)

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for a condition that only the end of a request can make true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True
