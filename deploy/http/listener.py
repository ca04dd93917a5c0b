"""aiohttp's runner, and a site that accepts connections, also when descriptors are scarce."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web

from ...runtime.env.limits import open_files
from ...runtime.env.log import get_logger
from ..config import ServerConfig
from .connections import LINGER_S, MAX_HEADER_LINE, MAX_HEADERS, NUM_RESERVED, Listener
from .listening import ListeningSockets
from .origin_check import FOREIGN_VERSION

FILES_BESIDE = 32  # of the engine, its helpers and the log; the other descriptors may be connections
MIN_CONNECTIONS = 8
WRITE_S = (1.0, 5.0)  # at least and at most, at the end, for clients that read slowly
ACCEPTS_AT_ONCE = 128  # in one turn of the loop
PAUSE_S = 1.0  # without accepting, after no descriptor or memory could be had

log = get_logger("millrace.deploy")


class Site(web.BaseSite):
    """Accepts the connections of sockets that listen already.

    Unlike the loop's own servers: while `accept` fails, it pauses, and logs one line when that begins and one when it
    ends. Idle connections are closed meanwhile, as they hold descriptors.
    """

    def __init__(
        self, runner: web.AppRunner, listening: ListeningSockets, config: ServerConfig, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(runner, ssl_context=tls)
        self._listening = listening
        self._handshake_timeout_s = None if tls is None else config.header_timeout_s
        self._connecting: set[asyncio.Task[None]] = set()
        self._pausing: asyncio.TimerHandle | None = None
        self._paused_since_s: float | None = None

    @property
    def name(self) -> str:
        return str(self._listening.sockets[0].getsockname())

    async def start(self) -> None:
        await super().start()
        for sock in self._listening.sockets:
            sock.setblocking(False)
        self._resume()

    async def stop(self) -> None:
        if self._pausing is not None:
            self._pausing.cancel()
        self._remove_readers()
        for task in list(self._connecting):
            task.cancel()
        self._listening.close()
        await super().stop()

    def _resume(self) -> None:
        self._pausing = None
        loop = asyncio.get_running_loop()
        for sock in self._listening.sockets:
            loop.add_reader(sock, self._accept, sock)

    def _remove_readers(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._listening.sockets:
            if sock.fileno() >= 0:
                loop.remove_reader(sock)

    def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                return self._pause(error)
            if self._paused_since_s is not None:
                log.info("server.accepts_again", paused_s=round(loop.time() - self._paused_since_s, 3))
                self._paused_since_s = None
            task = loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert isinstance(server, Listener)
        if self._paused_since_s is None:
            self._paused_since_s = loop.time()
            log.error("server.accepts_nothing", reason=error.strerror, num_connections=len(server.connections))
        self._remove_readers()
        self._pausing = loop.call_later(PAUSE_S, self._resume)
        server.close_idle()

    async def _connect(self, connection: socket.socket) -> None:
        assert self._runner.server is not None
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._runner.server,
                connection,
                ssl=self._ssl_context,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except OSError:  # the client has left, or its TLS handshake failed
            connection.close()
        except BaseException:
            connection.close()
            raise


class ServerRunner(web.AppRunner):
    """aiohttp's runner, which makes connections of `Listener`.

    A full server still answers the paths in `probes`.
    """

    def __init__(self, app: web.Application, config: ServerConfig, probes: Collection[str] = ()) -> None:
        super().__init__(app, shutdown_timeout=1.0)
        self._config = config
        self._probes = frozenset(probes)

    def write_through(self) -> None:
        """From now on a write waits until the kernel has all bytes, so that the end of the process loses none."""
        if isinstance(self.server, Listener):
            self.server.write_through()

    def close_idle(self) -> None:
        """Closes the connections that wait for a request."""
        if isinstance(self.server, Listener):
            self.server.close_all_idle()

    def wait_for_writes(self, limit_s: float) -> None:
        """`cleanup` will wait so long for answers that are being written, within `WRITE_S`."""
        self._shutdown_timeout = min(max(limit_s, WRITE_S[0]), WRITE_S[1])

    def _max_connections(self) -> int:
        """As configured, or as many as this process has descriptors for."""
        wanted = self._config.max_connections
        most = min(wanted, max(MIN_CONNECTIONS, open_files() - FILES_BESIDE - NUM_RESERVED))
        if most < wanted:
            log.warning("server.connections_limited", max_connections=most, wanted=wanted, open_files=open_files())
        return most

    async def _make_server(self) -> web.Server:
        stock = await super()._make_server()
        return Listener(
            stock.request_handler,
            request_factory=_answerable(stock.request_factory),
            handler_cancellation=True,  # a disconnect cancels the handler, and so ends the request in any stage
            max_connections=self._max_connections(),
            probes=self._probes,
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
