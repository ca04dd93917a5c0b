"""Shapes and launch options of the grouped products of experts.

A product is that of rows in tiles, each of one expert, with the expert's weight: x [M, K] @ weight[e] [N, K].T. Options
depend on the number of pairs of a step, never on where its tokens go, as a CUDA graph serves any routing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .products import ITEM_BYTES, SHARED_BYTES, SMALLEST_TILE, DtypeName

ExpertProduct = Literal["gate_up", "down"]
FEW_PAIRS, MANY_PAIRS = 12, 40  # of an expert on average: up to so many, and from so many on


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """A grouped product, and the most pairs of token and expert that options are for."""

    num_experts: int
    num_outputs: int  # N, results of a row: half of the weight's rows if gated
    num_inner: int  # K
    num_pairs: int
    product: ExpertProduct = "gate_up"
    is_gated: bool = True  # of gate_up: the weight has 2N rows
    dtype: DtypeName = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_outputs", "num_inner", "num_pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")

    @property
    def num_halves(self) -> int:
        """Numbers of the weight's product that make one result."""
        return 2 if self.product == "gate_up" and self.is_gated else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiling:
    """How a grouped product is launched: a program has [block_m, block_n] of the result of one expert."""

    block_m: int  # rows; the two products of a layer share them
    block_n: int
    block_k: int  # of an iteration
    num_warps: int = 4
    num_stages: int = 3  # of the software pipeline of loads

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} = {value}: must be a power of two")
        if min(self.block_m, self.block_n, self.block_k) < SMALLEST_TILE:
            raise ValueError(
                f"block_m, block_n, block_k = {self.block_m}, {self.block_n}, {self.block_k}: must be at least "
                f"{SMALLEST_TILE}"
            )
        for name, most in (("num_warps", 16), ("num_stages", 8)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 to {most}")

    def shared_bytes(self, shape: ExpertShape) -> int:
        """Shared memory of the tiles of a program."""
        columns = self.block_m + shape.num_halves * self.block_n
        return self.num_stages * self.block_k * columns * ITEM_BYTES[shape.dtype]

    def check(self, shape: ExpertShape) -> None:
        """Raises ValueError if the tiling cannot run a product of this shape."""
        if (num_bytes := self.shared_bytes(shape)) > SHARED_BYTES:
            raise ValueError(
                f"block_m, block_n, block_k, num_stages = {self.block_m}, {self.block_n}, {self.block_k}, "
                f"{self.num_stages}: take {num_bytes} bytes of shared memory, must be at most {SHARED_BYTES}"
            )


# Where nothing was measured. Of few rows an expert a product is bound by reading weights: small tiles make many
# programs, with some of their weights on the way. Of many it is bound by multiplying: a tile's rows share the weights.
F32 = ExpertTiling(block_m=16, block_n=32, block_k=32, num_stages=2)
FEW = ExpertTiling(block_m=16, block_n=32, block_k=128, num_stages=4)
SOME = ExpertTiling(block_m=32, block_n=64, block_k=64, num_stages=4)
MANY = ExpertTiling(block_m=64, block_n=128, block_k=64, num_warps=8)
FIXED = ExpertTiling(block_m=64, block_n=64, block_k=64)  # for any number of rows: answers depend on no other rows


def usual_tiling(shape: ExpertShape, shared_bytes: int = SHARED_BYTES, *, is_fixed: bool = False) -> ExpertTiling:
    """The options where nothing was measured, on a card with so much shared memory for a program.

    With `is_fixed` they are the same for any number of pairs.
    """
    average = shape.num_pairs / shape.num_experts
    if shape.dtype == "float32":
        return F32
    tiling = FEW if average <= FEW_PAIRS else SOME if average < MANY_PAIRS else MANY
    tiling = FIXED if is_fixed else tiling
    while tiling.shared_bytes(shape) > shared_bytes and tiling.num_stages > 2:
        tiling = replace(tiling, num_stages=tiling.num_stages - 1)
    return tiling
