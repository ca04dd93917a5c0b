"""A decoder's weights: checked against its configuration, fused, and moved to the device tensor by tensor.

Nothing is loaded before every name and shape is right, so a wrong checkpoint fails at once.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .config import ModelConfig
from .errors import CheckpointError
from .linear import Linear, linear_form
from .shards import Checkpoint

Progress = Callable[[int, int], None]  # bytes done, bytes in all

NOT_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)")  # in old ones


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One transformer layer. Norm weights are [hidden] or, for heads, [head_dim]."""

    input_norm: Tensor
    qkv: Linear  # hidden -> (H + 2 G) * D: queries, keys, values
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear  # H * D -> hidden
    post_norm: Tensor
    gate_up: Linear  # hidden -> 2 F: gate, up
    down: Linear  # F -> hidden


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of a decoder, on one device, in one dtype."""

    embedding: Tensor  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Linear  # hidden -> V; shares the embedding's memory when tied and not packed

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory; some share it."""
        yield from (self.embedding, self.final_norm, *self.head.tensors())
        for layer in self.layers:
            yield from (layer.input_norm, layer.post_norm)
            yield from (norm for norm in (layer.q_norm, layer.k_norm) if norm is not None)
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                yield from linear.tensors()


def load_weights(
    root: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "safetensors",
    on_progress: Progress | None = None,
) -> DecoderWeights:
    """The weights of the checkpoint in `root`; with load_format "dummy", seeded random ones and no file is read.

    Raises CheckpointError naming file and tensor for a missing, extra, misshapen or non-finite tensor.
    `on_progress` is called after each tensor.
    """
    shapes = expected_shapes(config)
    source: _Source
    if load_format == "dummy":
        source = _RandomTensors(shapes)
    elif load_format == "safetensors":
        source = _open(root)
        _compare(source, shapes, config)
    else:
        raise ValueError(f"load_format = {load_format!r}: must be 'safetensors' or 'dummy'")
    return _Loader(source, config, shapes, device, dtype, on_progress).load()


def without_missing_head(root: Path, config: ModelConfig) -> ModelConfig:
    """`config`, or for a model that was saved without an output layer, as those that only embed are, one that says so.
    Raises CheckpointError as `load_weights` does."""
    if config.tie_word_embeddings:
        return config
    return replace(config, has_head="embed_tokens.weight" not in Checkpoint(root).names)


def _open(root: Path) -> Checkpoint:
    """The checkpoint, with the names of a whole model, whichever it was saved with."""
    checkpoint = Checkpoint(root)
    return Checkpoint(root, prefix="model.") if "embed_tokens.weight" in checkpoint.names else checkpoint


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this configuration must hold."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

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


class _Source(Protocol):
    def tensor(self, name: str) -> Tensor: ...


class _Loader:
    """Builds the layers in order, so that beside the result only one fused tensor exists at a time."""

    def __init__(
        self,
        source: _Source,
        config: ModelConfig,
        shapes: dict[str, tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
        on_progress: Progress | None,
    ) -> None:
        self.source, self.config, self.shapes = source, config, shapes
        self.device, self.dtype = device, dtype
        self.on_progress = on_progress
        self.total_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        self.done_bytes = 0
        self.form = linear_form(device, dtype, self.total_bytes // dtype.itemsize)

    def load(self) -> DecoderWeights:
        embedding = self._tensor("model.embed_tokens.weight")
        layers = tuple(self._layer(f"model.layers.{index}") for index in range(self.config.num_layers))
        has_own_head = self.config.has_head and not self.config.tie_word_embeddings
        head = self._linear("lm_head") if has_own_head else self.form(embedding)  # nobody asks a missing one
        return DecoderWeights(embedding, layers, self._tensor("model.norm.weight"), head)

    def _layer(self, layer: str) -> LayerWeights:
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        return LayerWeights(
            input_norm=self._tensor(f"{layer}.input_layernorm.weight"),
            qkv=self._linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            q_norm=self._tensor(f"{attention}.q_norm.weight") if self.config.has_qk_norm else None,
            k_norm=self._tensor(f"{attention}.k_norm.weight") if self.config.has_qk_norm else None,
            output=self._linear(f"{attention}.o_proj"),
            post_norm=self._tensor(f"{layer}.post_attention_layernorm.weight"),
            gate_up=self._linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self._linear(f"{mlp}.down_proj"),
        )

    def _linear(self, *names: str) -> Linear:
        """Several projections of one input as one: their rows under each other."""
        has_bias = f"{names[0]}.bias" in self.shapes
        weight = self._tensor(*(f"{name}.weight" for name in names))
        return self.form(weight, self._tensor(*(f"{name}.bias" for name in names)) if has_bias else None)

    def _tensor(self, *names: str) -> Tensor:
        """One tensor of the checkpoint, or several joined along their rows, on the device in the model's dtype."""
        num_rows = sum(self.shapes[name][0] for name in names)
        joined = torch.empty((num_rows, *self.shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, joined.split_with_sizes([self.shapes[name][0] for name in names]), strict=True):
            part.copy_(self.source.tensor(name))
            if not all(map(math.isfinite, torch.stack(torch.aminmax(part)).tolist())):
                raise CheckpointError(f"tensor {name}: holds NaN or infinity as {self.dtype}; fetch the file again")
            self.done_bytes += part.numel() * part.element_size()
            if self.on_progress is not None:
                self.on_progress(self.done_bytes, self.total_bytes)
        return joined


class _RandomTensors:
    """Stands in for a checkpoint: N(0, 0.02), norms 1; each tensor's values depend on its name alone."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def tensor(self, name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(self.shapes[name])
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
        return torch.empty(self.shapes[name]).normal_(0.0, 0.02, generator=generator)


def _compare(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Raise CheckpointError if the checkpoint's tensors are not those its configuration asks for."""
    root = checkpoint.root
    for name in shapes:
        if name not in checkpoint.names:
            raise CheckpointError(f"{root}: tensor {name} is missing, which config.json ({config.model_type}) asks for")
        if checkpoint.shape(name) != shapes[name]:
            raise CheckpointError(
                f"{checkpoint.where(name)} ({root}): tensor {name} is {list(checkpoint.shape(name))}, "
                f"and config.json asks for {list(shapes[name])}"
            )
    for name in _unexpected(checkpoint, shapes, config):
        raise CheckpointError(
            f"{checkpoint.where(name)} ({root}): tensor {name} is not part of a {config.model_type} model as "
            "config.json describes it; the output would be wrong without it"
        )


def _unexpected(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> Iterator[str]:
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in sorted(checkpoint.names - shapes.keys() - tied):
        if not NOT_WEIGHTS.fullmatch(name):
            yield name
