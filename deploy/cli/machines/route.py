"""`millrace route`: the HTTP server of `millrace serve`, in front of engines that run elsewhere."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from ....runtime.env.log import get_logger
from ....runtime.pipeline import Health
from ....stages.config import EngineConfig
from ....stages.engine.engine import Engine
from ....stages.errors import ConfigError
from ....stages.machines.connected_hosts import look_at_first
from ....stages.machines.engine_peers import FIRST_PAUSE_S, LONGEST_PAUSE_S, TcpPeer
from ....stages.machines.engine_sources import certified_name
from ....stages.machines.membership import Members
from ....stages.machines.route_engine import RouteEngine, front_config
from ....stages.split.process_client import EngineDied
from ....stages.split.protocol import EngineReady
from ....stages.traffic.traffic_rules import TrafficRules
from ...config import ServerConfig
from ..serve import run_with
from .addresses import engines_by_model, parse_source, prefix_key, read_key, read_tls, tls_files

log = get_logger("millrace.deploy")


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 0 after a stop by signal, even if requests were cut short."""
    key = read_key(options.fleet_key_file)
    tls = read_tls(tls_files(options.fleet_tls_cert, options.fleet_tls_key, options.fleet_tls_ca), "dialer")
    models = engines_by_model(options.engine)
    named = next(iter(models), "")
    sources = [parse_source(text) for text in models.get(named, options.engine)]
    if named:
        server_config = replace(server_config, served_model_name=server_config.served_model_name or (named,))
    if server_config.mode != "auto":
        raise ConfigError(f"mode = {server_config.mode}: the engines of a front are processes elsewhere; leave it out")
    traffic = TrafficRules.parse(options.split, options.shadow)
    members = Members(sources, lambda address: TcpPeer(address, key, tls, partial(certified_name, sources, address)))
    timeout_s, prefix = server_config.link_timeout_s, prefix_key(key)
    fleet: dict[str, Any] = {"members": members, "prefix_key": prefix, "link_timeout_s": timeout_s, "traffic": traffic}
    fleet["model"] = named
    make_engine = partial(RoutedEngine, **fleet)
    return run_with(options, engine_config, server_config, make_engine)


class RoutedEngine:
    """A `RouteEngine`, once an engine was reached: what that is decides its settings."""

    def __init__(
        self,
        config: EngineConfig,
        members: Members,
        prefix_key: bytes | None,
        link_timeout_s: float | None,
        traffic: TrafficRules | None = None,
        model: str = "",
    ) -> None:
        """`model`: the name that its engines must serve, if they say names; "": any."""
        self._model = model
        self._config, self._members, self._prefix_key = config, members, prefix_key
        self._link_timeout_s, self._traffic = link_timeout_s, traffic
        self._engine: RouteEngine | None = None

    def why_waiting(self) -> Health | None:
        """Why it has no engine yet; None if that is not known."""
        return self._members.why_waiting

    def follow(self, rules: TrafficRules) -> None:
        """Other rules than those it was made with, from now on."""
        self._traffic = rules
        if self._engine is not None and self._engine.traffic is not None:
            self._engine.traffic.change(rules)

    async def __aenter__(self) -> Engine:
        await self._members.open()
        pause_s, last = FIRST_PAUSE_S, ""
        while True:
            ready = await look_at_first(self._members, self._traffic)
            self._check_names(ready)
            config = front_config(self._config, ready, len(self._members.peers))
            options: dict[str, Any] = {"link_timeout_s": self._link_timeout_s, "traffic": self._traffic}
            engine = RouteEngine(config, self._members, self._prefix_key, **options)
            try:
                await engine.__aenter__()
            except EngineDied as error:  # since it was looked at
                if str(error) != last:
                    log.warning("engine.lost_at_start", reason=str(error))
                    last = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self._engine = engine
            if self._traffic is not None and engine.traffic is not None:
                engine.traffic.change(self._traffic)  # told while it started
            return engine

    def _check_names(self, ready: Sequence[EngineReady]) -> None:
        for one in ready:
            if self._model and one.served_names and self._model not in one.served_names:
                names = ", ".join(one.served_names)
                raise ConfigError(f"--engine {self._model}=...: an engine there serves {names}, and not {self._model}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._engine is not None
        await self._engine.__aexit__(kind, error, trace)
