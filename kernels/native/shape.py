"""The sizes of a decoder for the native library, and the types of its arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import UnsupportedModelError

Array = NDArray[Any]
Floats = NDArray[np.float32]
Longs = NDArray[np.int64]
Ints = NDArray[np.int32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
DType = Literal["float32", "bfloat16"]
CacheDType = Literal["float32", "bfloat16", "int8"]
Quantization = Literal["int8", "int4"]

CACHE_TYPES: dict[CacheDType, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
_MAX_HEAD_DIM = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeShape:
    """The sizes of a decoder. Supported: Llama 2 and 3, Mistral, Qwen2, Qwen2.5, Qwen3."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rotary_dim: int  # rotated elements of a head, from its start
    rms_norm_eps: float
    sliding_windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    is_tied: bool  # the head is the embedding
    has_head: bool = True

    def check(self) -> None:
        """Raises UnsupportedModelError for sizes that the library does not support."""
        even = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_heads * head_dim": self.num_heads * self.head_dim,
            "head_dim": self.head_dim,
        }
        for name, size in even.items():
            if size % 2:
                raise UnsupportedModelError(f"{name} = {size}: must be even for the native step")
        if self.head_dim > _MAX_HEAD_DIM:
            raise UnsupportedModelError(f"head_dim = {self.head_dim}: the native step takes at most {_MAX_HEAD_DIM}")

    def bytes_per_block(self, block_size: int, dtype: CacheDType) -> int:
        """Memory of one cache block: all layers, keys and values.

        Heads are padded to a multiple of 16 numbers; in int8 each token's head has a scale of two bytes.
        """
        padded = -(-self.head_dim // 16) * 16
        head = padded * np.dtype(CACHE_TYPES[dtype]).itemsize + (2 if dtype == "int8" else 0)
        return 2 * self.num_layers * self.num_kv_heads * block_size * head
