"""The engine: a model, the seven stages around it, and their Python API.

    async with Engine(model="path/or/hub-id") as engine:
        async for output in engine.generate("Once upon a time"):
            print(output.outputs[0].text, end="")

This module starts and stops the parts; `wiring.py` joins them.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...runtime.env.env import Env, LiveEnv
from ...runtime.env.log import get_logger
from ...runtime.fault_injection import Fault, parse_fault
from ...runtime.graph import GraphError
from ...runtime.health.stalls import Stall
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.stage import Stage
from ...runtime.startup.load_progress import LoadProgress
from ...runtime.startup.phases import Phases
from ...runtime.trace.tracer import Tracer
from ...runtime.workers.thread_start import ThreadNotStarted
from ..adapters.gate import AdapterGate
from ..adapters.registry import parse_modules
from ..beam_search.algorithm import BeamParams
from ..config import EngineConfig
from ..device.device import Device
from ..errors import ConfigError, Refused
from ..exit.outboxes import RequestOutbox
from ..messages import Ints, Request
from ..params import SamplingParams
from ..pipeline import build_encoder_pipeline, build_pipeline
from ..recordings.writer import RecordingWriter
from ..sample.logits_processor import LogitsProcessor
from ..sample.processor_chain import ProcessorChain, check_processors, load_processors
from .client_api import ClientApi
from .inspection import EngineParts
from .load_report import report_loading
from .placed_stages import PlacedStage, check_places, in_order, load_stages
from .submit import Submitter
from .warm_up import warm_up
from .wiring import EncoderStages, EngineStages, TextStages, sketch

if TYPE_CHECKING:
    from ..loading.early import EarlyLoading
    from ..loading.encoder import LoadedEncoder
    from ..loading.model import LoadedModel

log = get_logger("millrace.stages")


class Engine(EngineParts, ClientApi):
    """Serves one model.

    Use it as an async context manager, or call `start` and `stop`; it starts once. Leaving the context frees
    everything: memory, threads, tasks. Requests in progress then end with `abort`. All methods must be called on the
    event loop that started the engine. It keeps no global state and handles no signals, so a process may have several
    engines.

    `config` and `overrides` are those of `EngineConfig`. With the caller's own `env`, threads end when the caller
    closes it. For a `logits_processor`, one or several, see `LogitsProcessor`. `opening` is the model's `EarlyLoading`,
    if it has started already, with the same `config`. `stages` are custom stages with their places, behind those that
    the setting `stage` names: each a `PlacedStage`, or text as in the setting.
    """

    mode: ClassVar[Literal["inline", "split"]] = "inline"  # whether the step loop is in this process or one of its own
    max_engines: ClassVar[int] = 1  # the largest `data_parallel_size`
    is_on_ray: ClassVar[bool] = False  # whether its engine processes are actors of a Ray cluster

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        env: Env | None = None,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor | str] | None = None,
        opening: EarlyLoading | None = None,
        stages: Sequence[PlacedStage | str] = (),
        **overrides: Any,
    ) -> None:
        EngineParts.__init__(self)
        ClientApi.__init__(self)
        self._opening = opening
        made, named = _processors(logits_processor)
        self.config = replace(config or EngineConfig(), **overrides)
        if named:
            self.config = replace(self.config, logits_processor=(*self.config.logits_processor, *named))
        self._made_processors = made  # by the caller
        self.logits_processors = [*load_processors(self.config.logits_processor), *made]
        check_processors(self.logits_processors)
        if (count := self.config.data_parallel_size) > self.max_engines:
            many = "use FleetEngine or LLM for more" if self.max_engines == 1 else "start more servers"
            raise ConfigError(f"data_parallel_size = {count}: must be at most {self.max_engines} here; {many}")
        if self.config.executor == "ray" and not self.is_on_ray:
            raise ConfigError("executor = ray: use LLM, or millrace.deploy.ray.ray_engine.RayEngine")
        if opening is not None and opening.config != self.config:
            raise ConfigError("opening: must have the same settings as the engine")
        if any(one.always for one in self.logits_processors):  # it must see each token before the next one is chosen
            self.config = replace(self.config, speculation="off")
        self._env: Env = LiveEnv(self.config.seed) if env is None else env
        self._owns_env = env is None
        self.load_progress = LoadProgress(self._env.now) if opening is None else opening.phases.progress
        self._edits: list[Callable[[Pipeline], object]] = []
        self._recorder: RecordingWriter | None = None
        self._place(stages)

    # -- custom stages

    def insert(
        self, stage: Stage[Any, Any], after: str | None = None, *, before: str | None = None, name: str | None = None
    ) -> None:
        """Inserts a custom stage after the stage `after`: "intake", "tokenize", ... "detokenize"; or before another.

        Call before `start`. `start` refuses a stage whose ports do not fit there, and says what would. The stage sees
        every request, including the engine's own warm-up requests (request id "warm-up").
        """
        self._edit(lambda pipeline: pipeline.insert(stage, after, before=before, name=name))
        self._step_without_drafts(after or {"sample": "execute", "detokenize": "sample"}.get(before or "", ""))

    def _place(self, stages: Sequence[PlacedStage | str]) -> None:
        """Makes the stages of the settings, and inserts them. Raises `ConfigError` for one that fits nowhere."""
        placed = load_stages(self.config.stage)
        for one in stages:
            placed += load_stages([one]) if isinstance(one, str) else [one]
        self._has_placed = bool(placed)
        if not placed:
            return
        placed = [self._reachable(one) for one in placed]
        check_places(placed, self._sketches())
        for one in in_order(placed):
            self.insert(one.stage, one.after, before=one.before, name=one.title)

    def _reachable(self, placed: PlacedStage) -> PlacedStage:
        """The stage at its place. Raises `ConfigError` for a place where it cannot be."""
        return placed

    def _sketches(self) -> list[Pipeline]:
        """Pipelines like the one that starts, of ports only; the last one is that of most models."""
        return [sketch(build_encoder_pipeline), sketch(build_pipeline)]

    def replace(self, name: str, stage: Stage[Any, Any]) -> None:
        """Replaces the stage `name` by a custom one. Call before `start`."""
        self._edit(lambda pipeline: pipeline.replace(name, stage))
        self._step_without_drafts(name)

    def _step_without_drafts(self, name: str) -> None:
        """Gives a custom stage next to the device steps with logits, and without drafts.

        Drafts stay if they are configured explicitly.
        """
        if name in ("execute", "sample"):
            speculation = "off" if self.config.speculation == "auto" else self.config.speculation
            self.config = replace(self.config, speculation=speculation, async_scheduling=False)

    def _edit(self, edit: Callable[[Pipeline], object]) -> None:
        if self._health.state != "new":
            raise RuntimeError(f"the engine is {self._health.state}: change its stages before it starts")
        self._edits.append(edit)

    # -- start and stop

    async def start(self) -> None:
        """Loads the model and starts the stages; returns when a first answer has been generated.

        Raises `ConfigError` or `ModelError` for what is wrong with the settings or the model.
        """
        if self._health.state != "new":
            raise RuntimeError(f"the engine is {self._health.state}, and an engine starts once: create a new one")
        self._health = Health("loading", reason="the model is loading")
        try:
            self.config.check_files()
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        loaded, phases = await self._load_and_report()
        self._use_processors(loaded)
        with phases("pipeline"):
            self._parts = self._make_parts(loaded)
            self._info = loaded.info
            self._parts.pipeline.use(self._env, Tracer(self._env))
            self._change(self._parts.pipeline)
            if self.config.record is not None:
                self._recorder = self._record(Path(self.config.record))
            faults = self._faults(self._parts.pipeline)
            await self._parts.pipeline.start()
        with phases("warm_up"):
            await self._warm_up()
        if (adapters := self.adapters) is not None:
            with phases("adapters"):
                await self._load_adapters(adapters)
        if self._computes_here:
            self._env.yield_to("device", loaded.own_cpu)
        await self._inject(self._parts.pipeline, faults)
        self._health = Health("ready")
        seconds = {f"{name}_s": seconds for name, seconds in phases.seconds.items()}
        info, core = loaded.info, self.status().core
        log.info(
            "engine.ready",
            model=info.model_id,
            model_impl=info.model_impl,
            attention_backend=info.attention_backend,
            device=info.device,
            dtype=info.dtype,
            quantization=info.quantization,
            kv_cache_dtype=info.kv_cache_dtype,
            weights_bytes=None if info.memory is None else info.memory.row("weights").num_bytes,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            num_host_blocks=info.num_host_blocks,
            num_speculative_tokens=0 if core is None else core.scheduler.drafts.num_tokens,
            **seconds,
        )

    def _use_processors(self, loaded: Any) -> None:
        """Installs the logits processors where tokens are chosen."""
        if not self.logits_processors:
            return
        if not loaded.info.num_blocks:
            raise ConfigError("logits_processor: an encoder model chooses no tokens; leave it out")
        loaded.sampler.use(ProcessorChain(self.logits_processors))

    def _change(self, pipeline: Pipeline) -> None:
        """Makes the caller's changes. Raises `ConfigError` for a stage of the settings that does not fit this model."""
        try:
            for edit in self._edits:
                edit(pipeline)
            if self._has_placed:
                pipeline.check()
        except GraphError as error:
            if self._has_placed:
                raise ConfigError(f"stage: {error}") from None
            raise

    def give_way(self) -> None:
        """Lowers the priority of the calling thread below that of the compute threads.

        Call it on the event loop's thread, once the engine is ready. It also applies to threads that this thread starts
        later, and keeps them off the CPU of the thread that starts each step, if that is in this process. The engine
        does this for its own threads, but never for its caller's.
        """
        if self._computes_here:
            self._env.yield_this_thread()

    @property
    def _computes_here(self) -> bool:
        """Whether threads of this process compute the steps, and so compete for its cores."""
        return self._info is not None and self._info.attention_backend == "native"

    def _faults(self, pipeline: Pipeline) -> list[Fault]:
        """The configured fault injections. Raises `ConfigError` for an unknown stage."""
        faults = [parse_fault(text) for text in self.config.inject]
        names = self._stage_names(pipeline)
        for fault in faults:
            if fault.stage not in names:
                stages = ", ".join(names)
                raise ConfigError(f"inject = {fault.stage}: must name a stage, one of {stages}")
            log.warning("fault.injected", stage=fault.stage, kind=fault.kind, rate=fault.rate, delay_s=fault.delay_s)
        return faults

    def _stage_names(self, pipeline: Pipeline) -> list[str]:
        return list(pipeline.stages)

    async def _load_and_report(self) -> tuple[Any, Phases]:
        if not self._env.is_live:
            return await self._load()
        reporting = asyncio.ensure_future(report_loading(self.load_progress, self._env))
        try:
            return await self._load()
        finally:
            reporting.cancel()
            await asyncio.wait([reporting])

    async def _load(self) -> tuple[Any, Phases]:
        """Loads the model in a thread; returns it with the time of each phase.

        The scripted engine overrides this.
        """
        loaded = await self._env.run_in_thread(_load, self.config, self._env, self._opening, self.load_progress)
        self._opening = None  # it holds the model, too
        return loaded

    def _make_parts(self, loaded: Any) -> TextStages | EncoderStages:
        """Joins the stages of the model that `_load` returned."""
        if not loaded.info.num_blocks:
            return EncoderStages(self.config, loaded)
        secret = self._env.secret("prefix.secret", 16)
        return EngineStages(self.config, loaded, self._make_device(loaded), secret)

    async def _inject(self, pipeline: Pipeline, faults: Sequence[Fault]) -> None:
        pipeline.inject(faults)

    def _record(self, path: Path) -> RecordingWriter | None:
        if not isinstance(self._parts, EngineStages):
            raise ConfigError(f"record = {path}: an encoder model has no scheduler to record; leave it out")
        return self._parts.record(path, self.config, self._env)

    async def _load_adapters(self, adapters: AdapterGate) -> None:
        """Loads the adapters of the settings. Raises `ConfigError` for the first that cannot be."""
        for name, path in parse_modules(self.config.lora_modules).items():
            try:
                await adapters.load(self._env, name, path)
                if adapters.has_room_to_pin():
                    await adapters.pin(self._env, name, "host")
            except Refused as error:
                raise ConfigError(f"lora_modules: {error.message}") from None

    def _make_device(self, loaded: LoadedModel) -> Device:
        return loaded.make_device()

    async def _warm_up(self) -> None:
        await warm_up(self.pipeline, self.info)
        await self.forget_prefixes()

    async def stop(self, cause: str = "server_shutdown") -> None:
        """Ends all requests and frees everything. Idempotent."""
        self._health = Health("stopped", reason="the engine has been stopped")
        parts, self._parts = self._parts, None
        if parts is not None:
            for request_id in list(parts.exit.live):
                parts.pipeline.cancel(request_id, cause)
            if isinstance(parts, TextStages):
                await parts.searches.wait_until_over()
            await parts.pipeline.stop()
            if isinstance(parts, TextStages):
                await parts.gate.aclose()
                if parts.adapters is not None:
                    await parts.adapters.aclose()
        if self._recorder is not None:
            await self._recorder.aclose()
        if self._opening is not None:
            try:
                await self._env.run_in_thread(self._opening.close)
            except ThreadNotStarted:
                self._opening.close()
            self._opening = None
        close = None if parts is None else getattr(parts.loaded, "close", None)
        if close is not None:
            await self._env.run_in_thread(close)
        if self._owns_env:
            await self._env.aclose()
        if parts is not None:
            is_on_gpu = self._info is not None and self._info.device != "cpu"
            del parts
            _free_memory(is_on_gpu)

    @property
    def engine_pid(self) -> int | None:
        """The id of the engine process; None if the step loop runs in this process."""
        return None

    @property
    def num_deaths(self) -> int:
        """The number of engine processes that died."""
        return 0

    def is_stopped_by(self, stall: Stall) -> bool:
        """Whether no request can go on while this stall lasts; not if another engine process serves."""
        return True

    @property
    def engines(self) -> list[dict[str, Any]]:
        """Of a fleet, each engine process.

        Its index, pid, state, reason if it does not serve, num_deaths, num_requests and work in prompt tokens.
        """
        return []

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Stops admitting requests and waits for the rest; False if some are left.

        Waits for at most `timeout_s`.
        """
        return await self.pipeline.drain(timeout_s)

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    # -- requests

    async def submit(self, request: Request, *, wait: bool = False, deadline_s: float | None = None) -> RequestOutbox:
        """Submits a request, and returns the outbox from which to read its answers.

        The caller reads the outbox to its end, or calls `abort`. When the entry channel is full, raises `Overloaded`
        with `wait` False, and waits with `wait` True. Raises `NotServing` when the engine is not ready. A grammar is
        tried and compiled first; `Refused` says what is wrong with it.
        """
        return await self._submitter().submit(request, wait, deadline_s)

    def submit_search(self, request: Request, beams: BeamParams, *, deadline_s: float | None = None) -> RequestOutbox:
        """As `submit`, for the `params.n` best answers of a beam search to each prompt.

        They arrive together, best first. Raises `Refused` for parameters that a beam search does not support.
        """
        return self._submitter().submit_search(request, beams, deadline_s)

    async def render(self, request: Request) -> tuple[list[Ints], SamplingParams]:
        """A request's prompts as token ids, and its params with the values that depend on them.

        Computes no step. Raises `Refused` where the intake and tokenize stages would.
        """
        return await Submitter(self._require_parts(), self._env).render(request)

    def _submitter(self) -> Submitter:
        if not self.health.is_ready:
            raise NotServing(self.health)
        return Submitter(self._require_parts(), self._env)

    @property
    def adapters(self) -> AdapterGate | None:
        """The LoRA adapters; None if none are served."""
        return self._parts.adapters if isinstance(self._parts, TextStages) else None

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter from a folder under a name, or another one under a name in use.

        Requests in progress end on the adapter that they have. Raises `Refused` for an adapter that cannot be served.
        """
        adapters = Submitter(self._require_parts(), self._env).adapters()
        await adapters.load(self._env, name, Path(path))

    def unload_adapter(self, name: str) -> bool:
        """Removes an adapter's name at once; False if it is not known. Requests in progress end as they would."""
        return Submitter(self._require_parts(), self._env).adapters().unload(name)

    async def pin_adapter(self, name: str, *, on_device: bool = True) -> None:
        """Loads an adapter and keeps it in host memory, and by default in the device slot that it gets.

        Raises `Refused` for an adapter that cannot be served, and if too many are pinned.
        """
        adapters = Submitter(self._require_parts(), self._env).adapters()
        await adapters.pin(self._env, name, "device" if on_device else "host")

    def unpin_adapter(self, name: str) -> None:
        """Lets an adapter be replaced again. Raises `Refused` for an unknown name."""
        Submitter(self._require_parts(), self._env).adapters().unpin(name)

    async def remove_adapter(self, name: str, timeout_s: float = 0.0, *, force: bool = False) -> int | None:
        """As `unload_adapter`, and waits up to `timeout_s` for the requests that have it.

        With `force` those that are left are ended then. Returns their number; None if the name is not known.
        """
        adapters = Submitter(self._require_parts(), self._env).adapters()
        if not adapters.unload(name):
            return None
        left = await adapters.wait_unused(self._env, name, timeout_s)
        for request_id in left if force else ():
            adapters.abort(request_id)
            self.abort(request_id)
        return len(left)

    def abort(self, request_id: str, cause: str = "cancel") -> bool:
        """Ends a request early; its blocks become free within a few steps.

        Returns False if it is not in progress.
        """
        return self._parts is not None and self._parts.pipeline.cancel(request_id, cause)

    # -- text

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt.

        Blocks the event loop; for long prompts use `encoder` in a thread.
        """
        return self.encoder.encode_text(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens)


def _load(
    config: EngineConfig, env: Env, opening: EarlyLoading | None, progress: LoadProgress
) -> tuple[LoadedModel | LoadedEncoder, Phases]:
    """Loads the model. Runs in a thread: its imports alone would block the event loop too long."""
    if opening is None:
        from ..loading.early import EarlyLoading

        opening = EarlyLoading(config, Phases(env.now, progress=progress))
    try:
        with opening.phases("import"):
            from ..loading.model import load_model
        return load_model(config, opening.phases, env, opening), opening.phases
    finally:
        opening.close()


def _processors(
    given: LogitsProcessor | Sequence[LogitsProcessor | str] | None,
) -> tuple[list[LogitsProcessor], list[str]]:
    """The processors that a caller made, and those that it names."""
    listed: list[Any] = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [one for one in listed if not isinstance(one, str)], [one for one in listed if isinstance(one, str)]


def _free_memory(is_on_gpu: bool) -> None:
    """Frees the model's memory now, instead of at some later collection of reference cycles."""
    gc.collect()
    if is_on_gpu:
        import torch

        torch.cuda.empty_cache()
