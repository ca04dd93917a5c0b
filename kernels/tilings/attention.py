"""Shapes and measured launch options of the attention kernels.

A shape is one size of step: options depend on its rows, never on lengths, as a CUDA graph serves any.
`kernels/layout/attention_tilings.py` has the options where none were measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheName = Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]
AttentionKind = Literal["decode", "extend"]
SMALLEST_ROWS = 16  # of a tile of matrix instructions
MOST_MIN_TILES = 64  # more leave programs without work in any step
ITEM_BYTES: dict[CacheName, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What attention options depend on, and the most rows of queries that they are for."""

    group: int  # query heads of a key/value head
    head_dim: int
    num_rows: int  # sequences in decode, tokens of the step in extend
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    cache_dtype: CacheName = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("group", "head_dim", "num_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiling:
    """How an attention kernel is launched: the fields of `Tiling`."""

    block_m: int  # query rows: tokens x heads of a group
    block_n: int  # cached tokens of a loop step
    num_warps: int
    num_stages: int
    occupancy: int  # programs launched for each multiprocessor
    min_tiles: int | None = None  # of a program's stretch of a list of work, at least; None: by the number of rows

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} = {value}: must be a power of two")
        for name, most in (("num_warps", 16), ("num_stages", 8), ("occupancy", 8)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 to {most}")
        if self.min_tiles is not None and not 1 <= self.min_tiles <= MOST_MIN_TILES:
            raise ValueError(f"min_tiles = {self.min_tiles}: must be 1 to {MOST_MIN_TILES}, or null")

    def least_bytes(self, shape: StepShape) -> int:
        """Shared memory that a program takes at least: its queries, and the tiles that are on their way to it."""
        width = 1 << (shape.head_dim - 1).bit_length()
        tiles = 2 * (self.num_stages - 1) * self.block_n * ITEM_BYTES[shape.cache_dtype]
        return width * (self.block_m * ITEM_BYTES[shape.dtype] + tiles)

    def check(self, shape: StepShape) -> None:
        """Raises ValueError if the tiling cannot run attention of this shape."""
        least = max(SMALLEST_ROWS, shape.group)
        if self.block_m < least or self.block_n < SMALLEST_ROWS:
            raise ValueError(
                f"block_m, block_n = {self.block_m}, {self.block_n}: must be at least {least}, {SMALLEST_ROWS} "
                f"with group = {shape.group}"
            )
