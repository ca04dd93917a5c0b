"""Where the engine processes of a fleet run, and with which share: `HereHosts` on this machine.

A process has a place, which is its index. Places may be free, and processes may come and go while the fleet runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ...runtime.env.cpus import Cpus
from ..config import EngineConfig
from ..engine.core import EngineSetup, refuse_ray
from ..errors import ConfigError
from ..executor.engine_host import StartHost
from ..outputs import ModelInfo
from ..split.engine_core import EngineCore
from ..split.protocol import EngineReady
from ..traffic.traffic_rules import TrafficRules
from .placement import Place, check, environment_here, places

MAX_ENGINES = 64
MAX_TOLD = 4  # reasons why there is no engine
NOT_REACHED = "the engines are not reached"  # to clients, who need no addresses
GIVEN_UP = "the engines were given up"
SAME = ("model_id", "device", "dtype", "vocab_size", "attention_backend", "block_size")  # of all processes' models


class Fleet(Protocol):
    """What is told of processes that come and go."""

    def join(self, index: int) -> None:
        """There is one at this place from now on."""

    async def leave(self, index: int) -> None:
        """There is to be none at this place. Returns once it has no requests of this front, and its link is closed."""


class Hosts(Protocol):
    """What starts the processes of a fleet, and what each gets."""

    @property
    def setting(self) -> str:
        """As `Processes.setting`."""

    @property
    def inline(self) -> str:
        """As `Processes.inline`."""

    def places(self) -> Sequence[Place]:
        """The share of the process at each place."""

    @property
    def drain_themselves(self) -> bool:
        """Whether a process ends by itself when it is to drain; else this one ends it, and starts another."""

    @property
    def outlive_links(self) -> bool:
        """Whether a process goes on without its link, and is reached again: else the end of the link ends it."""

    def present(self) -> Sequence[int]:
        """The places that are not free. Called before `follow`."""

    def name_of(self, index: int) -> str | None:
        """The address of the process at a place; None: it has none."""

    async def first(
        self, starting: Mapping[int, asyncio.Future[EngineReady]], rules: TrafficRules
    ) -> dict[int, EngineReady]:
        """Waits for the first processes, at least one, by place. Raises what prevents the start of the fleet.

        Processes of different groups of `rules` may have other weights.
        """

    def check_first(self, ready: Sequence[EngineReady]) -> None:
        """Raises `ConfigError` if the first processes differ in what they must share."""

    def check(self, core: EngineCore, cores: Sequence[EngineCore], info: ModelInfo, rules: TrafficRules) -> None:
        """Raises `ConfigError` for a process, which is ready, that does not fit the others; `info` is of all."""

    def note_rules(self, cores: Sequence[EngineCore], rules: TrafficRules) -> None:
        """These are the groups of processes from now on."""

    def follow(self, fleet: Fleet) -> None:
        """The fleet runs: tells it from now on which processes come and go."""

    def start_host(self, index: int) -> StartHost | None:
        """Starts a process in another way; None: as a child of this one."""

    def config_of(self, core: EngineCore, cores: Sequence[EngineCore]) -> EngineConfig:
        """The settings of a process that starts now; `cores` are all."""

    def config_of_text(self) -> EngineConfig:
        """As `Processes.config_of_text`."""

    async def open(self) -> None:
        """Called before the first process starts."""

    async def look(self, index: int, on_failure: Callable[[str], object]) -> None:
        """Called before a successor of a process starts; may wait until it can. `on_failure` gets why it cannot yet."""

    async def close(self) -> None:
        """Called after the last process has ended. Idempotent."""

    @property
    def prefix_key(self) -> bytes | None:
        """What the processes name their blocks by, if they have it already; None: they get one."""


MakeHosts = Callable[[EngineSetup], Hosts]


def list_of_reasons(reasons: Sequence[str]) -> str:
    """Why none of several engines is there: each reason once, the first of many."""
    told = list(dict.fromkeys(reasons))
    more = [f"and {len(told) - MAX_TOLD} more"] if len(told) > MAX_TOLD else []
    return "; ".join([*told[:MAX_TOLD], *more])


class FixedHosts:
    """The part of `Hosts` where all processes are started by this one, and stay."""

    drain_themselves = outlive_links = False

    def places(self) -> Sequence[Place]:
        raise NotImplementedError

    def present(self) -> Sequence[int]:
        return range(len(self.places()))

    def name_of(self, index: int) -> str | None:
        return None

    async def first(
        self, starting: Mapping[int, asyncio.Future[EngineReady]], rules: TrafficRules
    ) -> dict[int, EngineReady]:
        return dict(zip(starting, await asyncio.gather(*starting.values()), strict=True))

    def check_first(self, ready: Sequence[EngineReady]) -> None:
        for index, one in enumerate(ready[1:], 1):
            for name in SAME:
                if (found := getattr(one.info, name)) != (due := getattr(ready[0].info, name)):
                    message = f"data_parallel_size = {len(ready)}: engine process {index} has {name} = {found}, and"
                    raise ConfigError(f"{message} the first one {due}; lower it, or set {name} where that is a setting")
            if one.files != ready[0].files:
                raise ConfigError("the model's files changed while the engine processes loaded them; start again")

    def check(self, core: EngineCore, cores: Sequence[EngineCore], info: ModelInfo, rules: TrafficRules) -> None:
        """Of the files of its predecessor it knows already."""
        if core.ready is None or any(getattr(core.ready.info, name) != getattr(info, name) for name in SAME):
            raise ConfigError("the engine process runs the model otherwise than the others")

    def note_rules(self, cores: Sequence[EngineCore], rules: TrafficRules) -> None:
        """Does nothing: all have the same model."""

    def follow(self, fleet: Fleet) -> None:
        """Does nothing."""


class HereHosts(FixedHosts):
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

    async def look(self, index: int, on_failure: Callable[[str], object]) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""
