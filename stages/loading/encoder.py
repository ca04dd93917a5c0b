"""Loads an encoder model, as `model.py` loads a model that generates.

Imports torch, and later transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...model.checkpoint.tokenizer_size import check_tokenizer_file
from ...model.files import read_json
from ...model.pooling import read_pooling
from ...model.sentence_files import PoolingKind, read_sentence_files
from ...model.text.tokenizer import Tokenizer
from ...runtime.env.cpus import ComputeThreads
from ...runtime.env.log import get_logger
from ...runtime.startup.phases import Phases
from ..backends.merged_adapters import refuse_merging
from ..backends.torch.loading import choose_device, probe_of, torch_dtype
from ..config import EngineConfig, resolve_step_size
from ..encode.encoder_runner import EncoderRunner
from ..errors import ConfigError
from ..outputs import ModelInfo
from ..params import SamplingParams
from ..tasks import Task
from ..tokenize.prompt_encoder import ModelEncoder

log = get_logger("millrace.stages")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEncoder:
    """The loaded parts of an encoder model that an engine needs."""

    info: ModelInfo
    tokenizer: Tokenizer
    encoder: ModelEncoder
    runner: EncoderRunner
    probe: Callable[[], object] | None = None  # finds out whether the device is lost; None: it cannot be


def load_encoder(
    config: EngineConfig,
    root: Path,
    model_id: str,
    pooling: PoolingKind | None,
    phases: Phases,
    threads: ComputeThreads,
) -> LoadedEncoder:
    """Loads the encoder model in `root`. Blocks until done; run it in a thread.

    Raises as `load_model` does.
    """
    refuse_merging(config, "is for models that generate, and this one is an encoder")
    if config.load_format == "dummy":
        raise ConfigError("load_format = dummy: must be auto for an encoder model, which has no random weights")
    if config.quantized_to is not None or config.kv_cache_dtype != "auto":
        setting = "kv_cache_dtype" if config.quantized_to is None else "quantization"
        raise ConfigError(
            f"{setting} = {getattr(config, setting)}: is for models that generate; an encoder model runs in its own "
            "dtype and without a KV cache; leave it out, or set dtype = bfloat16"
        )
    device = choose_device(config, threads)
    dtype = None if config.dtype == "auto" else torch_dtype(config, "")
    with phases("tokenizer"):
        files = read_sentence_files(root)
        if files.score_tokens is not None or config.pooling == "yes_no":
            what = "pooling = yes_no" if config.pooling == "yes_no" else f"modules.json ({root}): LogitScore"
            raise ConfigError(f"{what}: is for a model that generates, as Qwen3-Reranker; this one is an encoder")
        model_root = root / files.folder
        vocab_size = (read_json(model_root, "config.json") or {}).get("vocab_size")
        if isinstance(vocab_size, int):
            check_tokenizer_file(model_root, vocab_size)
        tokenizer = Tokenizer.read(model_root, lower_case=files.lower_case)
    with phases("weights"):
        from ...model.encoder.bidirectional import Bidirectional

        model = Bidirectional.load(root, files, device, dtype)
        if not model.allows_padding:
            costs = "padding would change its numbers, so texts of different lengths run one after another"
            log.warning("encoder.unpadded", costs=costs)
    max_model_len = _max_model_len(config, model.max_tokens)
    tasks: frozenset[Task] = frozenset({"score"} if model.is_cross_encoder else {"embed"})
    info = ModelInfo(
        model_id=model_id,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        attention_backend="transformers",
        model_impl="transformers",
        eos_token_ids=(),
        num_blocks=0,
        block_size=config.block_size,
        has_chat_template=False,
        default_params=SamplingParams(),
        max_num_batched_tokens=resolve_step_size(config, is_native=False).num_step_tokens,
        startup_s=phases.seconds,
        tasks=tasks,
        pooling=None if model.is_cross_encoder else read_pooling(root, files, model.embedding_size, "mean", pooling),
    )
    encoder = ModelEncoder(tokenizer, None, model_id, files.default_prompt)
    return LoadedEncoder(info, tokenizer, encoder, EncoderRunner(model, device), probe_of(device))


def _max_model_len(config: EngineConfig, longest: int) -> int:
    if config.max_model_len in (None, "auto"):
        return longest
    assert isinstance(config.max_model_len, int)
    if config.max_model_len > longest:
        raise ConfigError(f"max_model_len = {config.max_model_len}: must be at most {longest}, the model's maximum")
    return config.max_model_len
