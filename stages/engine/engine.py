"""The engine: a model, the seven stages around it, and their Python API.

    async with Engine(model="path/or/hub-id") as engine:
        async for output in engine.generate("Once upon a time"):
            print(output.outputs[0].text, end="")

This module starts and stops the parts; `wiring.py` joins them. Where the step loop runs is for the core: `core.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from ...runtime.env.env import Env, LiveEnv
from ...runtime.health.stalls import Stall
from ...runtime.histogram import LatencyHistogram
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.stage import Stage
from ...runtime.startup.load_progress import LoadProgress
from ...runtime.trace.tracer import Tracer
from ..adapters.gate import AdapterGate
from ..adapters.registry import AdapterRegistry
from ..beam_search.algorithm import BeamParams
from ..config import EngineConfig
from ..exit.outboxes import Outboxes, RequestOutbox
from ..loading.load_report import load_and_report
from ..messages import Ints, Request
from ..outputs import ModelInfo
from ..params import SamplingParams
from ..sample.logits_processor import LogitsProcessor
from ..traffic.traffic_rules import Traffic
from .client_api import ClientApi
from .core import MakeCore
from .custom_stages import CustomStages
from .engine_status import EngineStatus
from .local_core import LocalCore
from .placed_stages import PlacedStage
from .starting import Processors, configured_faults, load_modules, log_ready, make_setup
from .submit import Submitter
from .wiring import JoinedStages

if TYPE_CHECKING:
    from ...model.text.tokenizer import Tokenizer
    from ..loading.early import EarlyLoading
    from ..tokenize.prompt_encoder import ModelEncoder


class Engine(ClientApi):
    """Serves one model.

    Use it as an async context manager, or call `start` and `stop`; it starts once. Leaving the context frees
    everything: memory, threads, tasks. Requests in progress then end with `abort`. All methods must be called on the
    event loop that started the engine. It keeps no global state and handles no signals, so a process may have several
    engines.

    `config` and `overrides` are those of `EngineConfig`. With the caller's own `env`, threads end when the caller
    closes it. For a `logits_processor`, one or several, see `LogitsProcessor`. `opening` is the model's `EarlyLoading`,
    if it has started already, with the same `config`. `stages` are custom stages with their places, behind those that
    the setting `stage` names: each a `PlacedStage`, or text as in the setting. `core` makes what runs the step loop.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        core: MakeCore = LocalCore,
        env: Env | None = None,
        logits_processor: Processors = None,
        opening: EarlyLoading | None = None,
        stages: Sequence[PlacedStage | str] = (),
        **overrides: Any,
    ) -> None:
        super().__init__()
        self._health = Health("new")
        self._stages: JoinedStages | None = None
        self._info: ModelInfo | None = None
        config = replace(config or EngineConfig(), **overrides)
        self._owns_env = env is None
        self._env: Env = LiveEnv(config.seed) if env is None else env
        self._setup = make_setup(config, self._env, lambda: self.health, logits_processor, opening)
        self.core = core(self._setup)
        self._custom = CustomStages(self._setup, self.core)
        self._custom.place(stages)

    @property
    def config(self) -> EngineConfig:
        """The settings."""
        return self._setup.config

    @property
    def logits_processors(self) -> Sequence[LogitsProcessor]:
        """Those of the settings, and of the caller."""
        return self._setup.processors

    @property
    def load_progress(self) -> LoadProgress:
        """How far loading the model is."""
        return self._setup.load_progress

    @property
    def mode(self) -> Literal["inline", "split"]:
        """Whether the step loop is in this process or in others."""
        return self.core.mode

    # -- custom stages

    def insert(
        self, stage: Stage[Any, Any], after: str | None = None, *, before: str | None = None, name: str | None = None
    ) -> None:
        """Inserts a custom stage after the stage `after`: "intake", "tokenize", ... "detokenize"; or before another.

        Call before `start`. `start` refuses a stage whose ports do not fit there, and says what would. The stage sees
        every request, including the engine's own warm-up requests (request id "warm-up"). It runs in this process:
        raises `ConfigError` for a place in a step loop that is in another one.
        """
        self._custom.insert(stage, after, before, name)

    def replace(self, name: str, stage: Stage[Any, Any]) -> None:
        """Replaces the stage `name`, which is in this process, by a custom one. Call before `start`."""
        self._custom.replace(name, stage)

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
        loaded, phases = await load_and_report(self.core.load, self.load_progress, self._env)
        with phases("pipeline"):
            stages = self._stages = self.core.join(loaded)
            self._info = loaded.info
            pipeline = stages.pipeline
            pipeline.use(self._env, Tracer(self._env))
            self._custom.change(pipeline)
            self.core.start_recording()
            faults = configured_faults(self.config, [*pipeline.stages, *self.core.stages_elsewhere])
            await pipeline.start()
        with phases("warm_up"):
            await self.core.warm_up()
        if (adapters := self._adapter_gate) is not None:
            with phases("adapters"):
                await load_modules(self.config, self._env, adapters)
        if self._info.attention_backend == "native":  # threads of this process compete with those that compute
            self._env.yield_to("device", loaded.own_cpu)
        pipeline.inject(faults)
        await self.core.inject([fault for fault in faults if fault.stage in self.core.stages_elsewhere])
        self._health = Health("ready")
        log_ready(self.info, self.status(), phases)

    def give_way(self) -> None:
        """Lowers the priority of the calling thread below that of the compute threads.

        Call it on the event loop's thread, once the engine is ready. It also applies to threads that this thread starts
        later, and keeps them off the CPU of the thread that starts each step, if that is in this process. The engine
        does this for its own threads, but never for its caller's.
        """
        if self._info is not None and self._info.attention_backend == "native":
            self._env.yield_this_thread()

    async def stop(self, cause: str = "server_shutdown") -> None:
        """Ends all requests and frees everything. Idempotent."""
        try:
            await self.core.begin_stop()
            self._health = Health("stopped", reason="the engine has been stopped")
            has_ended = await self._stop_stages(cause)
        finally:
            await self.core.stop()
        if self._owns_env:
            await self._env.aclose()
        if has_ended:
            gc.collect()  # frees the model now, instead of at some later collection of reference cycles
            self.core.free_memory()

    async def _stop_stages(self, cause: str) -> bool:
        """Ends all requests and the pipeline; False if there was none."""
        stages, self._stages = self._stages, None
        if stages is None:
            return False
        for request_id in list(stages.exit.live):
            stages.pipeline.cancel(request_id, cause)
        await stages.stop()
        return True

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Stops admitting requests and waits for the rest; False if some are left.

        Waits for at most `timeout_s`.
        """
        return await self.pipeline.drain(timeout_s)

    async def __aenter__(self) -> Self:
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
        return await Submitter(self._require_stages(), self._env).render(request)

    def _submitter(self) -> Submitter:
        if not self.takes_requests:
            raise NotServing(self.health)
        return Submitter(self._require_stages(), self._env)

    @property
    def adapters(self) -> AdapterRegistry | None:
        """The names of the LoRA adapters; None if none are served."""
        return None if self._adapter_gate is None else self._adapter_gate.registry

    @property
    def _adapter_gate(self) -> AdapterGate | None:
        return None if self._stages is None or self._stages.text is None else self._stages.text.adapters

    def _require_gate(self) -> AdapterGate:
        return Submitter(self._require_stages(), self._env).adapters()

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter from a folder under a name, or another one under a name in use.

        Requests in progress end on the adapter that they have. Raises `Refused` for an adapter that cannot be served.
        """
        await self._require_gate().load(self._env, name, Path(path))

    def unload_adapter(self, name: str) -> bool:
        """Removes an adapter's name at once; False if it is not known. Requests in progress end as they would."""
        return self._require_gate().unload(name)

    async def pin_adapter(self, name: str, *, on_device: bool = True) -> None:
        """Loads an adapter and keeps it in host memory, and by default in the device slot that it gets.

        Raises `Refused` for an adapter that cannot be served, and if too many are pinned.
        """
        await self._require_gate().pin(self._env, name, "device" if on_device else "host")

    def unpin_adapter(self, name: str) -> None:
        """Lets an adapter be replaced again. Raises `Refused` for an unknown name."""
        self._require_gate().unpin(name)

    async def remove_adapter(self, name: str, timeout_s: float = 0.0, *, force: bool = False) -> int | None:
        """As `unload_adapter`, and waits up to `timeout_s` for the requests that have it.

        With `force` those that are left are ended then. Returns their number; None if the name is not known.
        """
        return await self._require_gate().remove(self._env, name, timeout_s, self.abort if force else None)

    def abort(self, request_id: str, cause: str = "cancel") -> bool:
        """Ends a request early; its blocks become free within a few steps.

        Returns False if it is not in progress.
        """
        return self._stages is not None and self._stages.pipeline.cancel(request_id, cause)

    # -- text

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt.

        Blocks the event loop; for long prompts use `encoder` in a thread.
        """
        return self.encoder.encode_text(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    # -- inspection: read only; raises `NotServing` while the engine is not running

    @property
    def health(self) -> Health:
        """Whether requests are admitted, and if not, why."""
        if not self._health.is_ready:
            return self._health
        if (away := self.core.away) is not None:
            return away
        return self._health if self._stages is None else self._stages.pipeline.health

    @property
    def takes_requests(self) -> bool:
        """Whether requests are admitted: also by a front that is not ready, as it lost its last engine just now."""
        return self.health.is_ready or (self._health.is_ready and self.core.keeps_requests)

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Available from the start of the engine on, also after its stop."""
        if self._info is None:
            raise NotServing(self.health)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._require_stages().loaded.tokenizer

    @property
    def encoder(self) -> ModelEncoder:
        """Encodes prompts and chats to token ids, as the tokenize stage does."""
        return self._require_stages().loaded.encoder

    @property
    def pipeline(self) -> Pipeline:
        """The running stages of this process, and the channels between them."""
        return self._require_stages().pipeline

    @property
    def exit(self) -> Outboxes:
        """The exit, whose `on_start` and `on_end` report each request."""
        return self._require_stages().exit

    @property
    def has_core(self) -> bool:
        """Whether the engine has a scheduler and blocks. An encoder model has neither."""
        return self._require_stages().text is not None

    @property
    def token_gaps_us(self) -> LatencyHistogram:
        """Microseconds between two tokens of an answer, over all answers so far; nothing else writes to it."""
        if (text := self._require_stages().text) is None:
            raise AttributeError("an encoder model makes no tokens")
        return text.detokenize.gaps.histogram

    def status(self, *, with_sequences: bool = False, with_blocks: bool = False) -> EngineStatus:
        """What the engine does and has done; of a step loop in another process, at the last `refresh` or report.

        The blocks are then those of the last `refresh` with blocks; None before.
        """
        return self.core.status(with_sequences=with_sequences, with_blocks=with_blocks)

    async def refresh(self, *, with_blocks: bool = False, with_stacks: bool = False) -> None:
        """Updates the part of `status` that is in another process, and the trace.

        Afterwards they are not older than this call. `with_blocks` includes the owner of each block, `with_stacks` the
        stacks of tasks.
        """
        await self.core.refresh(with_blocks=with_blocks, with_stacks=with_stacks)

    async def forget_prefixes(self) -> int:
        """Empties the prefix cache, wherever it is. Returns the number of blocks freed."""
        return await self.core.forget_prefixes()

    async def prefix_tree(self) -> dict[str, Any] | None:
        """The tree of the (first) prefix cache: see `allocate/prefix_tree.py`. None without a cache."""
        return await self.core.prefix_tree()

    @property
    def engine_pid(self) -> int | None:
        """The id of the current or last engine process, the first of several; None if there was none."""
        return self.core.engine_pid

    @property
    def num_deaths(self) -> int:
        """The number of engine processes that died."""
        return self.core.num_deaths

    @property
    def engines(self) -> list[dict[str, Any]]:
        """Each engine process of a fleet: index, pid, state, reason if it does not serve, counts, work in tokens."""
        return self.core.engines

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The last choices of an engine process of a fleet for a request, the newest first: the score of each engine in
        seconds, and the tokens of the prompt that it had cached."""
        return self.core.choices

    @property
    def served_names(self) -> Sequence[str]:
        """The names under which its operators want the model served, of engines elsewhere; (): none."""
        return self.core.served_names

    def warm_prefixes(self) -> list[dict[str, Any]]:
        """The prefixes that the last prompts of a fleet share, as a tree: how many tokens of each every engine has
        cached. It takes milliseconds with many long prompts."""
        return self.core.warm_prefixes()

    @property
    def traffic(self) -> Traffic | None:
        """What goes by the labels of engines; None without a fleet."""
        return self.core.traffic

    def drain_engine(self, index: int, by: str = "") -> None:
        """Gives an engine process of a fleet no new requests; it ends once it has none, and another one starts.

        `by` "finish": its requests end there; "migrate": they go on in the others at once; "": as that engine's
        settings say. An engine elsewhere is drained of the requests of all its fronts, and its machine starts the next
        one. Raises `LookupError` if there is none of this index.
        """
        self.core.drain_engine(index, by)

    def is_stopped_by(self, stall: Stall) -> bool:
        """Whether no request can go on while this stall lasts; not if another engine process serves."""
        return self.core.is_stopped_by(stall)

    def _require_stages(self) -> JoinedStages:
        if self._stages is None:
            raise NotServing(self.health)
        return self._stages
