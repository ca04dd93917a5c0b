"""Loads a model: tokenizer, backend and sampler. `load_model` is the entry point.

Runs in a thread, once, before the pipeline starts. `early.py` finds the files and loads the native library's weights;
it may have started before this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...model.checkpoint import hub
from ...model.checkpoint.generation_defaults import GenerationDefaults
from ...model.checkpoint.model_kind import is_bidirectional
from ...model.checkpoint.tensor_shapes import open_source, output_rows
from ...model.spec import DecoderSpec
from ...model.text.detokenizer import IncrementalDecoder, TextTable
from ...model.text.tokenizer import Tokenizer
from ...model.text.vocabulary import Vocabulary
from ...runtime.device_streams.interface import DeviceStreams
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.startup.phases import Phases
from ..backends.backend import Backend
from ..backends.cuda.step_update import EndRules
from ..backends.merged_adapters import merging_of
from ..config import EngineConfig, not_for_encoders, resolve_step_size
from ..device.device import Device
from ..errors import ConfigError, Refused
from ..execute.model_runner import ModelRunner
from ..grammar.compiled import Grammars
from ..grammar.masks import GrammarMasks
from ..memory_table import human
from ..messages import Ints
from ..outputs import CaptureReport, ModelInfo, WeightUse
from ..params import NUMBERS, SamplingParams
from ..sample.sampler import Sampler
from ..tasks import Task
from ..tokenize.prompt_encoder import ModelEncoder
from .early import EarlyLoading, OpenedModel, max_model_len_of, resolve, resolve_text
from .model_impl import check_dtype, choose_impl
from .native_choice import require_torch
from .text_parts import TextParts, configured_pooling, read_text

if TYPE_CHECKING:
    from ...model.lora.adapter import Adapter
    from ...model.lora.prepared import PreparedAdapter
    from ..backends.cuda.async_model import AsyncModel  # which imports torch
    from .encoder import LoadedEncoder

    ReadAdapter = Callable[[Path, str], Adapter | PreparedAdapter[Any]]  # a folder's, with a name for messages

log = get_logger("millrace.stages")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """The loaded parts of a model that an engine needs."""

    info: ModelInfo
    tokenizer: Tokenizer
    encoder: ModelEncoder
    text_table: TextTable
    runner: ModelRunner | AsyncModel
    sampler: Sampler | AsyncModel
    grammars: Grammars
    make_device: Callable[[], Device]  # on whose thread runner and sampler run
    own_cpu: int | None = None  # as in `Backend`
    read_adapter: ReadAdapter | None = None  # None: no LoRA
    close: Callable[[], object] | None = None  # as in `Backend`; blocks

    def make_decoder(self, params: SamplingParams, prompt: Ints) -> IncrementalDecoder:
        """A decoder for an answer to `prompt` [P], which the answer's text continues."""
        return IncrementalDecoder.after(self.text_table, prompt, params.skip_special_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class ModelText:
    """The loaded parts of a model in a process of text stages, which computes no steps."""

    own_cpu: ClassVar[int | None] = None  # computes no steps

    info: ModelInfo
    tokenizer: Tokenizer
    encoder: ModelEncoder
    text_table: TextTable

    def make_decoder(self, params: SamplingParams, prompt: Ints) -> IncrementalDecoder:
        """As `LoadedModel` does."""
        return IncrementalDecoder.after(self.text_table, prompt, params.skip_special_tokens)


def load_text(config: EngineConfig, phases: Phases, *, with_weights: bool = True) -> Callable[[ModelInfo], ModelText]:
    """Loads the parts of a model that handle text.

    Returns a function of the `ModelInfo` of the engine process. Blocks until done; run it in a thread. Raises as
    `load_model` does, and `ConfigError` for an encoder model. Without `with_weights`, the engine is elsewhere: weights
    are neither downloaded nor looked at.
    """
    root = resolve(config) if with_weights else resolve_text(config)
    if is_bidirectional(root):
        raise not_for_encoders(config)
    shape, _ = choose_impl(config, root)
    if shape is None:
        shape = _read_through_transformers(config, root, phases)
    elif with_weights:
        _, shape = open_source(root, shape, config.load_format)  # its sizes are those of the files
    text = read_text(config, root, shape, hub.model_name(config.model), phases)
    return lambda info: ModelText(info, text.tokenizer, text.encoder, text.table)


def load_model(
    config: EngineConfig, phases: Phases, env: Env, opening: EarlyLoading | None = None
) -> LoadedModel | LoadedEncoder:
    """Loads a model. Blocks until done; run it in a thread.

    Raises `ConfigError` for invalid settings, and `ModelError` for a model that cannot be loaded; each says what would
    be right. `opening` is an `EarlyLoading` that has started already, with the same `phases`; the caller closes it.
    """
    if opening is not None:
        return _load(config, opening.result(), phases, env)
    opening = EarlyLoading(config, phases)
    try:
        return _load(config, opening.result(), phases, env)
    finally:
        opening.close()


def _load(config: EngineConfig, opened: OpenedModel, phases: Phases, env: Env) -> LoadedModel | LoadedEncoder:
    model_id = hub.model_name(config.model)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "emulate_tp"):
        size = getattr(config, name)
        if size > 1 and (opened.why_through_transformers or opened.shape is None):
            what = "runs through transformers" if opened.why_through_transformers else "is an encoder"
            raise ConfigError(f"{name} = {size}: {model_id} {what}; use 1")
    if opened.why_through_transformers:
        log.info("model_impl.chosen", name="transformers", reason=opened.why_through_transformers)
        shape = _read_through_transformers(config, opened.root, phases)
        check_dtype(config, shape)
        opened = replace(opened, shape=shape, max_model_len=max_model_len_of(config, shape))
    if opened.shape is None:
        if config.enable_lora:
            raise ConfigError("enable_lora = True: an encoder model takes no adapters at run time; merge one instead")
        if config.tokenizer is not None:
            raise ConfigError(f"tokenizer = {config.tokenizer}: an encoder model has its own; leave it out")
        with phases("import"):
            from .encoder import load_encoder

        return load_encoder(config, opened.root, model_id, configured_pooling(config), phases, opened.threads)
    text = env.side_thread("load").submit(read_text, config, opened.root, opened.shape, model_id, phases)
    if opened.native_model is not None or config.chat_template is not None:
        # Native weights are packed meanwhile; the measurements that follow must not run beside it. Otherwise this
        # reports an unusable chat template before the weights are read.
        text.result()
    computing = _load_computing(config, opened, opened.shape, phases, env.streams)
    return _put_together(config, opened.root, opened.shape, model_id, computing, text.result(), phases, env)


def _put_together(
    config: EngineConfig,
    root: Path,
    shape: DecoderSpec,
    model_id: str,
    computing: Backend,
    text: TextParts,
    phases: Phases,
    env: Env,
) -> LoadedModel:
    tokenizer, text_table, memory, runner = text.tokenizer, text.table, computing.memory, computing.runner
    if weights := computing.weights:
        memory = memory.with_row("weights", memory.row("weights").num_bytes, _about_weights(computing, weights))
    log.info("memory.plan", **memory.to_event(), table=memory.to_text())
    eos_token_ids = _end_tokens(text.defaults, tokenizer, shape)
    info = ModelInfo(
        model_id=model_id,
        max_model_len=computing.max_model_len,
        vocab_size=shape.vocab_size,
        dtype=computing.dtype,
        device=computing.device,
        attention_backend=computing.backend,
        model_impl=computing.model_impl,
        eos_token_ids=eos_token_ids,
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        has_chat_template=text.encoder.template is not None,
        default_params=_default_params(config, text.defaults),
        default_max_tokens=text.defaults.max_tokens,
        num_host_blocks=computing.num_host_blocks,
        num_more_host_blocks=computing.num_more_host_blocks,
        kv_layout=memory.layout,
        max_num_batched_tokens=computing.max_num_batched_tokens,
        itl_target_ms=computing.itl_target_ms,
        rates=computing.rates,
        startup_s=phases.seconds,
        memory=memory,
        tasks=_tasks(shape, text),
        pooling=text.pooling,
        has_trained_pooling=text.has_trained_pooling,
        quantization=computing.quantization,
        weights=computing.weights,
        kv_cache_dtype=computing.kv_cache_dtype,
        family=shape.family,
        short_length=runner.short_length,
        states=computing.states,
    )
    if text.encoder.yes_no is not None:
        assert runner.pooler is not None
        ids = text.encoder.yes_no.token_ids
        yes, no = output_rows(root, shape, config.load_format, ids, merging_of(config))
        runner.pooler.score_head = yes - no
    grammars = Grammars(lambda: make_vocabulary(tokenizer, text_table, info))
    sampler = Sampler(
        runner.last_tokens,
        shape.vocab_size,
        computing.max_model_len,
        eos_token_ids,
        GrammarMasks(grammars, config.max_num_seqs, env),
        runner.pooler,
        logprobs_mode=config.logprobs_mode,
        chooser=computing.chooser,
    )
    text_parts = (tokenizer, text.encoder, text_table)
    read = _adapter_reader(config, root, shape, computing, tokenizer, model_id) if config.enable_lora else None
    if computing.assemble is None:
        calls = (computing.enter, computing.call_before_computing, computing.probe, computing.watch)
        make_device = partial(Device, *calls)
        own_cpu, close = computing.own_cpu, computing.close
        return LoadedModel(info, *text_parts, runner, sampler, grammars, make_device, own_cpu, read, close)
    with phases("graphs"):
        async_runtime = computing.assemble(sampler, EndRules(eos_token_ids, info.max_model_len, info.short_length))
    if async_runtime.captured is not None:
        info = _with_graphs(info, async_runtime.captured)
    model = async_runtime.model
    make = async_runtime.make_device
    return LoadedModel(info, *text_parts, model, model, grammars, make, read_adapter=read)


def _adapter_reader(
    config: EngineConfig, base: Path, shape: DecoderSpec, computing: Backend, tokenizer: Tokenizer, model_id: str
) -> ReadAdapter:
    from ...model.lora.adapter import AdaptableModel, read_adapter
    from ...model.lora.tokenizer_check import check_tokenizer

    model, dtype = AdaptableModel(shape), _adapter_dtype(config, computing)

    def read(root: Path, name: str) -> Adapter | PreparedAdapter[Any]:
        check_tokenizer(root, name, base, lambda: tokenizer.tokens)
        names = {"name": name, "model_name": model_id}
        adapter = read_adapter(root, model, dtype, max_rank=config.max_lora_rank, **names)
        return adapter if computing.prepare_adapter is None else computing.prepare_adapter(adapter)

    return read


def _adapter_dtype(config: EngineConfig, computing: Backend) -> str:
    """The dtype of adapters. Raises `ConfigError` for one that the backend does not compute with."""
    dtype, able = config.lora_dtype, dict.fromkeys((computing.dtype, *computing.adapter_dtypes))
    if dtype not in ("auto", *able):
        raise ConfigError(
            f"lora_dtype = {dtype}: the {computing.backend} backend takes adapters for weights in {computing.dtype} in "
            f"{' or '.join(able)} only; leave it out for {computing.dtype}"
        )
    return computing.dtype if dtype == "auto" else dtype


def _about_weights(computing: Backend, weights: WeightUse) -> str:
    """The description of the weights in the table of memory."""
    kept = f"{weights.bits_per_weight:.3g} bits each, as {computing.quantization or computing.dtype}"
    return f"{weights.num_weights / 1e6:.4g} million, {kept}; a token reads {human(weights.bytes_per_token)} of them"


def _tasks(shape: DecoderSpec, text: TextParts) -> frozenset[Task]:
    tasks: set[Task] = {"generate", "embed"} if shape.head.exists else {"embed"}
    return frozenset(tasks | {"score"} if text.encoder.yes_no is not None else tasks)


def _end_tokens(defaults: GenerationDefaults, tokenizer: Tokenizer, shape: DecoderSpec) -> tuple[int, ...]:
    """The tokens that end an answer: those of generation_config.json, config.json and the tokenizer, joined.

    The files of a checkpoint often disagree, and an answer that goes on behind an end token invents further turns.
    """
    own = tokenizer.eos_token_id
    is_known = own is not None and own < shape.vocab_size and own not in defaults.eos_token_ids
    return (*defaults.eos_token_ids, own) if is_known and own is not None else defaults.eos_token_ids


def _with_graphs(info: ModelInfo, captured: CaptureReport) -> ModelInfo:
    """`info` with the measured memory of the CUDA graphs instead of the estimate."""
    assert info.memory is not None
    log.info("graphs.captured", **captured.to_event(), estimated_bytes=info.memory.row("graphs").num_bytes)
    what = f"{len(captured.batches)} sizes of CUDA graphs, measured"
    return replace(info, captured=captured, memory=info.memory.with_row("graphs", captured.num_bytes, what))


def make_vocabulary(tokenizer: Tokenizer, text_table: TextTable, info: ModelInfo) -> Vocabulary:
    """The model's tokens, as grammars need them."""
    return Vocabulary(text_table.bytes, tokenizer.special_ids, info.eos_token_ids, info.vocab_size, tokenizer.to_json())


# -- the backend


def _load_computing(
    config: EngineConfig, opened: OpenedModel, shape: DecoderSpec, phases: Phases, streams: DeviceStreams | None
) -> Backend:
    """Loads the native backend if it supports the settings, otherwise torch, or transformers where `opened` says so."""
    if opened.why_through_transformers:
        from ..backends.torch.through_transformers import load_on_transformers

        resolved = resolve_step_size(config, is_native=False)
        return load_on_transformers(resolved, opened.root, shape, opened.max_model_len, phases, opened.threads)
    reason, max_model_len, threads = opened.why_not_native, opened.max_model_len, opened.threads
    if opened.native_model is not None:
        from ..backends.native.loading import load_natively

        model = opened.native_model.result()
        if not isinstance(model, str):
            resolved = resolve_step_size(config, is_native=True)
            return load_natively(resolved, model, shape, max_model_len, phases, threads, opened.packing)
        reason = model
    require_torch(config, shape, reason)
    if config.num_ranks > 1:
        log.info("backend.chosen", name="torch", reason=reason)
    if opened.native_model is not None:
        costs = "torch instead: a second and 200 MiB more at the start, and slower steps"
        log.warning("native.unavailable", reason=reason, costs=costs)
    with phases("import"):
        from ..backends.torch.loading import load_on_torch
    resolved = resolve_step_size(config, is_native=False)
    return load_on_torch(resolved, opened.root, shape, max_model_len, phases, threads, streams)


def _read_through_transformers(config: EngineConfig, root: Path, phases: Phases) -> DecoderSpec:
    """What the text stages need to know of a model that runs through transformers."""
    with phases("import"):
        from ..backends.torch.through_transformers import read_spec_by_transformers
    return read_spec_by_transformers(config, root)


# -- settings with defaults


def _default_params(config: EngineConfig, defaults: GenerationDefaults) -> SamplingParams:
    said = dict(defaults.sampling)
    if defaults.max_tokens is not None:
        said["max_tokens"] = defaults.max_tokens
    if defaults.not_applied:
        log.warning("generation_config.not_applied", keys=list(defaults.not_applied))
    chosen = {name: _within_range(name, value) for name, value in said.items()}
    if said:
        log.info("generation_config.applied", **chosen)
    try:
        return SamplingParams(**chosen)
    except Refused as error:
        raise ConfigError(f"generation_config.json: {error.message}; start with generation_config = off") from None


def _within_range(name: str, value: Any) -> Any:
    """The value, or the nearest that a request may ask for."""
    if name not in NUMBERS:
        return value
    least, most = NUMBERS[name]
    nearest = min(max(value, least), most)
    if nearest != value:
        log.warning("generation_config.out_of_range", name=name, value=value, used=nearest)
    return nearest
