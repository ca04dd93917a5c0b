"""The core of an engine: what differs between step loops in this process, in another one, or in several.

`Engine` has the rest: the API, the stages of the caller's own, the life cycle.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...runtime.env.env import Env
from ...runtime.fault_injection import Fault
from ...runtime.health.stalls import Stall
from ...runtime.pipeline import Health, Pipeline
from ...runtime.startup.load_progress import LoadProgress
from ...runtime.startup.phases import Phases
from ..config import EngineConfig
from ..errors import ConfigError
from ..outputs import ModelInfo
from ..sample.logits_processor import LogitsProcessor
from ..traffic.traffic_rules import Traffic
from .engine_status import EngineStatus
from .placed_stages import PlacedStage
from .wiring import JoinedStages

if TYPE_CHECKING:
    from ..loading.early import EarlyLoading

WarmUp = Callable[[Pipeline, ModelInfo], Awaitable[object]]


@dataclass(slots=True)
class EngineSetup:
    """What an engine was asked for. Owned by the engine, which changes `config` until it starts; its core reads it."""

    config: EngineConfig
    env: Env
    load_progress: LoadProgress
    health: Callable[[], Health]  # of the engine, for errors
    processors: Sequence[LogitsProcessor] = ()  # all, those that the settings name included
    made_processors: Sequence[LogitsProcessor] = ()  # those that the caller made
    opening: EarlyLoading | None = None  # of the model, if it has begun already


class Core(Protocol):
    """The step loop of one engine, wherever it runs. Called on the engine's event loop, in the order of this class."""

    @property
    def mode(self) -> Literal["inline", "split"]:
        """Whether the step loop is in this process or in others."""

    @property
    def stages_elsewhere(self) -> Sequence[str]:
        """The stages that are in other processes."""

    # -- before the start

    def sketches(self) -> list[Pipeline]:
        """Pipelines like the one that starts here, of ports only; the last one is that of most models."""

    def reachable(self, placed: PlacedStage) -> PlacedStage:
        """A stage of the caller's own, at the nearest place in this process.

        Raises `ConfigError` for a place in the step loop, if that is elsewhere.
        """

    def check_replaced(self, name: str) -> None:
        """Raises `ConfigError` if the stage of this name cannot be replaced, as it is elsewhere."""

    # -- start

    async def load(self) -> tuple[Any, Phases]:
        """Loads the model, with the time of each phase. What it returns has an `info`, and goes to `join`."""

    def join(self, loaded: Any) -> JoinedStages:
        """Joins the stages of this process."""

    def start_recording(self) -> None:
        """Records the step loop, if the settings say so and it is here. Called before the pipeline starts."""

    async def warm_up(self) -> None:
        """Runs the first requests, once the pipeline has started. Afterwards there is a status."""

    async def inject(self, faults: Sequence[Fault]) -> None:
        """Injects those faults that are for stages elsewhere."""

    # -- while it runs

    @property
    def away(self) -> Health | None:
        """Why the step loop takes no requests; None if it does, or if the pipeline says so by itself."""

    @property
    def keeps_requests(self) -> bool:
        """Whether requests are taken while it is away: they wait in the stages of this process."""

    @property
    def engine_pid(self) -> int | None:
        """As `Engine.engine_pid`."""

    @property
    def num_deaths(self) -> int:
        """As `Engine.num_deaths`."""

    @property
    def engines(self) -> list[dict[str, Any]]:
        """As `Engine.engines`."""

    @property
    def choices(self) -> list[dict[str, Any]]:
        """As `Engine.choices`."""

    @property
    def served_names(self) -> Sequence[str]:
        """As `Engine.served_names`."""

    def warm_prefixes(self) -> list[dict[str, Any]]:
        """As `Engine.warm_prefixes`."""

    @property
    def traffic(self) -> Traffic | None:
        """As `Engine.traffic`."""

    def drain_engine(self, index: int, by: str) -> None:
        """As `Engine.drain_engine`."""

    def is_stopped_by(self, stall: Stall) -> bool:
        """As `Engine.is_stopped_by`."""

    def status(self, *, with_sequences: bool, with_blocks: bool) -> EngineStatus:
        """As `Engine.status`."""

    async def refresh(self, *, with_blocks: bool, with_stacks: bool) -> None:
        """As `Engine.refresh`."""

    async def prefix_tree(self) -> dict[str, Any] | None:
        """As `Engine.prefix_tree`."""

    async def forget_prefixes(self) -> int:
        """As `Engine.forget_prefixes`."""

    # -- stop

    async def begin_stop(self) -> None:
        """Called before the pipeline stops: from now on nothing that ends is replaced. Idempotent, as `stop`."""

    async def stop(self) -> None:
        """Frees everything, once the pipeline has stopped. Also called if the start failed."""

    def free_memory(self) -> None:
        """Gives memory of the device back. Called last, when the environment is closed, too."""


MakeCore = Callable[[EngineSetup], Core]


def check_num_engines(config: EngineConfig, most: int) -> None:
    """Raises `ConfigError` for more engine processes than `most`."""
    if (count := config.data_parallel_size) > most:
        many = "use FleetEngine or LLM for more" if most == 1 else "start more servers"
        raise ConfigError(f"data_parallel_size = {count}: must be at most {most} here; {many}")


def refuse_ray(config: EngineConfig) -> None:
    """Raises `ConfigError` for an engine on a Ray cluster, of a core that is not."""
    if config.executor == "ray":
        raise ConfigError("executor = ray: use LLM, or millrace.deploy.ray.ray_engine.RayEngine")
