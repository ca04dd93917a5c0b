"""The form of a product that was never measured: a prediction, which takes the library's where no margin is clear.

The model has microseconds of a launch, and bytes over the memory's rate. The library's are fitted to eight products of
two models on an H200. Those of the kernels here are not measured, so they are held to be slower than is hoped. A form
is chosen only where even so it ends in CLEAR_SHARE of the library's time.
"""

from __future__ import annotations

from .products import (
    ITEM_BYTES,
    SHARED_BYTES,
    WARP_NUMBERS,
    DtypeName,
    FormsByRows,
    ProductForm,
    ProductKind,
    power_of_two_below,
    why_library,
)

BYTES_PER_S = 4.3e12  # of an H200's memory
VECTOR_ROWS, SPLIT_ROWS = (1, 4), (16, 32, 64)
CLEAR_SHARE = 0.9
LIBRARY_US, LIBRARY_BYTES = 4.0, 1.2  # of a launch, and bytes that take as long as one of the weight
FUSED_US = 1.5  # a norm, or an activation, in a launch of its own
OWN_US = 2.0  # of a launch, most of which begins early
VECTOR_BYTES, SPLIT_BYTES = 1 / 0.9, 1 / 0.75  # as LIBRARY_BYTES
REREAD_BYTES = 0.5  # as LIBRARY_BYTES: rows of x, which every tile of a split reads, from the L2 cache
TWO_PROGRAMS_BYTES = 96 << 10  # of shared memory: two of them on a multiprocessor with most


def predicted_forms(
    num_outputs: int,
    num_inner: int,
    kind: ProductKind,
    dtype: DtypeName,
    num_processors: int,
    shared_bytes: int = SHARED_BYTES,
    bytes_per_s: float = BYTES_PER_S,
) -> FormsByRows:
    """The forms of a product on a card with so many multiprocessors, so much shared memory and such a memory.

    Up to 4 rows vectors, with the norm inside; up to 64 rows splits; the library from the first number of rows on that
    shows no clear margin.
    """
    if why_library(num_outputs, num_inner, dtype) is not None:
        return ()
    found: list[tuple[int, ProductForm]] = []
    for rows in (*VECTOR_ROWS, *SPLIT_ROWS):
        form = _form(rows, num_outputs, num_inner, kind, num_processors, shared_bytes)
        own = own_us(form, rows, num_outputs, num_inner, kind, bytes_per_s)
        if own > CLEAR_SHARE * library_us(num_outputs, num_inner, kind, bytes_per_s):
            break
        found.append((rows, form))
    return tuple(found)


def library_us(num_outputs: int, num_inner: int, kind: ProductKind, bytes_per_s: float) -> float:
    """Of the library's product of up to 64 rows, and of what is a launch of its own beside it."""
    num_fused = {"plain": 1, "gated": 2, "activated": 2, "add": 0}[kind]
    return LIBRARY_US + num_fused * FUSED_US + LIBRARY_BYTES * _read_us(num_outputs, num_inner, kind, bytes_per_s)


def own_us(
    form: ProductForm, num_rows: int, num_outputs: int, num_inner: int, kind: ProductKind, bytes_per_s: float
) -> float:
    """Of a form, at worst."""
    read = _read_us(num_outputs, num_inner, kind, bytes_per_s)
    if form.form == "vector":
        return OWN_US + VECTOR_BYTES * read
    reread = -(-num_outputs // form.block_n) * num_rows * num_inner * ITEM_BYTES["bfloat16"] / bytes_per_s * 1e6
    norm_us = FUSED_US if kind != "add" else 0.0  # a split leaves it to a launch
    return OWN_US + norm_us + SPLIT_BYTES * read + REREAD_BYTES * reread


def _read_us(num_outputs: int, num_inner: int, kind: ProductKind, bytes_per_s: float) -> float:
    halves = 2 if kind == "gated" else 1
    return halves * num_outputs * num_inner * ITEM_BYTES["bfloat16"] / bytes_per_s * 1e6


def _form(
    num_rows: int, num_outputs: int, num_inner: int, kind: ProductKind, num_processors: int, shared_bytes: int
) -> ProductForm:
    num_halves = 2 if kind == "gated" else 1
    if num_rows in VECTOR_ROWS:
        return _vector_form(num_rows, num_outputs, num_inner, num_halves, num_processors)
    return _split_form(num_rows, num_outputs, num_inner, num_halves, num_processors, shared_bytes)


def _vector_form(num_rows: int, num_outputs: int, num_inner: int, num_halves: int, num_processors: int) -> ProductForm:
    """4 warps, with up to 8 loads of 16 bytes in flight for each thread; at least 4 programs a multiprocessor."""
    block_k = min(2048, max(WARP_NUMBERS, power_of_two_below(num_inner)))
    block_n = max(1, min(4, 8192 // (block_k * num_halves)))
    while block_n > 1 and -(-num_outputs // block_n) < 4 * num_processors:
        block_n //= 2
    num_warps = min(4, block_k // WARP_NUMBERS)
    return ProductForm(
        form="vector", block_m=num_rows, block_n=block_n, block_k=block_k, num_warps=num_warps, fuses_norm=True
    )


def _split_form(
    num_rows: int, num_outputs: int, num_inner: int, num_halves: int, num_processors: int, shared_bytes: int
) -> ProductForm:
    """Two programs a multiprocessor if K is long enough: each split has at least 4 iterations."""
    block_n, block_k = 32 if num_outputs <= 8192 else 64, 128
    stage_bytes = ITEM_BYTES["bfloat16"] * (num_rows + num_halves * block_n) * block_k
    num_stages = 4 if 4 * stage_bytes <= TWO_PROGRAMS_BYTES else 3
    if num_stages * stage_bytes > shared_bytes:
        block_k, num_stages = 64, 4 if 2 * stage_bytes <= shared_bytes else 3
    num_tiles, num_splits = -(-num_outputs // block_n), 1
    while num_tiles * num_splits < 2 * num_processors and num_inner >= 2 * num_splits * 4 * block_k:
        num_splits *= 2
    return ProductForm(
        form="split", block_m=num_rows, block_n=block_n, block_k=block_k, num_splits=num_splits, num_stages=num_stages
    )
