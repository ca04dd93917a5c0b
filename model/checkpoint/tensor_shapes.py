"""Checks that a decoder's checkpoint holds the expected tensors: names and shapes. No torch.

A wrong checkpoint fails here, before any weight is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import CheckpointError
from .safetensors import Checkpoint

Shapes = dict[str, tuple[int, ...]]  # by name

PART = 1 << 22  # numbers of a random tensor that one thread draws at a time
NOT_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)")  # in old checkpoints


class TensorSource(Protocol):
    """A source of tensors by name: a checkpoint, or random numbers."""

    def is_mapped(self, name: str) -> bool:
        """Whether the tensor's array is a view of a file's private map, which takes no memory before it is read."""

    def array(self, name: str) -> NDArray[Any]:
        """The tensor; bfloat16 has the dtype `safetensors.BFLOAT16`. Do not write to it."""

    def forget(self, name: str) -> None:
        """Releases the tensor's memory, once it is copied."""


def open_source(root: Path, config: ModelConfig, load_format: str) -> TensorSource:
    """The checkpoint in `root`; with load_format "dummy" seeded random numbers, without reading a file.

    "auto" is "safetensors". Raises CheckpointError naming file and tensor for a missing, extra or misshapen tensor.
    """
    shapes = expected_shapes(config)
    if load_format == "dummy":
        return _RandomTensors(shapes)
    if load_format not in ("auto", "safetensors"):
        raise ValueError(f"load_format = {load_format!r}: must be 'safetensors' or 'dummy'")
    checkpoint = _open(root)
    _compare(checkpoint, shapes, config)
    return checkpoint


def without_missing_head(root: Path, config: ModelConfig) -> ModelConfig:
    """`config`, with `has_head` False if the model was saved without its output layer, as embedding models are.

    Raises CheckpointError for a checkpoint that cannot be opened.
    """
    if config.tie_word_embeddings:
        return config
    return replace(config, has_head="embed_tokens.weight" not in Checkpoint(root).names)


def _open(root: Path) -> Checkpoint:
    """The checkpoint with the names of a whole model, also if it was saved without the prefix `model.`."""
    checkpoint = Checkpoint(root)
    return Checkpoint(root, prefix="model.") if "embed_tokens.weight" in checkpoint.names else checkpoint


def expected_shapes(config: ModelConfig) -> Shapes:
    """The name and shape of every tensor that a checkpoint of this configuration must hold."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

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
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class _RandomTensors:
    """Random tensors in place of a checkpoint: N(0, 0.02), norms 1. A tensor's values depend on its name alone."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

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
            list(threads.map(partial(_draw, name), range(len(parts)), parts))
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
    root = checkpoint.root
    for name in shapes:
        if name not in checkpoint.names:
            raise CheckpointError(f"{root}: tensor {name} is missing, which config.json ({config.model_type}) requires")
        if checkpoint.shape(name) != shapes[name]:
            raise CheckpointError(
                f"{checkpoint.where(name)} ({root}): tensor {name} is {list(checkpoint.shape(name))}, "
                f"and config.json requires {list(shapes[name])}"
            )
    for name in _unexpected(checkpoint, shapes, config):
        raise CheckpointError(
            f"{checkpoint.where(name)} ({root}): tensor {name} is not part of a {config.model_type} model as "
            "config.json describes it; the output would be wrong without it"
        )


def _unexpected(checkpoint: Checkpoint, shapes: Shapes, config: ModelConfig) -> Iterator[str]:
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in sorted(checkpoint.names - shapes.keys() - tied):
        if not NOT_WEIGHTS.fullmatch(name):
            yield name
