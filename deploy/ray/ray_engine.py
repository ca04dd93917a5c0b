"""`RayEngine`: a fleet whose engine processes are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...stages.config import EngineConfig
from ...stages.engine.core import EngineSetup
from ...stages.engine.engine import Engine
from ...stages.executor.engine_host import StartHost
from ...stages.fleet.fleet_processes import FleetProcesses
from ...stages.fleet.hosts import FixedHosts
from ...stages.fleet.placement import Place, check
from ...stages.split.engine_core import EngineCore
from ...stages.split.remote_core import RemoteCore
from .placement import check_for_ray, parse_resources
from .ray_executor import RayExecutor


class RayHosts(FixedHosts):
    """The nodes of a Ray cluster: see `Hosts`."""

    setting = "executor = ray"
    inline = "executor = auto, data_parallel_size = 1 and mode = inline"
    prefix_key: bytes | None = None

    def __init__(self, setup: EngineSetup) -> None:
        check_for_ray(setup.config)
        parse_resources(setup.config.ray_resources)
        check(setup.config)
        self._setup = setup
        self.executor = RayExecutor(setup.config, setup.env)

    def places(self) -> Sequence[Place]:
        """Without shares: Ray gives each process its own."""
        config = self._setup.config
        return [Place(config)] * config.data_parallel_size

    def start_host(self, index: int) -> StartHost | None:
        return partial(self.executor.start_host, index)

    def config_of(self, core: EngineCore, cores: Sequence[EngineCore]) -> EngineConfig:
        starting = [one.index for one in cores if not one.is_serving]
        config, own = self.executor.config_for(core.index, starting), self._setup.config
        # without `ray_env`, which may hold secrets; with what the stages of the caller's own need
        return replace(config, ray_env=(), speculation=own.speculation, async_scheduling=own.async_scheduling)

    def config_of_text(self) -> EngineConfig:
        """For one engine: those on other nodes take none of this one's memory."""
        return replace(self._setup.config, data_parallel_size=1)

    async def open(self) -> None:
        await self.executor.start()

    async def look(self, index: int, on_failure: Callable[[str], object]) -> None:
        await self.executor.look()

    async def close(self) -> None:
        await self.executor.aclose()


class RayEngine(Engine):
    """An `Engine` with `data_parallel_size` engine processes, also a single one, on the nodes of a Ray cluster.

    This process is on a node too, and has the text: it tokenizes, and all requests end here. The model must be found by
    the same name on each node. `options` are those of `Engine`.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        processes = partial(FleetProcesses, make_hosts=RayHosts)
        super().__init__(config, core=partial(RemoteCore, make_processes=processes), **options)
