"""`LocalCore`: the step loop in this process, or an encoder model, which has none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ...runtime.fault_injection import Fault
from ...runtime.health.stalls import Stall
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.startup.phases import Phases
from ...runtime.workers.thread_start import ThreadNotStarted
from ..allocate.prefix_tree import read_prefix_tree
from ..errors import ConfigError
from ..pipeline import build_encoder_pipeline, build_pipeline
from ..recordings.writer import RecordingWriter
from ..sample.processor_chain import ProcessorChain
from .core import EngineSetup, WarmUp, check_num_engines, refuse_ray
from .engine_status import EngineStatus
from .front_status import read_front
from .placed_stages import PlacedStage
from .read_status import read_core, read_owners
from .warm_up import warm_up
from .wiring import CoreStages, EncoderStages, EngineStages, JoinedStages, sketch

LoadModel = Callable[[EngineSetup], Awaitable[tuple[Any, Phases]]]


async def load_model(setup: EngineSetup) -> tuple[Any, Phases]:
    """Loads the model in a thread; returns it with the time of each phase."""
    loaded = await setup.env.run_in_thread(_load, setup)
    setup.opening = None  # it holds the model, too
    return loaded


class LocalCore:
    """See `Core`. `load` loads the model, and `warm_up` runs the first requests; None: there are none.

    `stages` are those of a model that generates, for inspection; None before the start, and of an encoder model.
    """

    mode: Literal["inline", "split"] = "inline"
    stages_elsewhere: Sequence[str] = ()
    away: Health | None = None
    keeps_requests = False
    engine_pid: int | None = None
    num_deaths = 0

    def __init__(self, setup: EngineSetup, *, load: LoadModel = load_model, warm_up: WarmUp | None = warm_up) -> None:
        check_num_engines(setup.config, 1)
        refuse_ray(setup.config)
        self.stages: EngineStages | None = None
        self._setup = setup
        self._load, self._warm_up = load, warm_up
        self._joined: JoinedStages | None = None
        self._recorder: RecordingWriter | None = None
        self._close: Callable[[], object] | None = None  # of the model; blocks
        self._is_on_gpu = False

    def sketches(self) -> list[Pipeline]:
        return [sketch(build_encoder_pipeline), sketch(build_pipeline)]

    def reachable(self, placed: PlacedStage) -> PlacedStage:
        return placed

    def check_replaced(self, name: str) -> None:
        """Does nothing: all stages are here."""

    # -- start and stop

    async def load(self) -> tuple[Any, Phases]:
        return await self._load(self._setup)

    def join(self, loaded: Any) -> JoinedStages:
        self._is_on_gpu = loaded.info.device != "cpu"
        self._close = getattr(loaded, "close", None)
        config, processors = self._setup.config, self._setup.processors
        if not loaded.info.num_blocks:
            if processors:
                raise ConfigError("logits_processor: an encoder model chooses no tokens; leave it out")
            self._joined = EncoderStages(config, loaded)
            return self._joined
        if processors:
            loaded.sampler.use(ProcessorChain(processors))
        secret = self._setup.env.secret("prefix.secret", 16)
        self._joined = self.stages = EngineStages(config, loaded, loaded.make_device(), secret)
        return self.stages

    def start_recording(self) -> None:
        config = self._setup.config
        if config.record is None:
            return
        if self.stages is None:
            message = f"record = {config.record}: an encoder model has no scheduler to record; leave it out"
            raise ConfigError(message)
        self._recorder = self.stages.core.record(Path(config.record), config, self._setup.env)

    async def warm_up(self) -> None:
        if self._warm_up is not None:
            joined = self._require_joined()
            await self._warm_up(joined.pipeline, joined.loaded.info)
            self.reset_prefix_cache()

    async def inject(self, faults: Sequence[Fault]) -> None:
        """Does nothing: all stages are here."""

    async def begin_stop(self) -> None:
        """Does nothing: no process is replaced."""

    async def stop(self) -> None:
        self._joined = self.stages = None
        if self._recorder is not None:
            await self._recorder.aclose()
        opening, self._setup.opening = self._setup.opening, None
        if opening is not None:
            try:
                await self._setup.env.run_in_thread(opening.close)
            except ThreadNotStarted:
                opening.close()
        close, self._close = self._close, None
        if close is not None:
            await self._setup.env.run_in_thread(close)

    def free_memory(self) -> None:
        if self._is_on_gpu:
            import torch

            torch.cuda.empty_cache()

    # -- while it runs

    @property
    def engines(self) -> list[dict[str, Any]]:
        return []

    @property
    def choices(self) -> list[dict[str, Any]]:
        return []

    @property
    def served_names(self) -> Sequence[str]:
        return ()

    def warm_prefixes(self) -> list[dict[str, Any]]:
        return []

    @property
    def traffic(self) -> None:
        return None

    def drain_engine(self, index: int, by: str) -> None:
        raise LookupError("the engine runs in this process, and there is no other one for its requests")

    def is_stopped_by(self, stall: Stall) -> bool:
        return True

    def status(self, *, with_sequences: bool, with_blocks: bool) -> EngineStatus:
        joined = self._require_joined()
        pipeline, front = joined.pipeline.status(), read_front(joined)
        if (core := self._step_loop()) is None:
            return EngineStatus(pipeline, front, None, {})
        owners = read_owners(core.schedule.scheduler) if with_sequences or with_blocks else {}
        read = read_core(core, with_sequences=with_sequences, with_blocks=with_blocks)
        return EngineStatus(pipeline, front, read, owners)

    async def refresh(self, *, with_blocks: bool, with_stacks: bool) -> None:
        """Brings the trace up to now: all else is in this process."""
        if (watch := self._require_joined().pipeline.watch) is not None:
            watch.write_stage_times()

    async def prefix_tree(self) -> dict[str, Any] | None:
        core = self._step_loop()
        return None if core is None else read_prefix_tree(core.allocate.allocator)

    async def forget_prefixes(self) -> int:
        return self.reset_prefix_cache()

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache. Returns the number of blocks freed."""
        core = self._step_loop()
        return 0 if core is None else core.allocate.reset_prefix_cache()

    def _step_loop(self) -> CoreStages | None:
        self._require_joined()
        return None if self.stages is None else self.stages.core

    def _require_joined(self) -> JoinedStages:
        if self._joined is None:
            raise NotServing(self._setup.health())
        return self._joined


def _load(setup: EngineSetup) -> tuple[Any, Phases]:
    """Loads the model. Runs in a thread: its imports alone would block the event loop too long."""
    opening = setup.opening
    if opening is None:
        from ..loading.early import EarlyLoading

        opening = EarlyLoading(setup.config, Phases(setup.env.now, progress=setup.load_progress))
    try:
        with opening.phases("import"):
            from ..loading.model import load_model
        return load_model(setup.config, opening.phases, setup.env, opening), opening.phases
    finally:
        opening.close()
