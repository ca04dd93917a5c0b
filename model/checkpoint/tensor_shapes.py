"""Checks that a decoder's checkpoint holds the expected tensors: names and shapes. No torch.

A wrong checkpoint fails here, before any weight is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import CheckpointError, quoted, shown
from .safetensors import BFLOAT16, DTYPES, Checkpoint

Shapes = dict[str, tuple[int, ...]]  # by name

PART = 1 << 22  # numbers of a random tensor that one thread draws at a time
NOT_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)")  # in old checkpoints
LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,9})\.")
DTYPE_OF = {"F16": "float16", "BF16": "bfloat16"}  # of weights -> of config.json, which names none; else float32
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorSource(Protocol):
    """A source of tensors by name: a checkpoint, or random numbers."""

    warnings: list[str]  # what is unusual about the files

    def is_mapped(self, name: str) -> bool:
        """Whether the tensor's array is a view of a file's private map, which takes no memory before it is read."""

    def array(self, name: str) -> NDArray[Any]:
        """The tensor; bfloat16 has the dtype `safetensors.BFLOAT16`. Do not write to it."""

    def forget(self, name: str) -> None:
        """Releases the tensor's memory, once it is copied."""


def open_source(root: Path, config: ModelConfig, load_format: str) -> tuple[TensorSource, ModelConfig]:
    """The checkpoint in `root`, and `config` with the output layer that its files hold.

    With load_format "dummy" it is seeded random numbers, without reading a file; "auto" is "safetensors". Raises
    CheckpointError naming file and tensor for a missing, extra or misshapen tensor, before any weight is read.
    """
    if load_format == "dummy":
        config = replace(config, dtype="float32") if config.dtype == "auto" else config
        return _RandomTensors(expected_shapes(config)), config
    if load_format not in ("auto", "safetensors"):
        raise ValueError(f"load_format = {load_format!r}: must be 'safetensors' or 'dummy'")
    checkpoint = Checkpoint(root)
    _check_layers(checkpoint, config)
    is_bare = "embed_tokens.weight" in checkpoint.names  # saved without the model around the decoder
    checkpoint.rename(_name_in_model)
    config = _with_stored_head(checkpoint, config, is_bare=is_bare)
    _compare(checkpoint, expected_shapes(config), config)
    if config.dtype == "auto":
        config = replace(config, dtype=DTYPE_OF.get(checkpoint.dtype(EMBEDDING), "float32"))
    return checkpoint, config


def output_rows(root: Path, config: ModelConfig, load_format: str, rows: Sequence[int]) -> NDArray[np.float32]:
    """Rows [R, H] of the output layer, as they are before any quantization. `config` is that of `open_source`."""
    name, other = (EMBEDDING, HEAD) if config.tie_word_embeddings else (HEAD, EMBEDDING)
    if load_format == "dummy":
        return np.asarray(_RandomTensors(expected_shapes(config)).array(name)[list(rows)], np.float32)
    checkpoint = Checkpoint(root)
    checkpoint.rename(_name_in_model)
    stored = checkpoint.array(name if name in checkpoint.names else other)[list(rows)]
    if stored.dtype == BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _name_in_model(name: str) -> str:
    """The name of a tensor in a whole model. As in transformers, the prefix `model.` may be there or not."""
    if name.partition(".")[0] in ("embed_tokens", "layers", "norm"):
        return f"model.{name}"
    return name.removeprefix("model.") if name.startswith("model.lm_head.") else name


def _check_layers(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises CheckpointError if the files hold another number of layers, before anything is made for each layer."""
    found = {int(match[1]) for match in map(LAYER.match, checkpoint.names) if match}
    num_layers = max(found, default=-1) + 1
    if num_layers != config.num_layers:
        raise CheckpointError(
            f"config.json ({checkpoint.root}): num_hidden_layers: must be {num_layers}, as many as the files hold, "
            f"not {config.num_layers}"
        )


def _with_stored_head(checkpoint: Checkpoint, config: ModelConfig, *, is_bare: bool) -> ModelConfig:
    """`config` with the output layer that the files hold: of the embedding, of its own, or none.

    As in transformers, tensors that differ are both used, even if `tie_word_embeddings` says that they are one, and
    each replaces the other if that is missing. Only a decoder saved by itself, as embedding models are, has none.
    """
    has_embedding, has_head = EMBEDDING in checkpoint.names, HEAD in checkpoint.names
    if not config.tie_word_embeddings:
        return replace(config, has_head=has_head or not is_bare)
    if has_head and not has_embedding:
        checkpoint.share(EMBEDDING, HEAD)
    if not (has_head and has_embedding) or _are_equal(checkpoint, EMBEDDING, HEAD):
        return config
    checkpoint.warnings.append(
        f"config.json: tie_word_embeddings = true, but {HEAD} in {checkpoint.where(HEAD)} differs from "
        f"{EMBEDDING}: both are used, as by transformers"
    )
    return replace(config, tie_word_embeddings=False)


def _are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors hold the same numbers. Reads both, up to the first difference."""
    kinds = [(checkpoint.shape(name), checkpoint.dtype(name)) for name in (first, second)]
    if kinds[0] != kinds[1] or kinds[0][1] not in DTYPES:
        return False
    one, other = (checkpoint.array(name).reshape(-1).view(np.uint8) for name in (first, second))
    are_equal = all(
        np.array_equal(one[begin : begin + PART], other[begin : begin + PART]) for begin in range(0, len(one), PART)
    )
    checkpoint.forget(second)
    return are_equal


def expected_shapes(config: ModelConfig) -> Shapes:
    """The name and shape of every tensor that a checkpoint of this configuration must hold."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)

    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", heads, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_heads, hidden, config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_heads, hidden, config.qkv_bias)
        if config.has_qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        linear(f"{layer}.self_attn.o_proj", hidden, heads, config.output_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if config.has_head and not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


class _RandomTensors:
    """Random tensors in place of a checkpoint: N(0, 0.02), norms 1. A tensor's values depend on its name alone."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.warnings: list[str] = []

    def is_mapped(self, name: str) -> bool:
        return False

    def array(self, name: str) -> NDArray[Any]:
        if name.endswith("norm.weight"):
            return np.ones(self.shapes[name], np.float32)
        numbers = np.empty(self.shapes[name], np.float32)
        flat = numbers.reshape(-1)
        parts = [flat[begin : begin + PART] for begin in range(0, len(flat), PART)]
        if len(parts) <= 1:
            _draw(name, 0, flat)
            return numbers
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as threads:  # numpy draws without the GIL
            try:
                drawn = threads.map(partial(_draw, name), range(len(parts)), parts)
            except RuntimeError:  # no threads: one part after the other
                threads.shutdown(cancel_futures=True)
                drawn = map(partial(_draw, name), range(len(parts)), parts)
            list(drawn)
        return numbers

    def forget(self, name: str) -> None:
        pass


def _draw(name: str, index: int, part: NDArray[np.float32]) -> None:
    """Fills part `index` of the tensor `name`."""
    text = name if index == 0 else f"{name} {index}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    np.random.Generator(np.random.SFC64(seed)).standard_normal(dtype=np.float32, out=part)
    part *= np.float32(0.02)


def _compare(checkpoint: Checkpoint, shapes: Shapes, config: ModelConfig) -> None:
    """Raises CheckpointError if the checkpoint's tensors are not those of its configuration."""
    root, names = checkpoint.root, checkpoint.names
    for name, shape in shapes.items():
        if name not in names:
            raise CheckpointError(f"{root}: tensor {name} is missing, which config.json ({config.model_type}) requires")
        source = f"{checkpoint.where(name)} ({root}): tensor {name}"
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{source} is {quoted(list(checkpoint.shape(name)))}, and config.json requires {list(shape)}: "
                f"{_sizes(name, config)}"
            )
        if checkpoint.dtype(name) not in DTYPES:
            raise CheckpointError(
                f"{source}: dtype {checkpoint.dtype(name)} is not supported; supported: {', '.join(DTYPES)}"
            )
    ignored = []
    for name in sorted(names - shapes.keys() - {HEAD}):  # a head that is not used is equal to the embedding
        if _is_weight(checkpoint, name):
            raise CheckpointError(
                f"{checkpoint.where(name)} ({root}): tensor {shown(name)} is not part of a {config.model_type} model "
                f"as config.json describes it{_reason(name, config)}; the output would be wrong without it"
            )
        if not NOT_WEIGHTS.fullmatch(name):
            ignored.append(shown(name))
    if ignored:
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        checkpoint.warnings.append(f"tensors that no text is made with are not used: {', '.join(ignored[:3])}{more}")


def _is_weight(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor seems to be of the decoder: other heads and buffers of whole numbers are not."""
    if NOT_WEIGHTS.fullmatch(name) or 0 in checkpoint.shape(name):
        return False
    return name.startswith(("model.", "lm_head.")) and checkpoint.dtype(name).startswith(("F", "BF"))


def _sizes(name: str, config: ModelConfig) -> str:
    """The keys of config.json from which the shape of a tensor follows, with their values."""
    values = {
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_size": config.hidden_size,
    }
    kind = name.split(".")[-2]
    keys = next((keys for kinds, keys in SIZES_OF.items() if kind in kinds.split()), ["hidden_size"])
    return ", ".join(f"{key} = {values[key]}" for key in keys)


def _reason(name: str, config: ModelConfig) -> str:
    """The key of config.json that rules out a bias, if there is one."""
    if not name.endswith(".bias"):
        return ""
    key = "mlp_bias" if ".mlp." in name else "attention_bias"
    return f" ({key} = false)" if config.model_type in ("llama", "qwen3") else ""


SIZES_OF = {  # parts of a decoder -> keys of the sizes of their weights
    "embed_tokens lm_head": ["vocab_size", "hidden_size"],
    "q_proj o_proj": ["num_attention_heads", "head_dim", "hidden_size"],
    "k_proj v_proj": ["num_key_value_heads", "head_dim", "hidden_size"],
    "q_norm k_norm": ["head_dim"],
    "gate_proj up_proj down_proj": ["intermediate_size", "hidden_size"],
}
