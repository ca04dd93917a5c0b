"""From a model's name to what an engine needs of it: files, tokenizer, what computes its steps, and the sampler.

Runs in a thread, once, before the pipeline starts. What computes is chosen here: the native library on a CPU, unless
something asks for more than it does; else torch, which is imported only then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..kernels.native.errors import NativeUnavailableError, UnsupportedModelError
from ..model import hub
from ..model.chat import ChatTemplate
from ..model.config import ModelConfig
from ..model.detokenizer import IncrementalDecoder, TextTable
from ..model.expected import without_missing_head
from ..model.families import is_bidirectional
from ..model.generation import GenerationDefaults
from ..model.pooling import PoolingConfig, PoolingKind, read_pooling
from ..model.tokenizer import Tokenizer
from ..model.vocabulary import Vocabulary
from ..runtime.cpus import ComputeThreads, Cpus
from ..runtime.env import Env
from ..runtime.log import get_logger
from ..runtime.streams import Streams
from .computing import Computing
from .config import EngineConfig
from .device import Device
from .encoder import ModelEncoder
from .errors import ConfigError, Refused
from .grammar.grammars import Grammars
from .grammar.masks import GrammarMasks
from .outputs import ModelInfo
from .params import SamplingParams
from .phases import Phases
from .runner import ModelRunner
from .sampling import Sampler
from .step_size import settle_step_size
from .stepping.diff import Ends
from .stepping.graphs import CaptureReport

if TYPE_CHECKING:
    from .encoder_loading import LoadedEncoder
    from .stepping.late_model import LateModel  # which imports torch

log = get_logger("millrace.stages")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """All that an engine needs of a model."""

    info: ModelInfo
    tokenizer: Tokenizer
    encoder: ModelEncoder
    text_table: TextTable
    runner: ModelRunner | LateModel
    sampler: Sampler | LateModel
    grammars: Grammars
    make_device: Callable[[], Device]  # whose thread is theirs
    own_cpu: int | None = None  # as in `Computing`

    def make_decoder(self, params: SamplingParams) -> IncrementalDecoder:
        """For an answer, which goes on after its prompt: a space it begins with belongs to it."""
        return IncrementalDecoder(self.text_table, params.skip_special_tokens, continues=True)


@dataclass(frozen=True, slots=True, eq=False)
class ModelText:
    """What a process needs of a model that has the stages of text, and computes nothing."""

    own_cpu: ClassVar[int | None] = None  # it computes nothing

    info: ModelInfo
    tokenizer: Tokenizer
    encoder: ModelEncoder
    text_table: TextTable

    def make_decoder(self, params: SamplingParams) -> IncrementalDecoder:
        """As `LoadedModel` does."""
        return IncrementalDecoder(self.text_table, params.skip_special_tokens, continues=True)


def load_text(config: EngineConfig, phases: Phases) -> Callable[[ModelInfo], ModelText]:
    """The parts of a model that know text, once one says what was loaded elsewhere. Blocks for as long as it takes, and
    raises as `load_model` does; `ConfigError` for a model that generates nothing."""
    root = _resolve(config)
    if is_bidirectional(root):
        raise ConfigError("mode = split: this model reads texts at once and generates nothing; use mode = inline")
    shape = ModelConfig.read(root)
    text = _read_text(config, root, shape, config.model or hub.BUNDLED, phases)
    return lambda info: ModelText(info, text.tokenizer, text.encoder, text.table)


def _resolve(config: EngineConfig) -> Path:
    return hub.resolve(
        config.model,
        revision=config.revision,
        download_dir=Path(config.download_dir) if config.download_dir else None,
        offline=config.offline,
    )


def load_model(config: EngineConfig, phases: Phases, env: Env) -> LoadedModel | LoadedEncoder:
    """Blocks for as long as it takes. Raises `ConfigError` for settings, and `ModelError` for a model, that do not
    fit together; each says what would."""
    with phases("resolve"):
        root = _resolve(config)
    threads = ComputeThreads.choose(config.threads, Cpus.of_this_process(), os.environ)
    model_id = config.model or hub.BUNDLED
    if is_bidirectional(root):
        with phases("import"):
            from .encoder_loading import load_encoder

        return load_encoder(config, root, model_id, asked_pooling(config), phases, threads)
    shape = ModelConfig.read(root)
    if config.load_format != "dummy":
        shape = without_missing_head(root, shape)
    max_model_len = _max_model_len(config, shape)
    text = env.side_thread("load").submit(_read_text, config, root, shape, model_id, phases)
    computing = _load_computing(config, root, shape, max_model_len, phases, threads, env.streams)
    return _put_together(config, shape, model_id, computing, text.result(), phases, env)


def _put_together(
    config: EngineConfig,
    shape: ModelConfig,
    model_id: str,
    computing: Computing,
    text: _Text,
    phases: Phases,
    env: Env,
) -> LoadedModel:
    tokenizer, text_table, memory, runner = text.tokenizer, text.table, computing.memory, computing.runner
    log.info("memory.plan", **memory.to_event(), table=memory.to_text())
    eos_token_ids = text.defaults.eos_token_ids or tuple(i for i in (tokenizer.eos_token_id,) if i is not None)
    info = ModelInfo(
        model_id=model_id,
        max_model_len=computing.max_model_len,
        vocab_size=shape.vocab_size,
        dtype=computing.dtype,
        device=computing.device,
        attention_backend=computing.backend,
        eos_token_ids=eos_token_ids,
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        has_chat_template=text.encoder.template is not None,
        default_params=_default_params(config, text.defaults),
        num_host_blocks=computing.num_host_blocks,
        max_num_batched_tokens=computing.max_num_batched_tokens,
        itl_target_ms=computing.itl_target_ms,
        rates=computing.rates,
        startup_s=phases.seconds,
        memory=memory,
        tasks=frozenset({"generate", "embed"} if shape.has_head else {"embed"}),
        pooling=text.pooling,
        quantization=computing.quantization,
        kv_cache_dtype=computing.kv_cache_dtype,
    )
    grammars = Grammars(lambda: make_vocabulary(tokenizer, text_table, info))
    sampler = Sampler(
        runner.last_tokens,
        shape.vocab_size,
        computing.max_model_len,
        eos_token_ids,
        GrammarMasks(grammars, config.max_num_seqs, env),
        runner.pooler,
        logprobs_mode=config.logprobs_mode,
        choosing=computing.choosing,
    )
    text_parts = (tokenizer, text.encoder, text_table)
    if computing.assemble is None:
        make_device = partial(Device, computing.enter, computing.call_before_computing)
        return LoadedModel(info, *text_parts, runner, sampler, grammars, make_device, computing.own_cpu)
    with phases("graphs"):
        late = computing.assemble(sampler, Ends(eos_token_ids, info.max_model_len))
    if late.captured is not None:
        info = _with_graphs(info, late.captured)
    return LoadedModel(info, *text_parts, late.model, late.model, grammars, late.make_device)


def _with_graphs(info: ModelInfo, captured: CaptureReport) -> ModelInfo:
    """With what capturing took, in the place of what it was guessed to take."""
    log.info("graphs.captured", **captured.to_event())
    assert info.memory is not None
    what = f"{len(captured.batches)} sizes of CUDA graphs, measured"
    return replace(info, captured=captured, memory=info.memory.with_row("graphs", captured.num_bytes, what))


def make_vocabulary(tokenizer: Tokenizer, text_table: TextTable, info: ModelInfo) -> Vocabulary:
    """What grammars know of the model's tokens."""
    return Vocabulary(text_table.bytes, tokenizer.special_ids, info.eos_token_ids, info.vocab_size, tokenizer.to_json())


# -- what computes


def _load_computing(
    config: EngineConfig,
    root: Path,
    shape: ModelConfig,
    max_model_len: int,
    phases: Phases,
    threads: ComputeThreads,
    streams: Streams | None,
) -> Computing:
    """The steps by the native library where that does all that is asked for, else by torch."""
    reason = _why_not_native(config, shape)
    if reason is None:
        from .native_loading import load_natively

        log.info("threads.chosen", count=threads.count, cpus=list(threads.pinned), reason=threads.reason)
        try:
            return load_natively(settle_step_size(config, is_native=True), root, shape, max_model_len, phases, threads)
        except (NativeUnavailableError, UnsupportedModelError) as error:
            reason = str(error)
            costs = "torch instead: a second and 200 MiB more at the start, and longer steps"
            if config.attention_backend == "auto" and _native_only(config) is None:
                log.warning("native.unavailable", reason=reason, costs=costs)
    if (asked := _native_only(config)) is not None:
        raise ConfigError(f"{asked}: only the native step does that, and here it does not run: {reason}")
    if config.attention_backend == "native":
        raise ConfigError(f"attention_backend = native: {reason}; use auto, which then takes torch")
    with phases("import"):
        from .torch_loading import load_on_torch
    settled = settle_step_size(config, is_native=False)
    return load_on_torch(settled, root, shape, max_model_len, phases, threads, streams)


def _why_not_native(config: EngineConfig, shape: ModelConfig) -> str | None:
    """What is asked for that the native library does not do; None: nothing."""
    if config.attention_backend not in ("auto", "native"):
        return f"attention_backend = {config.attention_backend}"
    if config.device == "cuda" or (config.device == "auto" and has_cuda_driver()):
        return f"device = {config.device}: it computes on CPUs, and this is for a GPU"
    if config.kv_cache_dtype == "fp8":
        return "kv_cache_dtype = fp8: it keeps keys and values in int8, or as dtype"
    if config.deterministic:
        return "deterministic: it cuts sums by the batch, and this is for a GPU"
    if config.dtype_of(shape.dtype) == "float16":
        return "dtype = float16: it computes in bfloat16 and float32"
    return None


def _native_only(config: EngineConfig) -> str | None:
    """What is asked for that only the native library does, and what to do without it; None: nothing."""
    if config.quantization is not None:
        return f"quantization = {config.quantization} (leave it out, or use device = cpu with attention_backend = auto)"
    if config.kv_cache_dtype == "int8":
        return "kv_cache_dtype = int8 (use auto or fp8, or device = cpu with attention_backend = auto)"
    return None


def has_cuda_driver() -> bool:
    """Whether this machine may have a GPU, so that torch is to be asked: which takes a second that others need not."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# -- text


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """The parts of a model that know text, and what the checkpoint says besides."""

    tokenizer: Tokenizer
    encoder: ModelEncoder
    table: TextTable
    defaults: GenerationDefaults
    pooling: PoolingConfig


def _read_text(config: EngineConfig, root: Path, shape: ModelConfig, model_id: str, phases: Phases) -> _Text:
    """Beside the loading of weights, on a thread of its own."""
    with phases("tokenizer"):
        tokenizer = Tokenizer.read(root)
        template = ChatTemplate(config.chat_template, tokenizer) if config.chat_template else None
        encoder = ModelEncoder(tokenizer, template or ChatTemplate.read(root, tokenizer), model_id)
        defaults = GenerationDefaults.read(root, shape)
        pooling = read_pooling(root, shape.hidden_size, "last", asked_pooling(config))
        if len(tokenizer) > shape.vocab_size:
            log.warning("tokenizer.larger_than_model", num_tokens=len(tokenizer), vocab_size=shape.vocab_size)
        return _Text(tokenizer, encoder, TextTable(tokenizer), defaults, pooling)


# -- what the configuration left open


def asked_pooling(config: EngineConfig) -> PoolingKind | None:
    """The pooling that is asked for whatever the checkpoint says."""
    return None if config.pooling == "auto" else config.pooling


def _max_model_len(config: EngineConfig, shape: ModelConfig) -> int:
    """As it was asked for; for "auto" the most it may become, whatever the memory."""
    longest = shape.max_position_embeddings
    most = settle_step_size(config, is_native=False).num_step_tokens  # of prompts that run whole, whatever computes
    if config.max_model_len == "auto":
        return longest if config.enable_chunked_prefill else min(longest, most)
    chosen = longest if config.max_model_len is None else config.max_model_len
    if chosen > longest:
        raise ConfigError(f"max_model_len = {chosen}: the model was made for {longest} tokens; set at most that")
    if chosen < 2:
        raise ConfigError(f"max_model_len = {chosen}: needs at least 2, a token of prompt and one of answer")
    if not config.enable_chunked_prefill and most < chosen:
        raise ConfigError(
            f"enable_chunked_prefill = False: a prompt of max_model_len = {chosen} tokens does not fit a step of "
            f"max_num_batched_tokens = {most}; raise the one or lower the other"
        )
    return chosen


def _default_params(config: EngineConfig, defaults: GenerationDefaults) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    said = {name: value for name in names if (value := getattr(defaults, name)) is not None}
    if config.generation_config == "off":
        said = {}
    if said:
        log.info("generation_config.applied", **said)
    chosen: dict[str, Any] = said
    try:
        return SamplingParams(**chosen)
    except Refused as error:
        raise ConfigError(f"generation_config.json: {error.message}; start with generation_config = off") from None
