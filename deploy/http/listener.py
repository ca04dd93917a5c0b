"""aiohttp's runner and site, with limited connections and timed TLS handshakes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web

from ..config import ServerConfig
from .connections import LINGER_S, MAX_HEADER_LINE, MAX_HEADERS, Listener
from .origin_check import FOREIGN_VERSION


class Site(web.TCPSite):
    """A TCP site with a time limit on the TLS handshake, which no `Connection` can time."""

    def __init__(self, runner: web.AppRunner, config: ServerConfig, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, config.host, config.port, backlog=1024, ssl_context=tls)
        self._handshake_timeout_s = None if tls is None else config.header_timeout_s

    async def start(self) -> None:
        await web.BaseSite.start(self)
        assert self._runner.server is not None
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=self._handshake_timeout_s,
        )


class ServerRunner(web.AppRunner):
    """aiohttp's runner, which makes connections of `Listener`."""

    def __init__(self, app: web.Application, config: ServerConfig) -> None:
        super().__init__(app, shutdown_timeout=1.0)
        self._config = config

    def write_through(self) -> None:
        """From now on a write waits until the kernel has all bytes, so that the end of the process loses none."""
        if isinstance(self.server, Listener):
            self.server.write_through()

    def wait_for_writes(self, limit_s: float) -> None:
        """`cleanup` will wait so long for answers that are being written, and for at least a second."""
        self._shutdown_timeout = max(1.0, limit_s)

    async def _make_server(self) -> web.Server:
        stock = await super()._make_server()
        return Listener(
            stock.request_handler,
            request_factory=_answerable(stock.request_factory),
            handler_cancellation=True,  # a disconnect cancels the handler, and so ends the request in any stage
            max_connections=self._config.max_connections,
            header_timeout_s=self._config.header_timeout_s,
            keepalive_timeout=self._config.keep_alive_s,
            max_line_size=MAX_HEADER_LINE,
            max_field_size=MAX_HEADER_LINE,
            max_headers=MAX_HEADERS,
            lingering_time=LINGER_S,
            auto_decompress=False,
            access_log=None,
        )


def _answerable(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Wraps aiohttp's request factory: requests of foreign HTTP versions get a readable error.

    aiohttp's parser accepts HTTP/0.9 and 2.0 request lines and repeats the version in its answer, which no client can
    read. Such a request is marked with `FOREIGN_VERSION`; `OriginCheck.check` refuses it, in HTTP/1.1.
    """

    def request_of(message: Any, *rest: Any) -> web.BaseRequest:
        if message.version in (HttpVersion10, HttpVersion11):
            return make(message, *rest)
        request = make(message._replace(version=HttpVersion11, should_close=True), *rest)
        request[FOREIGN_VERSION] = message.version
        return request

    return request_of
