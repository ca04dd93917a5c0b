"""Launch shapes of the attention kernels, by head size and type.

A loop over cached tokens copies the keys and values of a tile to shared memory while it computes with an earlier tile.
`num_stages` says how early: with 3 stages one tile is on its way during each iteration, with 4 two are, as reading
block ids ahead takes the first stage. With 2 each iteration waits a whole memory latency.

Which table is taken depends on the shared memory of a block, which newer capabilities may have less of: 12.0 has no
more than 8.6. `kernels/checks/compile_check.py` checks on sm_80, sm_86 and sm_90 that loops run ahead, that `occupancy`
programs fit, and that no register is spilled in a loop.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from ..tilings.attention import AttentionKind, StepShape
from ..tilings.shared_memory import LARGE, MIDDLE, SMALL, block_bytes
from ..tilings.tables import Tilings

REGISTERS = 1 << 16  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread
MIN_ROWS = 16  # the smallest M of a tensor-core dot; smaller groups are padded, which costs FLOPs, not bytes


class Tiling(NamedTuple):
    """Launch shape of an attention kernel."""

    block_m: int  # query rows: tokens x heads of a group
    block_n: int  # cached tokens of a loop step
    num_warps: int
    num_stages: int  # depth of the software pipeline of loads
    occupancy: int  # programs that run at the same time on a multiprocessor
    min_tiles: int | None = None  # of a program's stretch of a work list; None: as `divide` chooses

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread, at most, so that `occupancy` programs fit on a multiprocessor.

        A warp gets them in units of 8 a thread. None = the hardware's limit suffices.
        """
        registers = REGISTERS // (32 * self.num_warps * self.occupancy) // 8 * 8
        return registers if registers < MOST_REGISTERS else None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes and types of attention that all layers of a model share."""

    num_heads: int
    num_groups: int  # key/value heads
    head_dim: int
    dtype: torch.dtype  # of queries
    cache_dtype: torch.dtype
    windows: tuple[int | None, ...] = (None,)  # each window that occurs, once; None = no window
    is_batch_invariant: bool = False  # a sequence's own length decides the cuts, so equal rows give equal bits
    tilings: Tilings | None = field(default=None, compare=False)  # measured options of the card
    extra_dim: int = 0  # over latents: numbers of queries and keys behind those that are values, too

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_groups


Numbers = Literal["f32", "half", "fp8"]  # of the cache
Rows = tuple[tuple[int, Tiling], ...]  # by head size: the first row whose size is not smaller; the last takes the rest

# f32 is bound by its multiplications, without tensor cores, so its tiles are small and 3 stages are plenty.
# Half-precision tiles of 64 tokens are 32 KiB at D = 128: one ahead, in 3 programs, keeps 96 KiB on their way.
# fp8 tiles are a quarter of that, with 32 tokens, as widening takes registers: two ahead.
DECODE: dict[Numbers, Rows] = {
    "f32": (
        *((64, Tiling(16, 32, 4, 3, 2)), (128, Tiling(16, 16, 8, 3, 1)), (256, Tiling(16, 16, 4, 3, 2))),
        (512, Tiling(16, 16, 8, 3, 1)),
    ),
    "half": ((128, Tiling(16, 64, 4, 3, 3)), (256, Tiling(16, 32, 4, 3, 2)), (512, Tiling(16, 32, 8, 3, 1))),
    "fp8": ((128, Tiling(16, 32, 4, 4, 3)), (256, Tiling(16, 32, 4, 4, 2)), (512, Tiling(16, 32, 8, 4, 1))),
}
# One program fills a multiprocessor, and its tiles serve 128 rows, so one tile ahead is enough: sm_90 keeps two with 3
# stages, as warpgroup instructions read keys and values from where they were copied to. At D = 256 shared memory and
# registers allow half the rows; of fp8 a quarter, as values pass through registers before warpgroup instructions.
EXTEND: dict[Numbers, Rows] = {
    "f32": ((64, Tiling(16, 32, 4, 3, 2)), (256, Tiling(16, 16, 8, 3, 1))),  # two would spill, in loops with options
    "half": ((128, Tiling(128, 64, 8, 3, 1)), (256, Tiling(64, 32, 8, 3, 1)), (512, Tiling(32, 16, 8, 3, 1))),
    "fp8": ((128, Tiling(128, 64, 8, 3, 1)), (256, Tiling(32, 64, 8, 3, 1)), (512, Tiling(16, 32, 8, 3, 1))),
}
# Where 163 KiB of shared memory and no warpgroup instructions allow less: compute capability 8.0.
DECODE_MIDDLE: dict[Numbers, Rows] = DECODE | {
    "f32": (
        *((64, Tiling(16, 32, 4, 3, 2)), (128, Tiling(16, 16, 8, 3, 2)), (256, Tiling(16, 16, 4, 3, 1))),
        (512, Tiling(16, 16, 8, 3, 1)),
    ),
    "half": (
        *((64, Tiling(16, 64, 4, 3, 3)), (128, Tiling(16, 64, 4, 3, 2)), (256, Tiling(16, 32, 4, 3, 2))),
        (512, Tiling(16, 32, 4, 3, 1)),
    ),
}
EXTEND_MIDDLE: dict[Numbers, Rows] = EXTEND | {
    "half": (
        *((64, Tiling(128, 64, 8, 3, 1)), (128, Tiling(64, 64, 8, 3, 1)), (256, Tiling(64, 32, 8, 3, 1))),
        (512, Tiling(32, 16, 8, 3, 1)),
    ),
}
# 99 KiB: 8.6, 8.9, 12.0, and whatever is not known.
DECODE_SMALL: dict[Numbers, Rows] = DECODE_MIDDLE | {
    "half": (
        *((64, Tiling(16, 64, 4, 3, 2)), (128, Tiling(16, 32, 4, 3, 2)), (256, Tiling(16, 16, 4, 3, 2))),
        (512, Tiling(16, 16, 4, 3, 1)),
    ),
    "fp8": ((128, Tiling(16, 32, 4, 4, 3)), (256, Tiling(16, 32, 4, 4, 1)), (512, Tiling(16, 16, 4, 4, 1))),
}
EXTEND_SMALL: dict[Numbers, Rows] = EXTEND_MIDDLE | {
    "half": (
        *((64, Tiling(128, 64, 8, 3, 1)), (128, Tiling(64, 64, 8, 3, 1)), (256, Tiling(32, 32, 8, 3, 1))),
        (512, Tiling(16, 16, 8, 3, 1)),
    ),
    "fp8": ((128, Tiling(64, 64, 8, 3, 1)), (256, Tiling(32, 64, 8, 3, 1)), (512, Tiling(16, 16, 8, 3, 1))),
}
# Over latents (D = 512, and 64 more) a tile is keys and values at once. All heads read it, up to MOST_LATENT_ROWS of
# them in one tile of rows.
LATENT: dict[int, dict[Numbers, Tiling]] = {
    LARGE: {"f32": Tiling(16, 16, 8, 3, 1), "half": Tiling(16, 32, 8, 3, 1)},
    MIDDLE: {"f32": Tiling(16, 16, 8, 3, 1), "half": Tiling(16, 32, 8, 3, 1)},
    SMALL: {"f32": Tiling(16, 16, 8, 3, 1), "half": Tiling(16, 16, 8, 3, 1)},
}
MOST_LATENT_ROWS: dict[int, dict[Numbers, int]] = {
    LARGE: {"f32": 16, "half": 32},  # with 64 registers spill
    MIDDLE: {"f32": 16, "half": 32},
    SMALL: {"f32": 16, "half": 16},
}
TABLES = {
    "decode": {LARGE: DECODE, MIDDLE: DECODE_MIDDLE, SMALL: DECODE_SMALL},
    "extend": {LARGE: EXTEND, MIDDLE: EXTEND_MIDDLE, SMALL: EXTEND_SMALL},
}


def decode_tiling(shape: AttentionShape, capability: int, num_rows: int | None = None) -> Tiling:
    """The tiling of decode at that compute `capability` (80, 90, ...). A tile's rows are the heads of one group.

    That which was measured for so many sequences if there is one, and `num_rows` is given.
    """
    if (measured := _measured("decode", shape, capability, num_rows)) is not None:
        return measured
    if shape.extra_dim:
        return _latent_tiling(shape, capability)
    tiling = _row(TABLES["decode"][block_bytes(capability)], shape)
    rows = max(MIN_ROWS, next_power_of_2(shape.group))
    if rows > MIN_ROWS and shape.dtype != torch.float32:
        return tiling._replace(block_m=rows, num_warps=4 if rows <= 32 else 8, occupancy=1)
    return tiling._replace(block_m=rows)


def extend_tiling(shape: AttentionShape, capability: int, num_rows: int | None = None) -> Tiling:
    """The tiling of extend. A tile's rows are whole tokens, `group` rows each, so `block_m >= group`.

    That which was measured for so many tokens if there is one, and `num_rows` is given.
    """
    if (measured := _measured("extend", shape, capability, num_rows)) is not None:
        return measured
    if shape.extra_dim:
        return _latent_tiling(shape, capability)
    tiling = _row(TABLES["extend"][block_bytes(capability)], shape)
    return tiling._replace(block_m=max(tiling.block_m, next_power_of_2(shape.group)))


def with_groups_of_latents(shape: AttentionShape, capability: int) -> AttentionShape:
    """Attention over latents, which all heads read, with its heads in groups that fit a tile; any other as it is."""
    if not shape.extra_dim:
        return shape
    most = MOST_LATENT_ROWS[block_bytes(capability)][_numbers_of(shape)]
    group = max(size for size in range(1, most + 1) if shape.num_heads % size == 0)
    return replace(shape, num_groups=shape.num_heads // group)


def _latent_tiling(shape: AttentionShape, capability: int) -> Tiling:
    tiling = LATENT[block_bytes(capability)][_numbers_of(shape)]
    return tiling._replace(block_m=max(MIN_ROWS, next_power_of_2(shape.group)))


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _measured(kind: AttentionKind, shape: AttentionShape, capability: int, num_rows: int | None) -> Tiling | None:
    """None too if it takes more than a block has, as one of another card's table may; a launch would fail.

    And in batch-invariant mode: tiles of another size would sum in another order for other numbers of rows.
    """
    if shape.tilings is None or not num_rows or shape.is_batch_invariant or shape.extra_dim:
        return None
    dtype, cache_dtype = (str(each).removeprefix("torch.") for each in (shape.dtype, shape.cache_dtype))
    sizes: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype}
    step = StepShape(group=shape.group, head_dim=shape.head_dim, num_rows=num_rows, **sizes)
    found = shape.tilings.attention(kind, step)
    if found is None or found.least_bytes(step) > block_bytes(capability):
        return None
    return Tiling(**asdict(found))


def _numbers_of(shape: AttentionShape) -> Numbers:
    if shape.dtype == torch.float32:
        return "f32"
    return "fp8" if shape.cache_dtype == torch.float8_e4m3fn else "half"


def _row(table: dict[Numbers, Rows], shape: AttentionShape) -> Tiling:
    rows = table[_numbers_of(shape)]
    return next((tiling for head_dim, tiling in rows if shape.head_dim <= head_dim), rows[-1][1])
