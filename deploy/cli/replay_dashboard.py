"""`millrace replay FILE --dashboard`: the dashboard over a recording, with a bar to move in time.

A separate server on loopback only, with the page, its files and one WebSocket. It serves no model.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from aiohttp import web

from ...runtime.workers.thread_start import ThreadPool
from ...stages.recordings.film import film
from ...stages.recordings.reader import Recording
from ...stages.schedule.policy import Policy
from ..config import ServerConfig
from ..dashboard.playback.data import PlaybackData
from ..dashboard.playback.viewer import PlaybackViewer
from ..dashboard.viewers import Viewers
from ..errors import ApiError
from ..http.listener import ServerRunner, Site
from ..http.listening import ListeningSockets
from ..http.origin_check import OriginCheck, guard
from ..http.package_version import package_version
from ..server.middleware import identify
from ..server.pages import Pages
from ..websocket.peer import TRY_AGAIN_LATER, Peer

MAX_VIEWERS = 8  # each holds the engine state of one moment in memory


def show(recording: Recording, policy: Policy | None, config: ServerConfig) -> int:
    """Serves the dashboard until SIGTERM or SIGINT and returns 0. `RecordingError` if it cannot be played."""
    print(f"millrace: running {recording.path} once ...", file=sys.stderr)
    playback_data = PlaybackData(
        film(recording, policy, _print_progress if sys.stderr.isatty() else lambda time_s: None)
    )
    if trouble := playback_data.film.trouble:
        print(f"millrace: {trouble}", file=sys.stderr)
    asyncio.run(_serve(playback_data, ServerConfig(port=config.port)))
    return 0


def _print_progress(time_s: float) -> None:
    print(f"\r  {time_s:,.1f} s", end="\r", file=sys.stderr, flush=True)


async def _serve(playback_data: PlaybackData, config: ServerConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ReplayDashboard(playback_data, config) as playback:
        print(f"millrace: {playback.url}/dashboard shows it; press Ctrl-C to stop", flush=True)
        await stop.wait()


class ReplayDashboard:
    """The HTTP server of a loaded recording: listens at `url` inside `async with`."""

    def __init__(self, playback_data: PlaybackData, config: ServerConfig) -> None:
        self._playback_data = playback_data
        self._config = config
        self._threads = ThreadPool(2, thread_name_prefix="millrace-playback")
        self._pages = Pages()
        self._viewers = Viewers(MAX_VIEWERS, "pages show this recording")
        self._runner = ServerRunner(self._make_app(), config)
        self._port = config.port

    @property
    def url(self) -> str:
        """The server's address, with the actual port."""
        return f"http://{self._config.host}:{self._port}"

    async def __aenter__(self) -> ReplayDashboard:
        listening = ListeningSockets.open(self._config)
        await self._runner.setup()
        await Site(self._runner, listening, self._config, None).start()
        self._port = listening.port
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._viewers.close(TRY_AGAIN_LATER, ApiError("draining", "the replay server is shutting down"))
        await self._runner.cleanup()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """`GET /dashboard/feed`."""

        def viewer(peer: Peer) -> PlaybackViewer:
            return PlaybackViewer(self._playback_data, peer, self._config, self._threads, package_version())

        return await self._viewers.show(request, self._config, viewer)

    def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[identify(lambda code: None), guard(OriginCheck.of(self._config))])
        app.on_response_prepare.append(_add_headers)
        app.add_routes(
            [
                web.get("/dashboard", self._pages.dashboard),
                web.get("/dashboard/feed", self.socket, allow_head=False),
                web.get("/static/{name:(?s:.+)}", self._pages.file),
            ]
        )
        return app


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Server"] = "millrace"
