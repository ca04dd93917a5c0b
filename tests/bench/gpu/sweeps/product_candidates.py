"""Products of real models, and with which forms each is tried: the likeliest ones, by a guess."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from millrace.kernels.tilings.predicted import predicted_forms
from millrace.kernels.tilings.products import (
    MOST_VECTOR_ROWS,
    WARP_NUMBERS,
    ProductForm,
    ProductKind,
    ProductShape,
    power_of_two_below,
)
from tests.bench.gpu.trials.layers import Widths

NUM_PROCESSORS = 132
PROCESSOR_BYTES = 228 << 10  # of shared memory
BUSY_BYTES = 40 << 10  # in flight on each multiprocessor: with fewer, memory waits
MOST_CANDIDATES = 12  # of a product

SPLIT_FORMS = {  # by block_m: block_n, block_k, num_warps, num_stages, is_swapped
    16: (
        (16, 128, 2, 5, False),
        (16, 256, 4, 4, False),
        (32, 128, 4, 4, False),
        (32, 128, 2, 4, False),
        (32, 128, 4, 6, False),
        (32, 256, 4, 3, False),
        (64, 128, 4, 4, False),
        (64, 64, 4, 6, False),
        (64, 128, 4, 4, True),
        (64, 64, 4, 6, True),
        (128, 64, 8, 4, False),
        (128, 64, 4, 4, True),
    ),
    32: (
        (32, 128, 4, 4, False),
        (32, 256, 4, 3, False),
        (64, 128, 4, 3, False),
        (64, 64, 4, 5, False),
        (64, 128, 4, 3, True),
        (64, 64, 4, 5, True),
        (128, 64, 8, 4, False),
        (128, 64, 4, 4, True),
        (128, 64, 8, 4, True),
    ),
    64: (
        (32, 128, 4, 4, False),
        (64, 128, 4, 3, False),
        (64, 64, 4, 5, False),
        (64, 64, 4, 4, True),
        (64, 128, 4, 3, True),
        (128, 64, 4, 4, False),
        (128, 64, 8, 4, False),
        (128, 64, 4, 4, True),
        (128, 64, 8, 4, True),
    ),
}
DRY_FORMS = (
    ProductForm(form="vector", block_m=4, block_n=4, block_k=256, num_warps=1, fuses_norm=True),
    ProductForm(form="split", block_m=16, block_n=16, block_k=16, num_splits=2, num_stages=2),
)


@dataclass(frozen=True, slots=True)
class Product:
    """One of a model; with `has_norm` behind a norm of its input."""

    name: str
    num_outputs: int  # of a row: half of the weight's rows if gated
    num_inner: int
    kind: ProductKind = "plain"
    has_norm: bool = False

    @property
    def num_halves(self) -> int:
        return 2 if self.kind == "gated" else 1


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A product of so many rows."""

    product: Product
    num_rows: int

    def __str__(self) -> str:
        return f"{self.product.name} of {self.num_rows} rows"

    @property
    def shape(self) -> ProductShape:
        of = self.product
        return ProductShape(num_outputs=of.num_outputs, num_inner=of.num_inner, kind=of.kind, num_rows=self.num_rows)

    def compiled_as(self, form: ProductForm) -> str:
        """Cases with the same are the same to the compiler."""
        of = self.product
        num_steps = -(-of.num_inner // form.block_k)
        is_even = of.num_outputs % form.block_n == 0, of.num_inner % form.block_k == 0
        return f"{of.kind} {of.has_norm} {form} {is_even} {num_steps if form.form == 'split' else num_steps > 1}"


def products_of(model: str, widths: Widths) -> list[Product]:
    """Those of a layer."""
    queries, groups = widths.num_heads * widths.head_dim, widths.num_groups * widths.head_dim
    return [
        Product(f"{model} qkv", queries + 2 * groups, widths.hidden, has_norm=True),
        Product(f"{model} output", widths.hidden, queries, "add"),
        Product(f"{model} gate_up", widths.inner, widths.hidden, "gated", has_norm=True),
        Product(f"{model} down", widths.hidden, widths.inner, "add"),
    ]


def forms_of(case: ProductCase, *, is_dry: bool = False) -> list[ProductForm]:
    """The predicted one first, if any; the others by what seems good, each at least once if it fits."""
    if is_dry:
        return list(DRY_FORMS)
    product, num_rows = case.product, case.num_rows
    sizes = (product.num_outputs, product.num_inner, product.kind, "bfloat16", NUM_PROCESSORS)
    found = [form for most, form in predicted_forms(*sizes, bytes_per_s=inf) if num_rows <= most][:1]
    if num_rows <= MOST_VECTOR_ROWS:
        found += vector_forms(product, num_rows)
    block_m = min(64, max(16, 1 << (num_rows - 1).bit_length()))
    firsts, seconds = [], []
    for form in SPLIT_FORMS[block_m]:
        ranked = sorted(split_forms(product, block_m, form), key=lambda each: -each[0])
        firsts += ranked[:1]
        seconds += ranked[1:2]
    ranked = sorted([*firsts, *seconds[: MOST_CANDIDATES // 2]], key=lambda each: -each[0])
    found += [form for _, form in ranked]
    if product.has_norm:
        found[1:1] = [replace(found[0], fuses_norm=not found[0].fuses_norm)]
    return [form for form in dict.fromkeys(found) if fits(form, case.shape)][:MOST_CANDIDATES]


def fits(form: ProductForm, shape: ProductShape) -> bool:
    """Whether a table may hold it."""
    try:
        form.check(shape)
    except ValueError:
        return False
    return True


def vector_forms(product: Product, num_rows: int) -> Iterator[ProductForm]:
    """Without matrix instructions."""
    whole, block_m = power_of_two_below(product.num_inner), 1 << (num_rows - 1).bit_length()
    for block_n, num_warps, block_k in (
        (4, 4, 1024),
        (2, 4, 1024),
        (2, 4, 2048),
        (8, 4, 1024),
        (4, 8, 2048),
        (1, 4, 2048),
    ):
        if WARP_NUMBERS <= block_k <= whole:
            yield ProductForm(
                form="vector", block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, fuses_norm=True
            )


def split_forms(
    product: Product, block_m: int, form: tuple[int, int, int, int, bool]
) -> Iterator[tuple[float, ProductForm]]:
    """With a guess of the share of the bandwidth that each will reach."""
    block_n, block_k, num_warps, num_stages, is_swapped = form
    num_halves = product.num_halves
    stage_bytes = 2 * block_k * (block_m + num_halves * block_n)
    if block_k > product.num_inner:
        return
    occupancy = max(1, min(2048 // (32 * num_warps), PROCESSOR_BYTES // (num_stages * stage_bytes + 1024)))
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
            ProductForm(
                form="split", block_m=block_m, block_n=block_n, block_k=block_k, num_splits=num_splits,
                num_warps=num_warps, num_stages=num_stages, is_swapped=is_swapped,
            ),
        )  # fmt: skip
