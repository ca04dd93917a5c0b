"""The HTTP server of one engine: start, attach, drain and stop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware

from ...runtime.env.log import get_logger
from ..admin.routes import AdminRoutes
from ..api.service import Service
from ..config import ServerConfig
from ..http.api_keys import ApiKeys
from ..http.listener import ServerRunner, Site
from ..http.listening import ListeningSockets
from ..http.origin_check import OriginCheck, guard
from ..http.package_version import package_version
from ..http.sized_threads import SizedThreads
from ..http.tls import tls_context
from ..inspect.routes import InspectRoutes
from ..metrics.metrics import Metrics
from ..metrics.otel_environment import TraceExport
from ..metrics.otlp_export import OtlpExporter
from ..openapi.document_routes import DocumentRoutes
from .kept_answers import KeptAnswers
from .middleware import NO_KEYS, add_headers, check_keys, identify, take_in
from .request_log import RequestLog
from .routes import Routes

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

log = get_logger("millrace.deploy")


class ServerFronts(Protocol):
    """This front of a server that has several; see `deploy/front_processes`."""

    def attach(self, service: Service, metrics: Metrics) -> None:
        """Called once, when the server is made."""

    def listen(self) -> ListeningSockets:
        """The socket at which other fronts reach this one."""

    def middleware(self, keeping: Collection[Callable[..., object]]) -> Middleware:
        """Passes requests on, or answers for all fronts; after the check of keys.

        The answers of the handlers in `keeping` are kept by the key of their request, each in one front.
        """

    async def close(self) -> None:
        """Closes the connections to other fronts."""


class Server:
    """An HTTP server; it answers 503 `loading` from `start` until an engine is attached.

    ```python
    async with Server(ServerConfig(port=0)) as server, Engine(config) as engine:
        server.attach(engine)
        print(server.url)
    ```
    """

    def __init__(
        self,
        config: ServerConfig,
        listening: ListeningSockets | None = None,
        environment: Mapping[str, str] | None = None,
        fronts: ServerFronts | None = None,
    ) -> None:
        """`listening`: the sockets of this configuration, if they are open already. `environment`: variables of
        OpenTelemetry, which add to the setting of its endpoint. `fronts`: this is one of several front processes."""
        config.check_folders()
        self.config = config
        self._listening = listening
        self._fronts = fronts
        self._threads = SizedThreads("millrace-http")  # for long bodies and prompts
        self.service = Service(config, self._threads)
        self.metrics = Metrics(self.service.watchdog, lambda: self.service.health)
        self.metrics.ignored_fields = self.service.ignored_fields
        export = TraceExport.read(environment or {}, config.otlp_traces_endpoint)
        self.otlp_exporter = None if export is None else OtlpExporter(export, package_version(), self._threads)
        self.service.is_traced = export is not None
        self.metrics.otlp_exporter = self.otlp_exporter
        if fronts is not None:
            fronts.attach(self.service, self.metrics)
        self._routes = Routes(self.service, self.metrics, self._threads)
        self._kept_answers = KeptAnswers(self.service)
        self._sockets = self._routes.sockets
        self._inspect_routes = InspectRoutes(self.service, self._threads)
        self._admin = AdminRoutes(self.service, self._threads)
        self._runner: ServerRunner | None = None
        self._limit_s = 0.0  # of the drain, by the loop's clock
        self._port = config.port
        self._tls = tls_context(config)

    @property
    def url(self) -> str:
        """The base URL; with port 0, it has the port that the system chose."""
        if self.config.uds is not None:
            return f"unix:{self.config.uds}"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self._port}"

    async def start(self) -> None:
        """Starts to accept connections. `ConfigError` if the address cannot be bound."""
        self._listening = self._listening or ListeningSockets.open(self.config)
        self._runner = ServerRunner(self._make_app(), self.config, self._probes())
        await self._runner.setup()
        if self._fronts is not None:  # first: clients may ask for what another front has
            await Site(self._runner, self._fronts.listen(), self.config, None).start()
        await Site(self._runner, self._listening, self.config, self._tls).start()
        if self.config.uds is None:
            self._port = self._listening.port

    def attach(self, engine: Engine) -> None:
        """Starts to serve requests with `engine`, which must have started."""
        self.service.attach(engine)
        self.metrics.watch(engine, self.service.model_names[0])
        self._sockets.watch(engine)
        self._routes.feed.watch(engine)
        self._inspect_routes.history.watch(engine)
        self.service.watchdog.watch(engine, self.metrics.num_tokens)
        if self.otlp_exporter is not None:
            self.otlp_exporter.watch(engine, self.service.model_names[0])
        if self.config.log_requests:
            RequestLog(self.config.log_prompts).watch(engine.exit)
        if engine.traffic is not None:
            engine.traffic.log_texts(self.config.log_prompts)

    async def leave(self) -> None:
        """Says that it is not ready, and goes on for `lame_duck_s`: load balancers take time to hear of it.

        Answers close their connections from then on. In the end those that are idle are closed: the drain would refuse
        what comes over them.
        """
        self.service.is_leaving = True
        await asyncio.sleep(self.config.lame_duck_s)
        if self._runner is not None:
            self._runner.close_idle()

    async def drain(self) -> bool:
        """Refuses new requests, waits up to `shutdown_timeout_s` for those that have come in, aborts the rest.

        A background response has been answered once its client has fetched it, and a resumable stream that lost its
        socket once its client has come back, or the window for that is over. Returns whether all requests ended in
        time.
        """
        loop = asyncio.get_running_loop()
        self._limit_s = loop.time() + self.config.shutdown_timeout_s
        self.service.is_draining = True
        if self._runner is not None:
            self._runner.write_through()
        self._sockets.drain()
        is_clean = await self.service.drain(self.config.shutdown_timeout_s)
        await self._sockets.wait_until_resumed(self._limit_s - loop.time())
        await self._routes.responses.wait_until_fetched(self._limit_s - loop.time())
        return is_clean

    async def stop(self) -> None:
        """Closes every connection and stops listening. Idempotent."""
        self.service.watchdog.stop()
        if self.otlp_exporter is not None:
            await self.otlp_exporter.stop()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await asyncio.gather(self._sockets.close(), self._routes.feed.close(), self._admin.profiler.close())
            runner.wait_for_writes(self._limit_s - asyncio.get_running_loop().time())
            await runner.cleanup()
        if self._fronts is not None:
            await self._fronts.close()
        if self._listening is not None:
            self._listening.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def _make_app(self) -> web.Application:
        routes = self._routes
        admin = self._admin
        docs = DocumentRoutes(self.service, self._threads, package_version())
        public = (route.path for route in routes.table() if route.handler in routes.public)
        open_paths = re.compile("|".join(_pattern(path) for path in public))
        others = dict.fromkeys(routes.public, NO_KEYS) | dict.fromkeys(
            admin.handlers, ApiKeys(self.config.admin_key, "admin key")
        )
        inside = self._inspect_routes
        others |= dict.fromkeys(inside.handlers | admin.runtime_handlers, inside.keys)
        gate = OriginCheck.of(self.config)
        middlewares = [
            identify(self.metrics.count_rejection, self.config.root_path),
            guard(gate),
            check_keys(ApiKeys(self.config.api_key), others, open_paths),
            take_in(self.service, routes.new_work, routes.open_ended),
        ]
        keeping = routes.new_work - routes.open_ended
        if self._fronts is not None:
            middlewares.append(self._fronts.middleware(keeping))
        middlewares.append(self._kept_answers.middleware(keeping))
        app = web.Application(middlewares=middlewares, client_max_size=self.config.max_body_bytes)
        app.on_response_prepare.append(add_headers(self.service, gate))
        app.on_shutdown.append(routes.stop)
        app.on_shutdown.append(self._kept_answers.stop)
        table = routes.table() + inside.table() + admin.table() + docs.table()
        app.add_routes(table)
        if root := self.config.root_path:  # NOTE: both forms, as some proxies strip the prefix and some do not
            app.add_routes([web.RouteDef(one.method, root + one.path, one.handler, one.kwargs) for one in table])
        return app

    def _probes(self) -> list[str]:
        """The paths that a full server still answers."""
        paths = [route.path for route in self._routes.table() if route.handler in self._routes.probes]
        return [prefix + path for prefix in {"", self.config.root_path} for path in paths]


__all__ = ["Server", "ServerConfig"]


def _pattern(path: str) -> str:
    """A route's path as a regex: `{name}` matches one segment, `{name:regex}` that regex."""
    pieces = re.split(r"\{\w+(?::([^}]*))?\}", path)  # literal, regex, literal, ...
    fixed, parts = map(re.escape, pieces[::2]), (part or "[^/]+" for part in pieces[1::2])
    return "".join(piece for pair in zip_longest(fixed, parts, fillvalue="") for piece in pair)
