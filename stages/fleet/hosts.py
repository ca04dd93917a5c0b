"""Where the engine processes of a fleet run, and with which share: `HereHosts` on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ...runtime.env.cpus import Cpus
from ..config import EngineConfig
from ..engine.core import EngineSetup, refuse_ray
from ..executor.engine_host import StartHost
from ..split.engine_core import EngineCore
from .placement import Place, check, environment_here, places


class Hosts(Protocol):
    """What starts the processes of a fleet, and what each gets."""

    @property
    def setting(self) -> str:
        """As `Processes.setting`."""

    @property
    def inline(self) -> str:
        """As `Processes.inline`."""

    def places(self) -> Sequence[Place]:
        """The share of each process."""

    def start_host(self, index: int) -> StartHost | None:
        """Starts a process in another way; None: as a child of this one."""

    def config_of(self, core: EngineCore, cores: Sequence[EngineCore]) -> EngineConfig:
        """The settings of a process that starts now; `cores` are all."""

    def config_of_text(self) -> EngineConfig:
        """As `Processes.config_of_text`."""

    async def open(self) -> None:
        """Called before the first process starts."""

    async def look(self, index: int) -> None:
        """Called before a successor of a process starts; may wait until it can."""

    async def close(self) -> None:
        """Called after the last process has ended. Idempotent."""

    @property
    def prefix_key(self) -> bytes | None:
        """What the processes name their blocks by, if they have it already; None: they get one."""


MakeHosts = Callable[[EngineSetup], Hosts]


class HereHosts:
    """See `Hosts`."""

    prefix_key: bytes | None = None

    def __init__(self, setup: EngineSetup) -> None:
        check(setup.config)
        refuse_ray(setup.config)
        self._setup = setup
        self._places = places(setup.config, Cpus.of_this_process(), environment_here())

    @property
    def setting(self) -> str:
        count = self._setup.config.data_parallel_size
        return "mode = split" if count == 1 else f"data_parallel_size = {count}"

    @property
    def inline(self) -> str:
        is_one = self._setup.config.data_parallel_size == 1
        return "mode = inline" if is_one else "data_parallel_size = 1 and mode = inline"

    def places(self) -> Sequence[Place]:
        return self._places

    def start_host(self, index: int) -> StartHost | None:
        return None

    def config_of(self, core: EngineCore, cores: Sequence[EngineCore]) -> EngineConfig:
        config = replace(self._setup.config, threads=self._places[core.index].config.threads)
        if core.keeper is None:
            return config
        # the others hold their memory already: what is free is for those that are being started
        aways = [one.keeper.away for one in cores if one.keeper is not None and not one.is_serving]
        num_starting = sum(away is None or away.state != "dead" for away in aways)
        return replace(config, data_parallel_size=max(1, num_starting))

    def config_of_text(self) -> EngineConfig:
        return self._setup.config

    async def open(self) -> None:
        """Does nothing."""

    async def look(self, index: int) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""
