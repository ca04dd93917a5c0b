"""A front process: the HTTP server of `serve`, with engines that it shares with other fronts.

The supervisor starts it as `python -P -m` and this module's name; see `deploy/front_processes`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from ....model.errors import ModelError
from ....runtime.env.limits import raise_open_files
from ....runtime.env.log import bind, configure, get_logger
from ....runtime.env.loops import loop_factory
from ....runtime.processes.child import joined
from ....runtime.startup.load_progress import LoadProgress, LoadState
from ....runtime.workers.thread_start import ThreadNotStarted
from ....stages.errors import ConfigError
from ....stages.machines.engine_peers import EnginePeer, TcpPeer
from ....stages.machines.engine_sources import Address, EngineSource, FixedAddress, certified_name
from ....stages.machines.membership import Members
from ...front_processes.front_member import FrontMember
from ...front_processes.sockets import UNIX
from ...front_processes.unix_peer import UnixPeer
from ...front_processes.words import EngineStuck, FrontReady, FrontSetup, StartFailed, traffic_of
from ...http.listening import ListeningSockets
from ..machines.addresses import parse_source, prefix_key, read_key, read_tls, tls_files
from ..machines.route import RoutedEngine

if TYPE_CHECKING:
    from ...server.server import Server

log = get_logger("millrace.deploy")


def main(arguments: Sequence[str]) -> int:
    """Runs one front until the supervisor stops it. Returns the exit code."""
    sock, _ = joined(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_live(sock))


async def _live(sock: socket) -> int:
    member = FrontMember(sock)
    member.link.start()
    setup: FrontSetup = await member.link.setup
    server = setup.server_config
    configure(server.log_format, server.log_level, with_error_messages=server.log_error_messages)
    bind(front=setup.number)
    raise_open_files()
    serving = asyncio.ensure_future(_serve(member, setup))
    stopping = asyncio.ensure_future(member.link.stopping.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and member.has_started:
            await serving
        if serving.done() and (error := serving.exception()) is not None:
            member.link.post(_not_started(error))
            return 1
        return 0
    finally:
        for task in (serving, stopping):
            task.cancel()
        await asyncio.wait([serving, stopping])
        member.close()


async def _serve(member: FrontMember, setup: FrontSetup) -> None:
    """Serves until the supervisor says stop, and drains then."""
    from ...front_processes.all_fronts import AllFronts
    from ...front_processes.other_fronts import OtherFronts
    from ...server.server import Server

    fronts = OtherFronts(member, setup.number, Path(setup.folder), setup.server_config)
    async with AsyncExitStack() as stack:
        router, engine = _router(member, setup), None
        member.follow_traffic(router.follow)
        if setup.is_successor:
            engine = await stack.enter_async_context(router)
        listening = ListeningSockets.open(setup.server_config, shares_port=True)
        server = await stack.enter_async_context(Server(setup.server_config, listening, os.environ, AllFronts(fronts)))
        server.service.sources, server.service.created = setup.sources, setup.created
        if engine is None:
            _follow_loading(member, server)
            server.service.why_waiting = router.why_waiting
            await member.has_engines.wait()
            engine = await stack.enter_async_context(router)
        server.attach(engine)
        engine.give_way()
        gc.collect()
        gc.freeze()
        member.tell_metrics(fronts.own_metrics)
        member.has_started = True
        member.link.post(FrontReady(list(server.service.model_names), engine.info.model_impl))
        await member.link.stopping.wait()
        if setup.server_config.lame_duck_s:
            log.info("server.leaving", live=len(server.service.live), lame_duck_s=setup.server_config.lame_duck_s)
            await server.leave()
        log.info("server.draining", live=len(server.service.live))
        is_clean = await server.drain()
        member.tell_last_metrics()
        await server.stop()
    log.info("server.stopped", is_clean=is_clean)


def _follow_loading(member: FrontMember, server: Server) -> None:
    """Lets `/health` tell how far the engines are."""
    progress = LoadProgress(time.monotonic)

    def follow(state: LoadState) -> None:
        progress.follow(state)
        server.service.load_progress = progress

    member.on_loading = follow


def _router(member: FrontMember, setup: FrontSetup) -> RoutedEngine:
    key = read_key(None if setup.fleet_key_file is None else Path(setup.fleet_key_file))
    tls = read_tls(tls_files(*map(Path, setup.fleet_tls)) if setup.fleet_tls else None, "dialer")
    sources = [_source(index, text) for index, text in enumerate(setup.engines)]

    def note_stuck(index: int) -> None:
        if not member.link.stopping.is_set():
            member.link.post(EngineStuck(index))

    def make_peer(address: Address) -> EnginePeer:
        path, index = address
        if path.startswith("/"):
            return UnixPeer(path, index, note_stuck)
        return TcpPeer(address, key, tls, partial(certified_name, sources, address))

    prefix = prefix_key(key) if setup.prefix_key is None else setup.prefix_key
    members, timeout_s = Members(sources, make_peer), setup.server_config.link_timeout_s
    return RoutedEngine(setup.engine_config, members, prefix, timeout_s, traffic_of(setup.traffic), setup.model)


def _source(index: int, text: str) -> EngineSource:
    """What names an engine. One of this machine has a path for a host, and its index for a port."""
    if text.startswith(UNIX):
        return FixedAddress(text, (text.removeprefix(UNIX), index))
    return parse_source(text)


def _not_started(error: BaseException) -> StartFailed:
    """Why the front cannot start, or has ended."""
    for kind in (ConfigError, ModelError):
        if isinstance(error, kind):
            return StartFailed(kind.__name__, str(error))
    if not isinstance(error, (ThreadNotStarted, OSError, MemoryError)):
        log.error("front_process.failed", error=type(error).__name__, exc_info=error)
    return StartFailed(type(error).__name__, str(error) or type(error).__name__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
