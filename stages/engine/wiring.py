"""Wiring: builds the stages of an engine and joins them into a pipeline.

Starts and stops nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.pipeline import Pipeline
from ...runtime.stage import Stage
from ..adapters.downloads import AdapterDownloads
from ..adapters.gate import AdapterGate
from ..adapters.reader import AdapterReader, StoredAdapter, ThreadReader
from ..adapters.registry import AdapterRegistry, parse_modules
from ..adapters.store import AdapterStore
from ..allocate.prefix_cache import PrefixCache
from ..allocate.stage import Allocate
from ..allocate.tiers.host_tier import HostTier
from ..beam_search.searches import BeamSearches
from ..config import EngineConfig
from ..detokenize.answer_text import AnswerText, DecodesIncrementally, TextTableProtocol
from ..detokenize.stage import Detokenize
from ..device.device import Device
from ..encode.stage import Encode
from ..errors import ConfigError, Overloaded
from ..execute.stage import Execute
from ..exit.outboxes import Outboxes, RequestOutbox
from ..grammar.compiled import Grammars
from ..grammar.gate import GrammarGate
from ..intake.stage import Intake
from ..messages import Ints, Request
from ..outputs import ModelInfo
from ..params import SamplingParams
from ..pipeline import build_encoder_pipeline, build_pipeline
from ..recordings.recorded_engine import RecordedEngine
from ..recordings.writer import RecordingWriter
from ..request_limits import MAX_CHARS_PER_TOKEN, RequestLimits
from ..sample.stage import Sample
from ..schedule.ngram_drafter import NgramDrafter
from ..schedule.policy import make_policy
from ..schedule.scheduler import StepLimits
from ..schedule.sequence import State
from ..schedule.speculation import num_speculative_tokens
from ..schedule.stage import Schedule
from ..tokenize.stage import Tokenize
from .gate_waits import GateWaits, trace_shed

if TYPE_CHECKING:
    from ...model.text.tokenizer import Tokenizer
    from ..adapters.templates import AdapterTemplates
    from ..loading.encoder import LoadedEncoder
    from ..loading.model import LoadedModel
    from ..tokenize.prompt_encoder import ModelEncoder


log = get_logger("millrace.stages")


class LoadedTokenizer(Protocol):
    """The parts of any model that its stages need."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def encoder(self) -> ModelEncoder: ...


class LoadedText(LoadedTokenizer, Protocol):
    """The parts of a model that the text stages need."""

    @property
    def text_table(self) -> TextTableProtocol: ...
    def make_decoder(self, params: SamplingParams, prompt: Ints) -> DecodesIncrementally: ...


class JoinedStages:
    """The stages of an engine in this process, joined."""

    loaded: LoadedTokenizer
    intake: Intake
    tokenize: Tokenize
    exit: Outboxes
    pipeline: Pipeline
    gate_waits: GateWaits

    @property
    def text(self) -> TextStages | None:
        """The same with what only a model that generates has; None of an encoder model."""
        return None

    async def stop(self) -> None:
        """Stops the pipeline, and what waits for it."""
        await self.pipeline.stop()


class EncoderStages(JoinedStages):
    """The joined stages of an engine with an encoder model."""

    def __init__(self, config: EngineConfig, loaded: LoadedEncoder) -> None:
        info = loaded.info
        limits = RequestLimits.of(info)
        self.loaded = loaded
        self.intake = Intake(limits, config.max_admitted_requests, config.max_waiting_requests)
        self.tokenize = Tokenize(loaded.encoder, limits, config.tokenizer_workers)
        self.encode = Encode(loaded.runner, info.max_num_batched_tokens, config.max_num_seqs, loaded.probe)
        self.exit = Outboxes(config.max_unread_tokens, config.max_parked_s)
        self.pipeline = build_encoder_pipeline(self.intake, self.tokenize, self.encode, self.exit)
        self.exit.lane = self.pipeline.lane
        self.exit.on_start.append(self.intake.request_started)
        self.gate_waits = GateWaits()
        self.exit.on_end.append(self.intake.request_ended)


class TextStages(JoinedStages):
    """The text stages of an engine, joined, with their grammars and beam searches.

    They are the same whether the step loop is in this process or in another. `loaded` has the tokenizer.
    """

    loaded: LoadedText

    def __init__(self, config: EngineConfig, loaded: LoadedText, grammars: Grammars) -> None:
        info = loaded.info
        self.limits = RequestLimits.of(info, config.max_logprobs)
        self.loaded = loaded
        self.grammars = grammars
        self.gate = GrammarGate(grammars, config.max_waiting_requests)
        self.adapters: AdapterGate | None = None  # None: no adapters are served
        loads = (config.max_admitted_requests, config.max_waiting_requests, config.max_queue_s)
        self.intake = Intake(self.limits, *loads)
        template = getattr(loaded.encoder, "template", None)
        if template is not None:
            template.allow(MAX_CHARS_PER_TOKEN * info.max_model_len)
        self.tokenize = Tokenize(loaded.encoder, self.limits, config.tokenizer_workers)
        self.detokenize = Detokenize(
            loaded.text_table, loaded.make_decoder, num_slots=config.max_num_seqs, vocab_size=info.vocab_size
        )
        self.exit = Outboxes(config.max_unread_tokens, config.max_parked_s, config.max_queue_s)
        self.pipeline = self._make_pipeline()
        self.exit.lane = self.pipeline.lane
        self.exit.on_start.append(self.intake.request_started)
        self.exit.locate = self._stage_of
        self.searches = BeamSearches(
            self.pipeline,
            self.exit,
            loaded.encoder,
            self.limits,
            info.eos_token_ids,
            lambda params, prompt: AnswerText("", loaded.text_table, loaded.make_decoder(params, prompt), params),
        )
        self.gate_waits = GateWaits()
        self.exit.on_end += [
            self.intake.request_ended,
            self.detokenize.request_ended,
            self.searches.request_ended,
            self.gate_waits.request_ended,
            self.gate.request_ended,
        ]

    @property
    def text(self) -> TextStages:
        return self

    async def stop(self) -> None:
        await self.searches.wait_until_over()
        await super().stop()
        await self.gate.aclose()
        if self.adapters is not None:
            await self.adapters.aclose()

    def _make_pipeline(self) -> Pipeline:
        raise NotImplementedError

    def _serve_adapters(self, config: EngineConfig, store: AdapterStore[Any], reader: AdapterReader) -> AdapterGate:
        """Admits requests with the adapters of the settings. Returns their gate."""
        folder = None if config.lora_dir is None else Path(config.lora_dir)
        registry = AdapterRegistry(parse_modules(config.lora_modules), folder, config.lora_hub_allow)
        downloads = AdapterDownloads(config.lora_hub_allow, partial(_fetch_adapter, config))
        sizes = {"max_waiting": config.max_waiting_requests, "num_slots": config.max_loras}
        gate = self.adapters = AdapterGate(registry, store, reader, downloads=downloads, **sizes)
        if config.lora_chat_templates:
            gate.on_renamed = _serve_templates(self.loaded, registry).forget
        self.searches.admit = self._admit_search
        self.exit.on_end.append(gate.request_ended)
        return gate

    async def _admit_search(self, request: Request) -> Request:
        assert self.adapters is not None
        try:
            return await self.adapters.admit(self.pipeline.env, request)
        except Overloaded as error:
            trace_shed(self.pipeline.tracer, error, "adapter")
            raise

    def _stage_of(self, outbox: RequestOutbox) -> tuple[str, bool]:
        """(stage that a request is in, whether any of its sequences has been served)."""
        raise NotImplementedError


def _serve_templates(loaded: LoadedText, registry: AdapterRegistry) -> AdapterTemplates:
    """Renders the chats of adapters by their own templates."""
    from ..adapters.templates import AdapterTemplates
    from ..tokenize.prompt_encoder import ModelEncoder

    assert isinstance(loaded.encoder, ModelEncoder), "an engine of adapters has a checkpoint's tokenizer"
    templates = AdapterTemplates(registry, loaded.encoder.tokenizer, MAX_CHARS_PER_TOKEN * loaded.info.max_model_len)
    loaded.encoder.find_template = templates.find
    return templates


def _fetch_adapter(config: EngineConfig, text: str, commit: str) -> Path:
    """Downloads an adapter of the Hub; in split mode in the front process, whose `offline` is the operator's."""
    from ...model.checkpoint.hub_adapter import resolve_adapter

    folder = Path(config.download_dir) if config.download_dir else None
    return resolve_adapter(text, commit, download_dir=folder, offline=config.offline)


class CoreStages:
    """The stages of the step loop. Steps are numbered from `first_step`."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, device: Device, secret: bytes = b"", first_step: int = 0
    ) -> None:
        info = loaded.info
        if info.states is not None and config.enable_prefix_caching and not info.states.num_snapshots:
            log.info("prefix_cache.off", reason=f"{info.family}: state_cache_bytes has no room for a recurrent state")
        config = with_states(config, info)
        self.loaded = loaded
        self.schedule = Schedule(
            _step_limits(config, info),
            policy=make_policy(config),
            drafter=_drafter(config, info),
            first_step=first_step,
        )
        layout = info.kv_layout
        make_cache = partial(PrefixCache, info.block_size, secret, states=info.states)
        cache = make_cache() if config.enable_prefix_caching else None
        on_host = (info.num_host_blocks, info.block_size, info.num_more_host_blocks, layout, info.states)
        host = HostTier.of(*on_host, max_model_len=info.max_model_len)
        sizes = (info.num_blocks, info.block_size, config.max_num_seqs, info.max_model_len)
        self.allocate = Allocate(*sizes, cache, host, layout, num_lanes=config.pipeline_parallel_size)
        self.execute, self.sample = Execute(loaded.runner, device, info.rates), Sample(loaded.sampler, device)
        if config.enable_lora:
            self.sample = Sample(loaded.sampler, device, loaded.runner.take_failed_loads)

    def record(self, path: Path, config: EngineConfig, env: Env) -> RecordingWriter:
        """Starts a recording.

        Call before the pipeline starts; the caller closes the recorder after it has stopped. Raises `ConfigError` for a
        file that cannot be created.
        """
        config = with_states(config, self.loaded.info)
        engine = RecordedEngine.of(config, self.loaded.info, self.schedule.max_waiting)
        lookup = (config.prompt_lookup_min, config.prompt_lookup_max) if engine.most_drafts else None
        recorder = RecordingWriter(path, engine, with_token_ids=config.record_token_ids, lookup=lookup)
        try:
            recorder.open(env)
        except OSError as error:
            reason = f"{error.strerror}: must name a file in an existing folder"
            raise ConfigError(f"record = {path}: {reason}") from None
        self.schedule.call_log = self.allocate.call_log = recorder
        return recorder


def with_states(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """The settings as a model with recurrent layers has them: perhaps fewer sequences, and no prefix cache."""
    if info.states is None:
        return config
    has_cache = config.enable_prefix_caching and info.states.num_snapshots > 0
    return replace(config, max_num_seqs=info.states.num_slots, enable_prefix_caching=has_cache)


class EngineStages(TextStages):
    """All stages of one engine in one process, joined."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, device: Device, secret: bytes = b"") -> None:
        self.device = device
        self._steps_in_flight = config.steps_in_flight
        self.core = CoreStages(config, loaded, device, secret)
        self.schedule, self.allocate = self.core.schedule, self.core.allocate
        super().__init__(config, loaded, loaded.grammars)
        device.on_gone.append(partial(self.pipeline.fail, "execute"))
        if config.enable_lora:
            assert loaded.read_adapter is not None and self.schedule.scheduler.adapters is not None
            slots = self.schedule.scheduler.adapters.slots
            store: AdapterStore[StoredAdapter] = AdapterStore(
                config.num_host_loras, lambda digest: slots.of(digest) is not None, max_bytes=config.lora_host_bytes
            )
            loaded.runner.find_adapters(store.get)
            gate = self._serve_adapters(config, store, ThreadReader(loaded.read_adapter))
            slots.on_replaced = gate.loader.note_room

    def _make_pipeline(self) -> Pipeline:
        core = self.core
        return build_pipeline(
            self.intake,
            self.tokenize,
            core.schedule,
            core.allocate,
            core.execute,
            core.sample,
            self.detokenize,
            self.exit,
            steps_in_flight=self._steps_in_flight,
        )

    def _stage_of(self, outbox: RequestOutbox) -> tuple[str, bool]:
        first, sequences = outbox.request.first_sequence_id, self.schedule.scheduler.sequences
        known = [sequences[i] for i in range(first, first + outbox.request.num_sequences) if i in sequences]
        if outbox.request_id in self.searches:
            return "execute", True
        if not known:
            return ("detokenize", True) if outbox.has_started else ("tokenize", False)
        is_waiting = all(sequence.state is State.WAITING for sequence in known)
        return "schedule" if is_waiting else "execute", outbox.has_started or not is_waiting


class PortsOnly(Stage[Any, Any]):
    """A stage of which only the ports are used."""

    def __init__(self, of: type[Stage[Any, Any]]) -> None:
        self.inputs, self.outputs = of.inputs, of.outputs  # type: ignore[misc]


CLASSES: dict[str, type[Stage[Any, Any]]] = {
    "intake": Intake,
    "tokenize": Tokenize,
    "schedule": Schedule,
    "allocate": Allocate,
    "execute": Execute,
    "sample": Sample,
    "detokenize": Detokenize,
    "encode": Encode,
    "exit": Outboxes,
}


def sketch(build: Callable[..., Pipeline], classes: Mapping[str, type[Stage[Any, Any]]] = CLASSES) -> Pipeline:
    """The pipeline that `build` of `pipeline.py` makes, with ports only: to see what fits where without a model."""
    names = [name for name in inspect.signature(build).parameters if name in classes]
    return build(*(PortsOnly(classes[name]) for name in names))


def _step_limits(config: EngineConfig, info: ModelInfo) -> StepLimits:
    return StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        steps_in_flight=config.steps_in_flight,
        enable_chunked_prefill=config.enable_chunked_prefill,
        itl_target_ms=info.itl_target_ms,
        num_speculative_tokens=num_speculative_tokens(config, info),
        short_length=info.short_length,
        max_loras=config.max_loras if config.enable_lora else 0,
        kv_layout=info.kv_layout,
        num_lanes=config.pipeline_parallel_size,
    )


def _drafter(config: EngineConfig, info: ModelInfo) -> NgramDrafter | None:
    num_tokens = num_speculative_tokens(config, info)
    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max, num_tokens) if num_tokens else None
