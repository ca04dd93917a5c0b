"""`millrace route`: the HTTP server of `millrace serve`, in front of engines that run elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from ....stages.config import EngineConfig
from ....stages.engine.engine import Engine
from ....stages.errors import ConfigError
from ....stages.machines.connected_hosts import EnginePeer, TcpPeer
from ....stages.machines.route_engine import RouteEngine, front_config, look_at_all
from ...config import ServerConfig
from ..serve import run_with
from .addresses import parse_address, prefix_key, read_key


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 0 after a stop by signal, even if requests were cut short."""
    key = read_key(options.fleet_key_file)
    peers = [TcpPeer(*parse_address("--engine", text), key) for text in options.engine]
    if server_config.mode != "auto":
        raise ConfigError(f"mode = {server_config.mode}: the engines of a front are processes elsewhere; leave it out")
    make_engine = partial(RoutedEngine, peers=peers, prefix_key=prefix_key(key))
    return run_with(options, engine_config, server_config, make_engine)


class RoutedEngine:
    """A `RouteEngine`, once all engines were reached: what they are decides its settings."""

    def __init__(self, config: EngineConfig, peers: Sequence[EnginePeer], prefix_key: bytes | None) -> None:
        self._config, self._peers, self._prefix_key = config, peers, prefix_key
        self._engine: RouteEngine | None = None

    async def __aenter__(self) -> Engine:
        ready = await look_at_all(self._peers)
        engine = RouteEngine(front_config(self._config, ready), self._peers, self._prefix_key)
        await engine.__aenter__()
        self._engine = engine
        return engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._engine is not None
        await self._engine.__aexit__(kind, error, trace)
