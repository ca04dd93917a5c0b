"""The engine: a model, the seven stages around it, and the Python interface to both.

    async with Engine(model="path/or/hub-id") as engine:
        async for output in engine.generate("Once upon a time"):
            print(output.outputs[0].text, end="")

Knows how the parts are put together, started and taken apart. What they do is theirs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...runtime.env.env import Env, LiveEnv
from ...runtime.env.log import get_logger
from ...runtime.fault_injection import Fault, parse_fault
from ...runtime.phases import Phases
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.stage import Stage
from ...runtime.trace.tracer import Tracer
from ..beam_search.algorithm import BeamParams
from ..config import EngineConfig
from ..device.device import Device
from ..errors import ConfigError
from ..exit.outboxes import RequestOutbox
from ..messages import Ints, Request
from ..params import SamplingParams
from ..recordings.writer import Recorder
from ..sample.logits_processor import LogitsProcessor
from .client_api import Asking
from .inspection import EngineBooks
from .submit import Door
from .warm_up import warm_up
from .wiring import EncoderParts, EngineParts, TextParts

if TYPE_CHECKING:
    from ..loading.early import Opening
    from ..loading.encoder import LoadedEncoder
    from ..loading.model import LoadedModel

log = get_logger("millrace.stages")


class Engine(EngineBooks, Asking):
    """Serves one model. Use it as an async context manager, or `start` and `stop` it; it starts once.

    Leaving frees everything: memory, threads, tasks. Requests under way then end with `abort`. It lives on the loop it
    was started on, keeps no global state and handles no signals, so there may be several in a process. `config` and
    `overrides` are those of `EngineConfig`. With an `env` of the caller's, threads end when the caller closes it.
    A `logits_processor` is yours to write, see `LogitsProcessor`. `opening`: the model's, if it has begun already; of
    the same `config`.
    """

    mode: ClassVar[Literal["inline", "split"]] = "inline"  # whether the step loop is in this process or one of its own

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        env: Env | None = None,
        logits_processor: LogitsProcessor | None = None,
        opening: Opening | None = None,
        **overrides: Any,
    ) -> None:
        EngineBooks.__init__(self)
        Asking.__init__(self)
        self._logits_processor = logits_processor
        self._opening = opening
        self.config = replace(config or EngineConfig(), **overrides)
        if opening is not None and opening.config != self.config:
            raise ConfigError("opening: it has begun with other settings than the engine's; give both the same")
        if logits_processor is not None:  # it is to see each token before the next one is chosen
            self.config = replace(self.config, speculation="off")
        self._env: Env = LiveEnv(self.config.seed) if env is None else env
        self._owns_env = env is None
        self._edits: list[Callable[[Pipeline], object]] = []
        self._recorder: Recorder | None = None

    # -- stages of your own

    def insert(self, stage: Stage[Any, Any], after: str, *, name: str | None = None) -> None:
        """Puts a stage of yours behind the one called `after`: "intake", "tokenize", ... "detokenize". Before `start`.

        What does not fit there is refused at the start, with the ports and the mend. The stage sees every request, the
        engine's own warm-up (request id "warm-up") included.
        """
        self._edit(lambda pipeline: pipeline.insert(stage, after, name=name))
        self._step_plainly(after)

    def replace(self, name: str, stage: Stage[Any, Any]) -> None:
        """Puts a stage of yours in the place of the one called `name`. Before `start`."""
        self._edit(lambda pipeline: pipeline.replace(name, stage))
        self._step_plainly(name)

    def _step_plainly(self, name: str) -> None:
        """Whoever takes steps from the device sees logits, and need not know of drafts, unless they were asked for by
        name."""
        if name in ("execute", "sample"):
            speculation = "off" if self.config.speculation == "auto" else self.config.speculation
            self.config = replace(self.config, speculation=speculation, async_scheduling=False)

    def _edit(self, edit: Callable[[Pipeline], object]) -> None:
        if self._health.state != "new":
            raise RuntimeError(f"the engine is {self._health.state}: change its stages before it starts")
        self._edits.append(edit)

    # -- life

    async def start(self) -> None:
        """Loads the model and starts the stages; returns when a first answer has been generated.

        Raises `ConfigError` or `ModelError` for what is wrong with the settings or the model.
        """
        if self._health.state != "new":
            raise RuntimeError(f"an engine starts once, and this one is {self._health.state}: make another")
        self._health = Health("loading", reason="the model is loading")
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        loaded, phases = await self._load()
        if self._logits_processor is not None:
            loaded.sampler.use(self._logits_processor)
        with phases("pipeline"):
            self._parts = self._make_parts(loaded)
            self._info = loaded.info
            self._parts.pipeline.use(self._env, Tracer(self._env))
            for edit in self._edits:
                edit(self._parts.pipeline)
            if self.config.record is not None:
                self._recorder = self._record(Path(self.config.record))
            faults = self._faults(self._parts.pipeline)
            await self._parts.pipeline.start()
        with phases("warm_up"):
            await self._warm_up()
        if self._computes_here:
            self._env.yield_to("device", loaded.own_cpu)
        await self._inject(self._parts.pipeline, faults)
        self._health = Health("ready")
        seconds = {f"{name}_s": seconds for name, seconds in phases.seconds.items()}
        info = loaded.info
        log.info(
            "engine.ready",
            model=info.model_id,
            device=info.device,
            dtype=info.dtype,
            quantization=info.quantization,
            kv_cache_dtype=info.kv_cache_dtype,
            weights_bytes=None if info.memory is None else info.memory.row("weights").num_bytes,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            num_host_blocks=info.num_host_blocks,
            num_speculative_tokens=self.scheduler.speculation.num_tokens if self.has_core else 0,
            **seconds,
        )

    def give_way(self) -> None:
        """For whoever owns the event loop's thread, to be called on it once the engine is ready: that thread, and what
        it starts from then on, runs at a lower priority than those that compute, and keeps off the CPU of the one that
        begins each step, if that is in this process. An engine does so with its own threads by itself, and with its
        caller's never."""
        if self._computes_here:
            self._env.give_way()

    @property
    def _computes_here(self) -> bool:
        """Whether steps are computed by threads of ours, which all else takes the cores from."""
        return self._info is not None and self._info.attention_backend == "native"

    def _faults(self, pipeline: Pipeline) -> list[Fault]:
        """Those that the configuration asks for. `ConfigError` if there is no such stage."""
        faults = [parse_fault(text) for text in self.config.inject]
        names = self._stage_names(pipeline)
        for fault in faults:
            if fault.stage not in names:
                stages = ", ".join(names)
                raise ConfigError(f"inject: there is no stage {fault.stage}; there are {stages}")
            log.warning("fault.injected", stage=fault.stage, kind=fault.kind, rate=fault.rate, delay_s=fault.delay_s)
        return faults

    def _stage_names(self, pipeline: Pipeline) -> list[str]:
        return list(pipeline.stages)

    async def _load(self) -> tuple[Any, Phases]:
        """The model, and how long each phase took. In a thread. The test double has neither file nor thread."""
        loaded = await self._env.run_in_thread(_load, self.config, self._env, self._opening)
        self._opening = None  # which has the model, too
        return loaded

    def _make_parts(self, loaded: Any) -> TextParts | EncoderParts:
        """Of what `_load` gave."""
        if not loaded.info.num_blocks:
            return EncoderParts(self.config, loaded)
        secret = self._env.secret("prefix.secret", 16)
        return EngineParts(self.config, loaded, self._make_device(loaded), secret)

    async def _inject(self, pipeline: Pipeline, faults: Sequence[Fault]) -> None:
        pipeline.inject(faults)

    def _record(self, path: Path) -> Recorder | None:
        if not isinstance(self._parts, EngineParts):
            raise ConfigError(f"record = {path}: this model generates nothing, so nothing is scheduled")
        return self._parts.record(path, self.config, self._env)

    def _make_device(self, loaded: LoadedModel) -> Device:
        return loaded.make_device()

    async def _warm_up(self) -> None:
        await warm_up(self.pipeline, self.info)
        await self.forget_prefixes()

    async def stop(self, cause: str = "server_shutdown") -> None:
        """Ends what is under way, and frees everything. May be called again."""
        self._health = Health("stopped", reason="the engine has been stopped")
        parts, self._parts = self._parts, None
        if parts is not None:
            for request_id in list(parts.exit.live):
                parts.pipeline.cancel(request_id, cause)
            if isinstance(parts, TextParts):
                await parts.searches.wait_until_over()
            await parts.pipeline.stop()
            if isinstance(parts, TextParts):
                await parts.gate.aclose()
        if self._recorder is not None:
            await self._recorder.aclose()
        if self._opening is not None:
            await self._env.run_in_thread(self._opening.close)
            self._opening = None
        if self._owns_env:
            await self._env.aclose()
        if parts is not None:
            is_on_gpu = self._info is not None and self._info.device != "cpu"
            del parts
            _free_memory(is_on_gpu)

    @property
    def engine_pid(self) -> int | None:
        """The process of the step loop, if it has one of its own."""
        return None

    @property
    def num_deaths(self) -> int:
        """Engine processes that have ended by themselves."""
        return 0

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Takes nothing new and waits for what is under way; False if some of it is left after `timeout_s`."""
        return await self.pipeline.drain(timeout_s)

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    # -- asking

    async def submit(self, request: Request, *, wait: bool = False, deadline_s: float | None = None) -> RequestOutbox:
        """Sends a request of any number of prompts in, and returns where to read its answers.

        Whoever gets the outbox reads it to its end, or calls `abort`. With `wait` False a burst that is more than the
        door can look at is refused with `Overloaded`, with True it is held back. Raises `NotServing` when not ready.
        A grammar is tried and compiled first; `Refused` says what is wrong with it.
        """
        return await self._open_door().submit(request, wait, deadline_s)

    def submit_search(self, request: Request, beams: BeamParams, *, deadline_s: float | None = None) -> RequestOutbox:
        """As `submit`, for the `params.n` best answers that a beam search finds to each prompt: they arrive together,
        in the order of their scores. Raises `Refused` for params that have no meaning in a search."""
        return self._open_door().submit_search(request, beams, deadline_s)

    async def render(self, request: Request) -> tuple[list[Ints], SamplingParams]:
        """What a request comes to before anything is computed: its prompts as token ids, and its params with all that a
        tokenizer settles. Raises `Refused` for what the stages from intake to tokenize would refuse."""
        return await Door(self._require_parts(), self._env).render(request)

    def _open_door(self) -> Door:
        if not self.health.is_ready:
            raise NotServing(self.health)
        return Door(self._require_parts(), self._env)

    def abort(self, request_id: str, cause: str = "cancel") -> bool:
        """Ends a request early; its blocks come free within a few steps. False if it is not under way."""
        return self._parts is not None and self._parts.pipeline.cancel(request_id, cause)

    # -- text

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt. A long one takes its time; see `encoder` for use in a thread."""
        return self.encoder.encode_text(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens)


def _load(config: EngineConfig, env: Env, opening: Opening | None) -> tuple[LoadedModel | LoadedEncoder, Phases]:
    """In a thread: what is imported for a model alone takes longer than a loop may stand still."""
    if opening is None:
        from ..loading.early import Opening

        opening = Opening(config, Phases(env.now))
    try:
        with opening.phases("import"):
            from ..loading.model import load_model
        return load_model(config, opening.phases, env, opening), opening.phases
    finally:
        opening.close()


def _free_memory(is_on_gpu: bool) -> None:
    """Returns what the model held now, and not whenever cycles of objects happen to be collected."""
    gc.collect()
    if is_on_gpu:
        import torch

        torch.cuda.empty_cache()
