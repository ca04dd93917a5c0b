"""A decoder's weights as torch tensors: fused, and copied to the device tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checkpoint.safetensors import BFLOAT16
from ..checkpoint.tensor_shapes import TensorSource, expected_shapes, open_source
from ..config import ModelConfig
from ..errors import CheckpointError
from .linear import Linear, linear_form

Progress = Callable[[int, int], None]  # bytes done, bytes in total


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One transformer layer. Norm weights are [hidden]; those of heads are [head_dim]."""

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
        """Every tensor held in memory; some share memory."""
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
    *,
    is_batch_invariant: bool = False,
    free_bytes: int | None = None,
) -> DecoderWeights:
    """The weights of the checkpoint in `root`; with load_format "dummy" seeded random weights, without reading a file.

    Raises CheckpointError naming file and tensor for a missing, extra, misshapen or non-finite tensor. `on_progress` is
    called after each tensor. With `is_batch_invariant` a row's products do not depend on the other rows, see
    `EvenLinear`. `free_bytes` is the device's free memory before loading, which limits larger, faster forms; None = no
    limit.
    """
    source, config = open_source(root, config, load_format)
    loader = _Loader(source, config, expected_shapes(config), device, dtype, on_progress)
    num_weights = loader.total_bytes // dtype.itemsize
    loader.form = linear_form(device, dtype, num_weights, free_bytes, is_batch_invariant=is_batch_invariant)
    return loader.load()


class _Loader:
    """Builds the layers in order, so that only one fused tensor at a time exists besides the result."""

    def __init__(
        self,
        source: TensorSource,
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
        self.form: Callable[..., Linear] = Linear

    def load(self) -> DecoderWeights:
        embedding = self._tensor("model.embed_tokens.weight")
        layers = tuple(self._layer(f"model.layers.{index}") for index in range(self.config.num_layers))
        has_own_head = self.config.has_head and not self.config.tie_word_embeddings
        head = self._linear("lm_head") if has_own_head else self.form(embedding)  # a missing head is never used
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
        """Several projections of one input as one `Linear`: their rows concatenated."""
        has_bias = f"{names[0]}.bias" in self.shapes
        weight = self._tensor(*(f"{name}.weight" for name in names))
        return self.form(weight, self._tensor(*(f"{name}.bias" for name in names)) if has_bias else None)

    def _tensor(self, *names: str) -> Tensor:
        """One tensor of the checkpoint, or several joined along their rows, on the device in the model's dtype."""
        num_rows = sum(self.shapes[name][0] for name in names)
        joined = torch.empty((num_rows, *self.shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, joined.split_with_sizes([self.shapes[name][0] for name in names]), strict=True):
            part.copy_(_as_tensor(self.source.array(name)))
            self.source.forget(name)
            if not all(map(math.isfinite, torch.stack(torch.aminmax(part)).tolist())):
                raise CheckpointError(f"tensor {name}: holds NaN or infinity as {self.dtype}; fetch the file again")
            self.done_bytes += part.numel() * part.element_size()
            if self.on_progress is not None:
                self.on_progress(self.done_bytes, self.total_bytes)
        return joined


def _as_tensor(array: NDArray[Any]) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor
