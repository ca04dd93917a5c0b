"""Products of real models, and with which tilings each is tried: the likeliest ones, by a guess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.gpu.few_rows import MOST_VECTOR_ROWS, Tiling, product_tiling, vector_tiling
from tests.bench.gpu.trials.layers import Widths

NUM_PROCESSORS = 132
SHARED_BYTES = 227 << 10
BUSY_BYTES = 40 << 10  # in flight on each multiprocessor: with fewer, memory waits
MOST_CANDIDATES = 15  # of a product, besides those without matrix instructions

FORMS = {  # by block_m: block_n, block_k, num_warps, num_stages, is_swapped
    16: (
        (16, 128, 2, 5, False),
        (16, 256, 4, 4, False),
        (16, 256, 2, 3, False),
        (32, 128, 4, 4, False),
        (32, 128, 2, 4, False),
        (32, 128, 4, 6, False),
        (32, 256, 4, 3, False),
        (64, 128, 4, 4, False),
        (64, 64, 4, 6, False),
        (64, 128, 4, 3, True),
        (64, 128, 4, 4, True),
        (64, 64, 4, 6, True),
        (128, 64, 8, 4, False),
        (128, 64, 4, 4, True),
        (128, 128, 8, 3, True),
    ),
    32: (
        (32, 128, 4, 4, False),
        (32, 128, 4, 3, False),
        (32, 256, 4, 3, False),
        (64, 128, 4, 3, False),
        (64, 64, 4, 5, False),
        (64, 128, 4, 3, True),
        (64, 128, 4, 4, True),
        (64, 64, 4, 5, True),
        (128, 64, 8, 4, False),
        (128, 64, 4, 4, True),
        (128, 64, 8, 4, True),
        (128, 128, 8, 3, True),
    ),
    64: (
        (32, 128, 4, 4, False),
        (64, 128, 4, 3, False),
        (64, 64, 4, 5, False),
        (64, 64, 4, 4, True),
        (64, 128, 4, 3, True),
        (64, 128, 4, 4, True),
        (128, 64, 4, 4, False),
        (128, 64, 8, 4, False),
        (128, 64, 4, 4, True),
        (128, 64, 8, 4, True),
        (128, 128, 8, 3, True),
        (256, 64, 8, 3, True),
    ),
}


DRY_TILINGS = (
    Tiling(2, 32, 32, 1, 1, 1),
    Tiling(16, 32, 16, 2, 4, 2),
    Tiling(16, 32, 16, 1, 4, 2, is_swapped=True),
)


@dataclass(frozen=True, slots=True)
class Product:
    """One of a model."""

    name: str
    num_outputs: int
    num_inner: int
    kind: str = "product"  # or add, activated: how it is launched

    @property
    def num_weights(self) -> int:
        return self.num_outputs * (1 + (self.kind == "activated")) * self.num_inner


@dataclass(frozen=True, slots=True)
class Case:
    """A product of so many rows."""

    product: Product
    num_rows: int

    def __str__(self) -> str:
        return f"{self.product.name} of {self.num_rows} rows"


def products_of(model: str, widths: Widths) -> list[Product]:
    """Those of a layer, and the one that activates besides."""
    queries, groups = widths.num_heads * widths.head_dim, widths.num_groups * widths.head_dim
    return [
        Product(f"{model} qkv", queries + 2 * groups, widths.hidden),
        Product(f"{model} output", widths.hidden, queries, "add"),
        Product(f"{model} gate_up", 2 * widths.inner, widths.hidden),
        Product(f"{model} activated", widths.inner, widths.hidden, "activated"),
        Product(f"{model} down", widths.hidden, widths.inner, "add"),
    ]


def tilings_of(case: Case, *, is_dry: bool = False) -> list[Tiling]:
    """Today's first; the others by what seems good, each form at least once if it fits."""
    if is_dry:
        return list(DRY_TILINGS)
    product, num_rows = case.product, case.num_rows
    found = [product_tiling(num_rows, product.num_outputs, product.num_inner, NUM_PROCESSORS)]
    if num_rows <= MOST_VECTOR_ROWS:
        found += vector_tilings(product, num_rows)
    block_m = min(64, max(16, 1 << (num_rows - 1).bit_length()))
    firsts, seconds = [], []
    for form in FORMS[block_m]:
        ranked = sorted(split_tilings(product, block_m, form), reverse=True)
        firsts += ranked[:1]
        seconds += ranked[1:2]
    chosen = sorted(firsts, reverse=True)[:MOST_CANDIDATES]
    chosen += sorted(seconds, reverse=True)[: MOST_CANDIDATES - len(chosen)]
    return list(dict.fromkeys([*found, *(tiling for _, tiling in chosen)]))


def vector_tilings(product: Product, num_rows: int) -> Iterator[Tiling]:
    whole = 1 << (product.num_inner - 1).bit_length()
    for block_n, num_warps, block_k in (
        (4, 4, 1024),
        (2, 4, 1024),
        (8, 4, 1024),
        (4, 2, 512),
        (8, 2, 512),
        (4, 1, 256),
        (2, 4, 2048),
        (1, 4, 4096),
        (4, 8, 2048),
    ):
        if block_k <= whole:
            yield vector_tiling(num_rows, block_n, product.num_inner, num_warps, block_k)
    if product.num_inner > 2048:
        yield vector_tiling(num_rows, 4, product.num_inner, 4, 1024)._replace(num_stages=3)


def split_tilings(
    product: Product, block_m: int, form: tuple[int, int, int, int, bool]
) -> Iterator[tuple[float, Tiling]]:
    """With a guess of the share of the bandwidth that each will reach."""
    block_n, block_k, num_warps, num_stages, is_swapped = form
    num_halves = 1 + (product.kind == "activated")
    stage_bytes = 2 * block_k * (block_m + num_halves * block_n)
    if block_k > product.num_inner or num_stages * stage_bytes + 1024 > SHARED_BYTES:
        return
    occupancy = min(2048 // (32 * num_warps), (SHARED_BYTES + 1024) // (num_stages * stage_bytes + 1024))
    num_tiles = -(-product.num_outputs // block_n)
    for num_splits in (1, 2, 3, 4, 6, 8, 12):
        num_steps = -(-product.num_inner // block_k) // num_splits
        if num_steps < 2:
            break
        shares = num_tiles * num_splits / NUM_PROCESSORS
        ahead = 2 * num_halves * block_n * block_k * min(num_steps, num_stages - 1)
        in_flight = min(occupancy, -(-num_tiles * num_splits // NUM_PROCESSORS)) * ahead
        reread = 1 / (1 + 0.2 * block_m / (num_halves * block_n))  # x, which every tile reads
        guess = shares / -(-num_tiles * num_splits // NUM_PROCESSORS) * min(1.0, in_flight / BUSY_BYTES) * reread
        yield (
            guess * (1 - 0.02 * num_splits * (num_splits > 1)),
            Tiling(block_m, block_n, block_k, num_splits, num_warps, num_stages, is_swapped),
        )
