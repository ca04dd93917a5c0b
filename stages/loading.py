"""From a model's name to a device that runs it: files, tokenizer, weights, cache, runner and sampler.

Runs in a thread, once, before the pipeline starts. Imports torch, so it is itself imported only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..kernels import backend
from ..model import hub
from ..model.cache import KVCache
from ..model.chat import ChatTemplate
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.detokenizer import IncrementalDecoder, TextTable
from ..model.generation import GenerationDefaults
from ..model.tokenizer import Tokenizer
from ..model.weights import load_weights
from ..runtime.log import get_logger
from .config import EngineConfig
from .encoder import ModelEncoder
from .errors import ConfigError, Refused
from .host import Rates
from .memory import cpu_room_bytes, num_blocks, num_host_blocks
from .messages import BlockCopy, Direction, Started, StepGrant
from .outputs import ModelInfo
from .params import SamplingParams
from .phases import Phases
from .runner import ModelRunner
from .sampling import Sampler

SWAP_GIB_CPU, SWAP_GIB_GPU = 1.0, 4.0  # of host memory for preempted sequences, if nobody says
RATE_TOKENS = 64  # of the prompt that shows how fast the model computes one
LOGITS_COPIES_BYTES = 14  # a logit: as the model gives it, and up to three copies in float32 while tokens are chosen

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

    def make_decoder(self, params: SamplingParams) -> IncrementalDecoder:
        """For an answer, which goes on after its prompt: a space it begins with belongs to it."""
        return IncrementalDecoder(self.text_table, params.skip_special_tokens, continues=True)


def load_model(config: EngineConfig, phases: Phases) -> LoadedModel:
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
    with phases("tokenizer"):
        shape = ModelConfig.read(root)
        tokenizer = Tokenizer.read(root)
        template = ChatTemplate(config.chat_template, tokenizer) if config.chat_template else None
        encoder = ModelEncoder(tokenizer, template or ChatTemplate.read(root, tokenizer), model_id)
        text_table = TextTable(tokenizer)
        defaults = GenerationDefaults.read(root, shape)
    if len(tokenizer) > shape.vocab_size:
        log.warning("tokenizer.larger_than_model", num_tokens=len(tokenizer), vocab_size=shape.vocab_size)
    max_model_len = _max_model_len(config, shape)
    with phases("weights"):
        dtype = _dtype(config, shape)
        load_format = "dummy" if config.load_format == "dummy" else "safetensors"
        weights = load_weights(root, shape, device, dtype, load_format=load_format)
        decoder = Decoder(shape, weights, kernels, max_positions=max_model_len)
    with phases("cache"):
        blocks = _num_blocks(config, shape, decoder, max_model_len)
        bytes_per_block = KVCache.bytes_per_block(shape, config.block_size, decoder.dtype)
        default_gib = SWAP_GIB_GPU if device.type == "cuda" else SWAP_GIB_CPU
        host_blocks = num_host_blocks(config, bytes_per_block, max_model_len, default_gib)
        runner = _runner(config, shape, decoder, blocks, max_model_len, host_blocks)
    with phases("rates"):
        rates = measure_rates(runner, config, max_model_len, phases.clock) if host_blocks else None
    eos_token_ids = defaults.eos_token_ids or tuple(i for i in (tokenizer.eos_token_id,) if i is not None)
    info = ModelInfo(
        model_id=model_id,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention_backend=kernels.name,
        eos_token_ids=eos_token_ids,
        num_blocks=blocks,
        block_size=config.block_size,
        has_chat_template=encoder.template is not None,
        default_params=_default_params(config, defaults),
        num_host_blocks=host_blocks,
        rates=rates,
        startup_s=phases.seconds,
    )
    sampler = Sampler(runner.last_tokens, shape.vocab_size, max_model_len, eos_token_ids)
    return LoadedModel(info, tokenizer, encoder, text_table, runner, sampler)


# -- what the configuration left open


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


def _dtype(config: EngineConfig, shape: ModelConfig) -> torch.dtype:
    name = {"auto": shape.dtype, "half": "float16"}.get(config.dtype, config.dtype)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _max_model_len(config: EngineConfig, shape: ModelConfig) -> int:
    longest = shape.max_position_embeddings
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


# -- memory


def _runner(
    config: EngineConfig, shape: ModelConfig, decoder: Decoder, blocks: int, max_model_len: int, host_blocks: int = 0
) -> ModelRunner:
    cache = KVCache(shape, blocks, config.block_size, decoder.dtype, decoder.device)
    last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=decoder.device)
    return ModelRunner(decoder, cache, last_tokens, -(-max_model_len // config.block_size), host_blocks)


def _num_blocks(config: EngineConfig, shape: ModelConfig, decoder: Decoder, max_model_len: int) -> int:
    bytes_per_block = KVCache.bytes_per_block(shape, config.block_size, decoder.dtype)
    room = 0
    if config.num_gpu_blocks is None and config.kv_cache_bytes is None:
        if decoder.device.type == "cpu":
            room = cpu_room_bytes()
        else:
            room = _gpu_room_bytes(config, shape, decoder, max_model_len)
    return num_blocks(config, bytes_per_block, max_model_len, room)


def _gpu_room_bytes(config: EngineConfig, shape: ModelConfig, decoder: Decoder, max_model_len: int) -> int:
    """What is left of our share of the device after the weights, and after what the largest step needs on its way."""
    step_bytes = _peak_step_bytes(config, shape, decoder, max_model_len)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(decoder.device)
    logits_bytes = config.max_num_seqs * shape.vocab_size * LOGITS_COPIES_BYTES
    return int(total * config.gpu_memory_utilization) - (total - free) - step_bytes - logits_bytes


def _peak_step_bytes(config: EngineConfig, shape: ModelConfig, decoder: Decoder, max_model_len: int) -> int:
    """Runs the largest step on a cache of its own and sees what it took besides."""
    grant = largest_grant(config, max_model_len)
    runner = _runner(config, shape, decoder, len(grant.table_blocks), max_model_len)
    torch.cuda.synchronize(decoder.device)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    before = torch.cuda.memory_allocated(decoder.device)
    runner.forward(grant)
    torch.cuda.synchronize(decoder.device)
    return torch.cuda.max_memory_allocated(decoder.device) - before


def measure_rates(runner: ModelRunner, config: EngineConfig, max_model_len: int, clock: Callable[[], float]) -> Rates:
    """How long a block takes to the host, and a token of a prompt to compute; each the better of two runs."""
    num_tokens = min(RATE_TOKENS, max_model_len - 1, config.max_num_batched_tokens)
    prompt = prompts_grant([num_tokens], config.block_size)
    assert runner.host_blocks is not None
    num_copied = min(len(prompt.table_blocks), config.num_cpu_blocks or len(prompt.table_blocks))
    blocks = np.arange(num_copied, dtype=np.int32)
    copies = tuple(BlockCopy(direction, blocks, blocks) for direction in (Direction.OUT, Direction.IN))
    nothing = replace(prompts_grant([], config.block_size), copies=copies)
    compute_s, copy_s = (min(_seconds(runner, grant, clock) for _ in range(2)) for grant in (prompt, nothing))
    return Rates(copy_s / (2 * num_copied), compute_s / num_tokens)


def _seconds(runner: ModelRunner, grant: StepGrant, clock: Callable[[], float]) -> float:
    began = clock()
    runner.forward(grant)
    if runner.device.type != "cpu":
        torch.cuda.synchronize(runner.device)
    return clock() - began


def largest_grant(config: EngineConfig, max_model_len: int) -> StepGrant:
    """A step of max_num_batched_tokens: prompts of token 0, as long as may be."""
    whole, rest = divmod(config.max_num_batched_tokens, max_model_len - 1)
    lengths = [max_model_len - 1] * whole + ([rest] if rest else [])
    return prompts_grant(lengths[: config.max_num_seqs], config.block_size)


def prompts_grant(lengths: list[int], block_size: int) -> StepGrant:
    """A step that computes prompts of token 0 and of these lengths, in blocks from 0 on."""
    blocks = [-(-length // block_size) for length in lengths]
    slots = np.arange(len(lengths))
    params = SamplingParams(max_tokens=1)
    return StepGrant(
        step=0,
        generation=0,
        slots=slots,
        starts=np.zeros(len(lengths), np.int32),
        num_tokens=np.array(lengths, np.int32),
        is_sampled=np.ones(len(lengths), np.bool_),
        table_slots=np.repeat(slots, np.array(blocks, np.intp)),
        table_places=np.concatenate([np.arange(count) for count in (0, *blocks)]),
        table_blocks=np.arange(sum(blocks), dtype=np.int32),
        started=tuple(
            Started(slot, slot, "largest", np.zeros(length, np.int32), length, params, seed=0)
            for slot, length in enumerate(lengths)
        ),
    )
