"""Triton kernels of LoRA: the tokens of a step by adapter, the products with A, and those with B.

`launches.py` launches them; `kernels/layout/lora_lists.py` has the lists and the matrices. Shapes: N tokens, S slots, P
parts of a linear, R the largest rank, K inputs, M outputs, C partial sums.

Grids depend on the padded size of a step alone, and programs walk the tiles that the lists have: one CUDA graph serves
every mix of adapters. Without any, all programs of shrink and add end after reading one number. Ranks are read from
memory, so adapters of different ranks share a launch, and none is padded beyond BLOCK_R.

A row's sums do not depend on the other rows: K is summed in chunks of a fixed size, which are added in order, by one
program or by the kernel that reads them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import lora_lists
from ..launch import start_early
from ..layers import gate_product

TILE = tl.constexpr(lora_lists.TILE)

# ---- the lists ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens"])
def group_kernel(
    adapters, order, tiles, counts, begins, num_tokens,
    NUM_SLOTS: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One program: a counting sort by key, which is an adapter's slot - 1, or NUM_SLOTS for the base model."""
    start_early(IS_EARLY)
    key = tl.arange(0, KEYS)
    totals = tl.zeros([KEYS], tl.int32)
    for first in range(0, num_tokens, BLOCK):
        _, keys = _keys(adapters, first, num_tokens, NUM_SLOTS, KEYS, BLOCK)
        totals += tl.histogram(keys, KEYS)
    totals = tl.where(key <= NUM_SLOTS, totals, 0)  # without what lies beyond the step
    first_places = tl.cumsum(totals, 0) - totals
    num_tiles = (totals + TOKENS - 1) // TOKENS
    first_tiles = tl.cumsum(num_tiles, 0) - num_tiles
    tl.store(counts, tl.sum(tl.where(key < NUM_SLOTS, num_tiles, 0), 0))
    tl.store(counts + 1, tl.sum(num_tiles, 0))
    tl.store(begins + key, first_places)
    slot = tl.where(key < NUM_SLOTS, key + 1, 0)[:, None]
    for begin in range(0, tl.max(num_tiles, 0), LANES):
        lane = begin + tl.arange(0, LANES)[None, :]
        is_tile = lane < num_tiles[:, None]
        tile = tiles + (first_tiles[:, None] + lane) * TILE
        tl.store(tile, slot + tl.zeros_like(lane), mask=is_tile)
        tl.store(tile + 1, first_places[:, None] + lane * TOKENS, mask=is_tile)
        tl.store(tile + 2, tl.minimum(totals[:, None] - lane * TOKENS, TOKENS), mask=is_tile)
    tl.debug_barrier()  # other threads wrote the places read below
    for first in range(0, num_tokens, BLOCK):
        token, keys = _keys(adapters, first, num_tokens, NUM_SLOTS, KEYS, BLOCK)
        others = first + tl.arange(0, BLOCK)
        is_same = _keys_again(adapters, others, num_tokens, NUM_SLOTS, KEYS)[None, :] == keys[:, None]
        num_before = tl.sum((is_same & (others[None, :] < token[:, None])).to(tl.int32), 1)
        num_same = tl.sum(is_same.to(tl.int32), 1)
        is_token = token < num_tokens
        place = tl.load(begins + keys, mask=is_token, other=0) + num_before
        tl.store(order + place, token, mask=is_token)
        tl.debug_barrier()  # all threads have read the places written over
        tl.store(begins + keys, place + 1, mask=is_token & (num_before + 1 == num_same))
        tl.debug_barrier()


@triton.jit
def _keys(adapters, first, num_tokens, NUM_SLOTS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    token = first + tl.arange(0, BLOCK)
    return token, _keys_again(adapters, token, num_tokens, NUM_SLOTS, KEYS)


@triton.jit
def _keys_again(adapters, token, num_tokens, NUM_SLOTS: tl.constexpr, KEYS: tl.constexpr):
    """The keys of tokens; KEYS - 1 beyond the step."""
    slot = tl.load(adapters + token, mask=token < num_tokens, other=0)
    return tl.where(token < num_tokens, tl.where(slot > 0, slot - 1, NUM_SLOTS), KEYS - 1)


# ---- the products ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_programs"])
def shrink_kernel(
    sums, x, a, ranks, order, tiles, counts, num_programs,
    num_inner, x_row, a_slot, ranks_slot, sums_chunk, chunk_size,
    PARTS: tl.constexpr, RANK: tl.constexpr, CHUNKS: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """x A' of the tiles of adapters, BLOCK_R ranks of one part, and CHUNKS chunks of K, which are added here."""
    start_early(IS_EARLY)
    num_tiles = tl.load(counts)
    BLOCKS: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    part = tl.program_id(1) // BLOCKS
    r = (tl.program_id(1) % BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    first_rank = (tl.program_id(1) % BLOCKS) * BLOCK_R
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)[None, :]
    for tile in range(tl.program_id(0), num_tiles, num_programs):
        slot = tl.load(tiles + tile * TILE) - 1
        begin = tl.load(tiles + tile * TILE + 1)
        is_row = m < tl.load(tiles + tile * TILE + 2)
        rank = tl.load(ranks + slot * ranks_slot + part)
        if first_rank < rank:
            token = tl.load(order + begin + m, mask=is_row, other=0).to(tl.int64)
            x_place = x + token[:, None] * x_row + k
            a_place = a + slot.to(tl.int64) * a_slot + (part * RANK + r).to(tl.int64)[:, None] * num_inner + k
            is_rank = (r < rank)[:, None]
            total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for chunk in range(CHUNKS):
                low = (tl.program_id(2) * CHUNKS + chunk) * chunk_size
                high = tl.minimum(low + chunk_size, num_inner)
                acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for inner in tl.range(low, high, BLOCK_K, num_stages=STAGES):
                    if EVEN_K:
                        rows = tl.load(x_place + inner, mask=is_row[:, None], other=0.0)
                        tile_a = tl.load(a_place + inner, mask=is_rank, other=0.0)
                    else:
                        is_inner = inner + k < high
                        rows = tl.load(x_place + inner, mask=is_row[:, None] & is_inner, other=0.0)
                        tile_a = tl.load(a_place + inner, mask=is_rank & is_inner, other=0.0)
                    # [M, K] @ [K, R] -> [M, R]
                    acc = tl.dot(rows, tl.trans(tile_a), acc, input_precision=PRECISION)
                total += acc
            place = sums + tl.program_id(2).to(tl.int64) * sums_chunk
            place += (begin + m).to(tl.int64)[:, None] * (PARTS * RANK) + (part * RANK + r)[None, :]
            tl.store(place, total, mask=is_row[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["num_programs"])
def add_kernel(
    out, sums, b, ranks, order, tiles, counts, num_programs, num_outputs, size_0, size_1, out_row, b_slot, ranks_slot,
    sums_chunk,
    PARTS: tl.constexpr, RANK: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Adds BLOCK_N numbers of one part to the tokens of adapters, rounded once."""
    start_early(IS_EARLY)
    num_tiles = tl.load(counts)
    block = tl.program_id(0)
    part, start, end = 0, 0, num_outputs
    if PARTS > 1:
        end = size_0
        if block >= tl.cdiv(size_0, BLOCK_N):
            part, start, end = 1, size_0, size_0 + size_1
            block -= tl.cdiv(size_0, BLOCK_N)
            if PARTS > 2:  # noqa: SIM102 (of the compiler alone)
                if block >= tl.cdiv(size_1, BLOCK_N):
                    part, start, end = 2, size_0 + size_1, num_outputs
                    block -= tl.cdiv(size_1, BLOCK_N)
    n = start + block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    for tile in range(tl.program_id(1), num_tiles, num_programs):
        slot = tl.load(tiles + tile * TILE) - 1
        begin = tl.load(tiles + tile * TILE + 1)
        is_row = m < tl.load(tiles + tile * TILE + 2)
        rank = tl.load(ranks + slot * ranks_slot + part)
        if rank > 0:
            acc = _update(
                sums, b, slot, begin, is_row, part, rank, n, n < end, num_outputs, b_slot, sums_chunk,
                PARTS, RANK, SUMS, BLOCK_M, BLOCK_N, BLOCK_R, PRECISION,
            )  # fmt: skip
            token = tl.load(order + begin + m, mask=is_row, other=0).to(tl.int64)
            place = out + token[:, None] * out_row + n[None, :]
            is_element = is_row[:, None] & (n < end)[None, :]
            acc += tl.load(place, mask=is_element, other=0.0).to(tl.float32)
            tl.store(place, acc.to(out.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["num_programs"])
def gated_kernel(
    out, product, sums, b, ranks, order, tiles, counts, num_programs, num_outputs, product_row, b_slot, ranks_slot,
    sums_chunk, alpha, limit,
    RANK: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N numbers of the gated product of all tokens, those of adapters with their updates, rounded as `gated`."""
    start_early(IS_EARLY)
    num_tiles = tl.load(counts + 1)
    narrow: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    is_output = n < num_outputs
    for tile in range(tl.program_id(1), num_tiles, num_programs):
        slot = tl.load(tiles + tile * TILE) - 1
        begin = tl.load(tiles + tile * TILE + 1)
        is_row = m < tl.load(tiles + tile * TILE + 2)
        token = tl.load(order + begin + m, mask=is_row, other=0).to(tl.int64)
        place = product + token[:, None] * product_row + n[None, :]
        is_element = is_row[:, None] & is_output[None, :]
        gate = tl.load(place, mask=is_element, other=0.0)
        up = tl.load(place + num_outputs, mask=is_element, other=0.0)
        if slot >= 0:
            rank = tl.load(ranks + slot * ranks_slot)
            if rank > 0:
                acc = _update(
                    sums, b, slot, begin, is_row, 0, rank, n, is_output, 2 * num_outputs, b_slot, sums_chunk,
                    2, RANK, SUMS, BLOCK_M, BLOCK_N, BLOCK_R, PRECISION,
                )  # fmt: skip
                gate = (acc + gate.to(tl.float32)).to(narrow)
            rank = tl.load(ranks + slot * ranks_slot + 1)
            if rank > 0:
                acc = _update(
                    sums, b, slot, begin, is_row, 1, rank, num_outputs + n, is_output, 2 * num_outputs, b_slot,
                    sums_chunk, 2, RANK, SUMS, BLOCK_M, BLOCK_N, BLOCK_R, PRECISION,
                )  # fmt: skip
                up = (acc + up.to(tl.float32)).to(narrow)
        result = gate_product(gate, up, alpha, limit, ACTIVATION).to(narrow)
        tl.store(out + token[:, None] * num_outputs + n[None, :], result, mask=is_element)


@triton.jit
def _update(
    sums, b, slot, begin, is_row, part, rank, n, is_output, num_outputs, b_slot, sums_chunk,
    PARTS: tl.constexpr, RANK: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """B (A x) of a tile, [M, N] f32. B is widened, as a rounded A x would cost digits."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    place = begin + tl.arange(0, BLOCK_M)
    h_row = sums + place.to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK
    b_place = b + slot.to(tl.int64) * b_slot + n[None, :]
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        is_h = is_row[:, None] & (r < rank)[None, :]
        h = tl.load(h_row + r[None, :], mask=is_h, other=0.0)
        for chunk in tl.static_range(1, SUMS):
            h += tl.load(h_row + chunk * sums_chunk + r[None, :], mask=is_h, other=0.0)
        some = tl.load(
            b_place + r.to(tl.int64)[:, None] * num_outputs, mask=(r < rank)[:, None] & is_output[None, :], other=0.0
        )
        # [M, R] @ [R, N] -> [M, N]
        acc = tl.dot(h, some.to(tl.float32), acc, input_precision=PRECISION)
    return acc
