"""`RouteEngine`: a front whose step loops run in engines on other machines, which other fronts may have, too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from socket import socketpair
from typing import Any

from ...runtime.processes.transport import SocketTransport
from ..config import EngineConfig
from ..engine.core import WarmUp
from ..engine.engine import Engine
from ..fleet.fleet_processes import FleetProcesses
from ..split.protocol import EngineReady
from ..split.remote_core import ReadText, RemoteCore, read_text_alone
from ..traffic.traffic_rules import TrafficRules
from .connected_hosts import hosts_of
from .engine_peers import EnginePeer, look_at
from .engine_server import LINK_TIMEOUT_S, EngineServer
from .likeness import check_alike
from .membership import Members

# settings of a front: the others are the engines'
OF_FRONT = (
    *("revision", "download_dir", "offline", "allow_links_outside", "tokenizer"),
    *("chat_template", "chat_template_content_format", "default_chat_template_kwargs"),
    *("tokenizer_workers", "routing_policy", "stage", "seed"),
    *("max_admitted_requests", "max_waiting_requests", "max_queue_s", "max_unread_tokens", "max_parked_s"),
)


class RouteEngine(Engine):
    """An `Engine` whose step loops are those of engines elsewhere. It takes requests while one of them serves.

    `config` is of `front_config`. `prefix_key` is that of the engines; None: the router does not know what they have
    cached. An engine is lost after `link_timeout_s` of silence; while others are heard, its requests go to them sooner.
    `traffic` is what goes by the labels of engines. `options` are those of `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        members: Members | Sequence[EnginePeer],
        prefix_key: bytes | None = None,
        *,
        link_timeout_s: float | None = LINK_TIMEOUT_S,
        traffic: TrafficRules | None = None,
        warm_up: WarmUp | None = None,
        read_text: ReadText = read_text_alone,
        **options: Any,
    ) -> None:
        members = members if isinstance(members, Members) else Members.of(members)
        processes = partial(FleetProcesses, make_hosts=hosts_of(members, prefix_key, link_timeout_s), traffic=traffic)
        core = partial(RemoteCore, make_processes=processes, read_text=read_text, warm_up=warm_up)
        super().__init__(config, core=core, **options)


async def look_at_all(peers: Sequence[EnginePeer], rules: TrafficRules | None = None) -> list[EngineReady]:
    """What the engines are, once all can be reached. Raises `ConfigError` if they differ, as `check_alike`."""
    ready = await asyncio.gather(*map(look_at, peers))
    check_alike([peer.name for peer in peers], ready, rules)
    return ready


def front_config(own: EngineConfig, ready: Sequence[EngineReady], num_places: int | None = None) -> EngineConfig:
    """The settings of a front with these engines: its own for text and admission, those of the first engine else.

    There are `num_places` for engines; None: as many as are `ready`.
    """
    theirs = ready[0].config
    assert theirs is not None
    return replace(
        theirs,
        model=theirs.model if own.model is None else own.model,
        data_parallel_size=len(ready) if num_places is None else num_places,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        executor="auto",
        record=None,
        **{name: getattr(own, name) for name in OF_FRONT},
    )


class OwnPeer:
    """The engine of this process, for its own first requests; see `EnginePeer`."""

    name = "of this process"

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def connect(self) -> SocketTransport:
        theirs, ours = socketpair()
        self._server.take(SocketTransport(theirs))
        return SocketTransport(ours)

    def note_stuck(self) -> None:
        """Does nothing: it is this process."""


async def warm_up_own(server: EngineServer, warm_up: WarmUp) -> None:
    """Runs the first requests of an engine, which is then its own front. Nothing of them stays cached."""
    peer = OwnPeer(server)
    ready = [await look_at(peer)]
    async with RouteEngine(front_config(server.config, ready), [peer], warm_up=warm_up):
        pass  # it has started: the first requests have been answered
