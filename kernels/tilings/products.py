"""Shapes and forms of matrix products of few rows.

A product is x [M, K] @ weight [N, K].T for M rows. Its forms:

- *library*: PyTorch's product, with norm, activation and residual as launches of their own or as the library has them;
- *vector*: without matrix instructions. Weights go from memory to registers; a program has whole rows of the weight;
- *split*: with matrix instructions, and K cut into splits where there are too few tiles for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProductKind = Literal["plain", "gated", "activated", "add"]
FormName = Literal["library", "vector", "split"]
DtypeName = Literal["bfloat16", "float16", "float32"]

MOST_VECTOR_ROWS = 8  # beyond, the multiplications would take longer than the weight
MOST_SPLIT_ROWS = 64  # beyond, the library's tiles are as good: the weight is no longer all that is read
SMALLEST_TILE = 16  # rows, and columns, of a tile of matrix instructions
VECTOR_NUMBERS = 8  # of a 16-byte load in half precision
ALIGNED_NUMBERS = 16  # K must be a multiple: of no other strides does Triton know that rows are aligned
WARP_NUMBERS = 256  # of a row that a warp loads at once
SHARED_BYTES = 160 << 10  # of a block: what capability 8.0 has, less a reserve
ITEM_BYTES: dict[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """A product, and the most rows that a form is for."""

    num_outputs: int  # N, results of a row: half of the weight's rows if gated
    num_inner: int  # K
    kind: ProductKind
    num_rows: int  # M
    dtype: DtypeName = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_outputs", "num_inner", "num_rows"):
            _at_least_1(name, getattr(self, name))

    @property
    def num_halves(self) -> int:
        """Numbers of the weight's product that make one result."""
        return 2 if self.kind == "gated" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductForm:
    """How a product is launched: a program has [block_m, block_n] of the result, or a split of their sums."""

    form: FormName
    block_m: int = 1
    block_n: int = 1
    block_k: int = WARP_NUMBERS  # of an iteration
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 1  # of the software pipeline of loads
    is_swapped: bool = False  # weights are the left side of the matrix instruction: wgmma wants 64 rows there
    fuses_norm: bool = False  # the norm of x is computed by every program, else by a launch of its own
    max_registers: int | None = None  # of a thread

    def __post_init__(self) -> None:
        if self.form == "library":
            return
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            _power_of_two(name, getattr(self, name))
        for name in ("num_splits", "num_stages"):
            _at_least_1(name, getattr(self, name))
        if self.num_warps > 16:
            raise ValueError(f"num_warps = {self.num_warps}: must be at most 16")
        if self.form == "vector":
            if self.block_m > MOST_VECTOR_ROWS:
                raise ValueError(f"block_m = {self.block_m}: must be at most {MOST_VECTOR_ROWS} with form = vector")
            if self.num_splits != 1 or self.is_swapped:
                raise ValueError("form = vector: num_splits must be 1, and is_swapped false")
            if self.block_k % (VECTOR_NUMBERS * 32):
                raise ValueError(f"block_k = {self.block_k}: must be a multiple of {VECTOR_NUMBERS * 32}")
        elif min(self.block_m, self.block_n, self.block_k) < SMALLEST_TILE:
            raise ValueError(
                f"block_m, block_n, block_k = {self.block_m}, {self.block_n}, {self.block_k}: must be at least "
                f"{SMALLEST_TILE} with form = split"
            )

    def check(self, shape: ProductShape) -> None:
        """Raises ValueError if the form cannot run a product of this shape."""
        if self.form == "library":
            return
        if self.form == "vector" and self.block_m < shape.num_rows:
            raise ValueError(f"block_m = {self.block_m}: must hold all num_rows = {shape.num_rows} with form = vector")
        if self.form == "split":
            columns = self.block_m + shape.num_halves * self.block_n
            num_bytes = self.num_stages * self.block_k * columns * ITEM_BYTES[shape.dtype]
            if num_bytes > SHARED_BYTES:
                raise ValueError(
                    f"block_m, block_n, block_k, num_stages = {self.block_m}, {self.block_n}, {self.block_k}, "
                    f"{self.num_stages}: take {num_bytes} bytes of shared memory, must be at most {SHARED_BYTES}"
                )


LIBRARY = ProductForm(form="library")
FormsByRows = tuple[tuple[int, ProductForm], ...]
"""Pairs of the most rows and the form for them, ascending. More rows than the last pair has are the library's."""


def why_library(num_outputs: int, num_inner: int, dtype: DtypeName) -> str | None:
    """Why the products of few rows are left to the library where nothing was measured; None: they are not."""
    if dtype == "float32":
        return "float32 has no fast matrix instruction of full precision"
    if num_inner % ALIGNED_NUMBERS:
        return f"num_inner = {num_inner} is no multiple of {ALIGNED_NUMBERS}, so rows of the weight are not aligned"
    if num_outputs < SMALLEST_TILE or num_inner < WARP_NUMBERS:
        return f"{num_outputs} x {num_inner} is smaller than {SMALLEST_TILE} x {WARP_NUMBERS}"
    return None


def power_of_two_below(number: int) -> int:
    """The largest power of two that is at most `number`, which is at least 1."""
    return 1 << (number.bit_length() - 1)


def _at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value}: must be at least 1")


def _power_of_two(name: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} = {value}: must be a power of two")
