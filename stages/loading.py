"""From a model's name to a device that runs it: files, tokenizer, weights, cache, runner and sampler.

Runs in a thread, once, before the pipeline starts. Imports torch, so it is itself imported only then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..kernels import backend
from ..model import hub
from ..model.cache import KVCache
from ..model.chat import ChatTemplate
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.detokenizer import IncrementalDecoder, TextTable
from ..model.families import is_bidirectional
from ..model.generation import GenerationDefaults
from ..model.pooling import PoolingKind, read_pooling
from ..model.tokenizer import Tokenizer
from ..model.vocabulary import Vocabulary
from ..model.weights import load_weights, without_missing_head
from ..runtime.env import Env
from ..runtime.log import get_logger
from .config import EngineConfig
from .encoder import ModelEncoder
from .encoder_loading import LoadedEncoder, load_encoder
from .errors import ConfigError, Refused
from .grammar.grammars import Grammars
from .grammar.masks import GrammarMasks
from .measuring import check_room_for_weights, sizing_of
from .outputs import ModelInfo
from .params import SamplingParams
from .phases import Phases
from .runner import ModelRunner
from .sampling import Sampler
from .sizing import num_host_blocks
from .trials import make_runner, measure_rates, peak_step_bytes

log = get_logger("millrace.stages")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """All that an engine needs of a model."""

    info: ModelInfo
    tokenizer: Tokenizer
    encoder: ModelEncoder
    text_table: TextTable
    runner: ModelRunner
    sampler: Sampler
    grammars: Grammars

    def make_decoder(self, params: SamplingParams) -> IncrementalDecoder:
        """For an answer, which goes on after its prompt: a space it begins with belongs to it."""
        return IncrementalDecoder(self.text_table, params.skip_special_tokens, continues=True)


def load_model(config: EngineConfig, phases: Phases, env: Env) -> LoadedModel | LoadedEncoder:
    """Blocks for as long as it takes. Raises `ConfigError` for settings, and `ModelError` for a model, that do not
    fit together; each says what would."""
    device = _device(config)
    kernels = backend.load(_backend_name(config, device))
    with phases("resolve"):
        root = hub.resolve(
            config.model,
            revision=config.revision,
            download_dir=Path(config.download_dir) if config.download_dir else None,
            offline=config.offline,
        )
    model_id = config.model or hub.BUNDLED
    if is_bidirectional(root):
        dtype = None if config.dtype == "auto" else _dtype(config, "")
        return load_encoder(config, root, model_id, device, dtype, asked_pooling(config), phases)
    with phases("tokenizer"):
        shape = ModelConfig.read(root)
        if config.load_format != "dummy":
            shape = without_missing_head(root, shape)
        tokenizer = Tokenizer.read(root)
        template = ChatTemplate(config.chat_template, tokenizer) if config.chat_template else None
        encoder = ModelEncoder(tokenizer, template or ChatTemplate.read(root, tokenizer), model_id)
        text_table = TextTable(tokenizer)
        defaults = GenerationDefaults.read(root, shape)
        pooling = read_pooling(root, shape.hidden_size, "last", asked_pooling(config))
    if len(tokenizer) > shape.vocab_size:
        log.warning("tokenizer.larger_than_model", num_tokens=len(tokenizer), vocab_size=shape.vocab_size)
    max_model_len = _max_model_len(config, shape)
    with phases("weights"):
        dtype = _dtype(config, shape.dtype)
        check_room_for_weights(shape, dtype, device)
        load_format = "dummy" if config.load_format == "dummy" else "safetensors"
        weights = load_weights(root, shape, device, dtype, load_format=load_format)
        decoder = Decoder(shape, weights, kernels, max_positions=max_model_len)
    with phases("cache"):
        bytes_per_block = KVCache.bytes_per_block(shape, config.block_size, decoder.dtype)
        host_blocks = num_host_blocks(config, bytes_per_block, max_model_len, device.type)
        measure_step = partial(peak_step_bytes, config, shape, decoder, max_model_len)
        memory = sizing_of(config, shape, decoder, max_model_len, measure_step, host_blocks).plan(max_model_len)
        if memory.max_model_len < max_model_len:  # auto
            max_model_len = memory.max_model_len
            decoder = Decoder(shape, weights, kernels, max_positions=max_model_len)
        runner = make_runner(config, shape, decoder, memory.num_blocks, max_model_len, host_blocks)
    log.info("memory.plan", **memory.to_event(), table=memory.to_text())
    with phases("rates"):
        rates = measure_rates(runner, config, max_model_len, host_blocks, phases.clock) if host_blocks else None
    eos_token_ids = defaults.eos_token_ids or tuple(i for i in (tokenizer.eos_token_id,) if i is not None)
    info = ModelInfo(
        model_id=model_id,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=kernels.name,
        eos_token_ids=eos_token_ids,
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        has_chat_template=encoder.template is not None,
        default_params=_default_params(config, defaults),
        num_host_blocks=host_blocks,
        rates=rates,
        startup_s=phases.seconds,
        memory=memory,
        tasks=frozenset({"generate", "embed"} if shape.has_head else {"embed"}),
        pooling=pooling,
    )
    grammars = Grammars(
        lambda: Vocabulary(
            text_table.bytes, tokenizer.special_ids, eos_token_ids, shape.vocab_size, tokenizer.to_json()
        )
    )
    masks = GrammarMasks(grammars, config.max_num_seqs, shape.vocab_size, env)
    sampler = Sampler(
        runner.last_tokens,
        shape.vocab_size,
        max_model_len,
        eos_token_ids,
        masks,
        runner.pooler,
        logprobs_mode=config.logprobs_mode,
    )
    return LoadedModel(info, tokenizer, encoder, text_table, runner, sampler, grammars)


# -- what the configuration left open


def asked_pooling(config: EngineConfig) -> PoolingKind | None:
    """The pooling that is asked for whatever the checkpoint says."""
    return None if config.pooling == "auto" else config.pooling


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "device = cuda: torch sees no CUDA device; use device = cpu, or install a driver and torch+cu"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)  # NOTE: of the whole process, torch knows no other
    return torch.device("cuda", 0) if has_cuda and config.device != "cpu" else torch.device("cpu")


def _backend_name(config: EngineConfig, device: torch.device) -> backend.BackendName:
    if config.attention_backend != "auto":
        return config.attention_backend
    return "triton" if device.type == "cuda" else "torch"


def _dtype(config: EngineConfig, own: str) -> torch.dtype:
    name = {"auto": own, "half": "float16"}.get(config.dtype, config.dtype)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _max_model_len(config: EngineConfig, shape: ModelConfig) -> int:
    """As it was asked for; for "auto" the most it may become, whatever the memory."""
    longest = shape.max_position_embeddings
    if config.max_model_len == "auto":
        return longest if config.enable_chunked_prefill else min(longest, config.max_num_batched_tokens)
    chosen = longest if config.max_model_len is None else config.max_model_len
    if chosen > longest:
        raise ConfigError(f"max_model_len = {chosen}: the model was made for {longest} tokens; set at most that")
    if chosen < 2:
        raise ConfigError(f"max_model_len = {chosen}: needs at least 2, a token of prompt and one of answer")
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < chosen:
        raise ConfigError(
            f"enable_chunked_prefill = False: a prompt of max_model_len = {chosen} tokens does not fit a step of "
            f"max_num_batched_tokens = {config.max_num_batched_tokens}; raise the one or lower the other"
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
