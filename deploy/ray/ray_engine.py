"""`RayEngine`: a fleet whose engine processes are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...runtime.startup.phases import Phases
from ...stages.config import EngineConfig
from ...stages.executor.engine_host import StartHost
from ...stages.fleet.fleet_engine import FleetEngine
from ...stages.fleet.placement import Place
from ...stages.split.engine_core import EngineCore
from ...stages.split.inflight_requests import InflightRequests
from ...stages.split.process_client import EngineClient
from .placement import check_for_ray, parse_resources
from .ray_executor import RayExecutor


class RayEngine(FleetEngine):
    """An `Engine` with `data_parallel_size` engine processes, also a single one, on the nodes of a Ray cluster.

    This process is on a node too, and has the text: it tokenizes, and all requests end here. The model must be found by
    the same name on each node.
    """

    is_on_ray = True

    @property
    def _setting(self) -> str:
        return "executor = ray"

    @property
    def _inline(self) -> str:
        return "executor = auto, data_parallel_size = 1 and mode = inline"

    def _make_cores(self) -> tuple[InflightRequests, Sequence[EngineCore]]:
        check_for_ray(self.config)
        parse_resources(self.config.ray_resources)
        self.executor = RayExecutor(self.config, self._env)
        return super()._make_cores()

    def _make_places(self) -> list[Place]:
        """Without shares: Ray gives each process its own."""
        return [Place(self.config)] * self.config.data_parallel_size

    @property
    def _config_of_text(self) -> EngineConfig:
        """For one engine: those on other nodes take none of this one's memory."""
        return replace(self.config, data_parallel_size=1)

    def _start_host_of(self, index: int) -> StartHost | None:
        return partial(self.executor.start_host, index)

    def _config_of(self, core: EngineCore) -> EngineConfig:
        starting = [one.index for one in self.cores if not one.is_serving]
        return replace(self.executor.config_for(core.index, starting), ray_env=())  # which may hold secrets

    async def _load(self) -> tuple[Any, Phases]:
        await self.executor.start()
        return await super()._load()

    async def _start_again(self, core: EngineCore) -> EngineClient:
        await self.executor.look()
        return await super()._start_again(core)

    async def stop(self, cause: str = "server_shutdown") -> None:
        """As `Engine.stop`; also frees what was reserved on the cluster."""
        try:
            await super().stop(cause)
        finally:
            await self.executor.aclose()
