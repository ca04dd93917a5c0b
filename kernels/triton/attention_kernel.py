"""The attention kernel: the items of a work list, one after another. `attention.py` launches it.

In the kernels [M, N] is a tile of query rows x cached tokens.

One persistent kernel walks a work list (`kernels/layout/work_lists.py`). Each program does its own items, one after
another, so the grid is the same for any lengths and launches can be captured in a CUDA graph. An item's rows are, in
*decode*, the query heads of one key/value head; in *extend*, several new tokens x those heads. The program that ends
the last item of a task that was cut joins its partial sums, always in the order of tiles: the same bits each time.

Block ids are read one tile ahead and carried through the loop. Loads of keys and values through an id that the same
iteration reads would not be pipelined: each tile would wait a whole memory latency.

Over latents keys have EXTRA numbers more than values, which are the first D of keys: see `latents/`.

With a folded prologue (`folded_prologue.py`) `q` is the projection: each item of decode norms and rotates its own
queries. The item with the last tile does so with the new key, writes it and the new value into the cache, and begins
its softmax with them; its loop reads only what earlier steps wrote.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tile import BASE_2, add_tile, block_ids, load_extra, load_tile, scores_of, to_f16, with_alibi
from .folded_prologue import new_token, rotation, turned_tile
from .launch import start_early

INDEX_TENSORS = ["items", "starts", "block_tables", "positions", "slot_mapping"]


# Index tensors may be slices of one buffer, and the table may have any width: neither may cause a recompilation.
@triton.jit(do_not_specialize=["window", "chunk", "table_row"], do_not_specialize_on_alignment=INDEX_TENSORS)
def attention_kernel(
    out, sums, weights, arrivals, items, starts, q, k_cache, v_cache, block_tables, k_scale, v_scale, sinks, alibi,
    scale, window, chunk, cap, num_heads, q_row, q_head, kc_n, kc_g, kc_b, kc_d, vc_n, vc_g, vc_b, vc_d, table_row,
    q_norm, k_norm, cos, sin, positions, slot_mapping, eps, cos_row, sin_row,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, IS_DECODE: tl.constexpr, ITEM: tl.constexpr,
    B: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, IS_NARROW: tl.constexpr,
    IS_FOLDED: tl.constexpr, IS_NORMED: tl.constexpr, IS_ROUNDED: tl.constexpr, HAS_HEAD_WEIGHTS: tl.constexpr,
    HALF: tl.constexpr, EXTRA: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    TOKEN_UNIT: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Does the items of one program: up to TOKENS new tokens of a sequence, all heads of a group, a range of tiles."""
    start_early(IS_EARLY)
    if TOKEN_UNIT < 16:  # heads of 24, say: launches tell of multiples of 16 alone, and copies are not asynchronous
        kc_b = kc_b // TOKEN_UNIT * TOKEN_UNIT
        vc_b = vc_b // TOKEN_UNIT * TOKEN_UNIT
    row = tl.arange(0, BLOCK_M)
    new = row // GROUP  # [M] which new token
    d = tl.arange(0, BLOCK_D)
    first_item = tl.load(starts + tl.program_id(0))
    end_item = tl.load(starts + tl.program_id(0) + 1)
    for index in range(first_item, end_item):
        item = items + index * ITEM
        sequence = tl.load(item).to(tl.int64)
        first_row = tl.load(item + 1)
        g = tl.load(item + 2).to(tl.int64)
        first_tile = tl.load(item + 3)
        end_tile = tl.load(item + 4)
        partial = tl.load(item + 5)
        first_position = tl.load(item + 6)
        num_tokens = tl.load(item + 7)

        head = g * GROUP + row % GROUP  # [M]
        is_row = (new < num_tokens)[:, None] & (d < D)[None, :]
        query = (first_row + new).to(tl.int64)
        if IS_FOLDED:
            token_place = q + first_row.to(tl.int64) * q_row
            angle = tl.load(positions + first_row)
            # NOTE: 0, as is not known to the compiler, which else keeps what is computed of `d` alone in registers that
            # the loop over tokens needs.
            zero = tl.multiple_of(tl.minimum(end_tile, 0), 16)
            number = d[None, :] + zero
            cosines, sines = rotation(cos, sin, angle, number, cos_row, sin_row, HALF, BLOCK_D)
            queries = turned_tile(
                token_place + head[:, None] * q_head, head[:, None], number, is_row, q_norm, cosines, sines, eps,
                D, HALF, BLOCK_D, IS_NORMED, IS_ROUNDED, HAS_HEAD_WEIGHTS,
            )  # fmt: skip
        else:
            queries = tl.load(q + query[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=is_row, other=0.0)
        extra = queries
        if EXTRA > 0:
            e = tl.arange(0, BLOCK_E)
            is_extra = (new < num_tokens)[:, None] & (e < EXTRA)[None, :]
            extra_place = q + query[:, None] * q_row + head[:, None] * q_head + D + e[None, :]
            extra = tl.load(extra_place, mask=is_extra, other=0.0)
        if IS_NARROW:
            queries = to_f16(queries)
        factor = scale
        if HAS_K_SCALE:
            factor = scale * tl.load(k_scale + g)

        # [M] position of each row's token; rows without a token repeat the last one and are not stored.
        position = first_position + tl.minimum(new, num_tokens - 1)
        end = first_position + num_tokens  # tokens that the last row sees; no row sees more
        if IS_FOLDED:
            end = first_position  # the new one is none of the loop's
        oldest = tl.maximum(first_position + 1 - window, 0) if HAS_WINDOW else 0
        if HAS_CHUNK:  # lists have the tiles before it as well
            oldest = tl.maximum(first_position // chunk * chunk, oldest)
            first_tile = tl.maximum(oldest // BLOCK_N, first_tile)
        slopes = tl.load(alibi + head) * BASE_2 if alibi is not None else None
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)  # largest score so far
        total = tl.zeros([BLOCK_M], tl.float32)  # sum of weights so far
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        table = block_tables + sequence * table_row
        k_head = k_cache + g * kc_g
        v_head = v_cache + g * vc_g
        column = tl.arange(0, BLOCK_N)
        IS_SCALED: tl.constexpr = HAS_CAP or alibi is not None  # before the exponent, as a cap or a bias comes after
        unit = 1.0 if IS_SCALED else factor
        if IS_FOLDED:  # noqa: SIM102  the inner one is of the device
            if (first_position >= 0) & (end_tile * BLOCK_N > first_position):
                is_d = number < D
                slot = tl.load(slot_mapping + first_row)
                cosines, sines = rotation(cos, sin, angle, number, cos_row, sin_row, HALF, BLOCK_D)
                key = turned_tile(
                    token_place + (num_heads + g) * q_head, g, number, is_d, k_norm, cosines, sines, eps,
                    D, HALF, BLOCK_D, IS_NORMED, IS_ROUNDED, HAS_HEAD_WEIGHTS,
                )  # fmt: skip
                value = token_place + (num_heads + num_heads // GROUP + g) * q_head + number
                key, value = new_token(
                    key, tl.load(value, mask=is_d, other=0.0),
                    k_head + slot // B * kc_n + slot % B * kc_b, v_head + slot // B * vc_n + slot % B * vc_b,
                    tl.load(k_scale + g) if HAS_K_SCALE else 1.0, tl.load(v_scale + g) if HAS_V_SCALE else 1.0,
                    slot >= 0, number, is_d, kc_d, vc_d, BLOCK_D, HAS_K_SCALE,
                )  # fmt: skip
                score = tl.sum(queries.to(tl.float32) * key.to(queries.dtype).to(tl.float32), axis=1)
                if IS_SCALED:
                    score *= factor
                if HAS_CAP:
                    score = cap - 2 * cap / (tl.exp2(score) + 1)
                best = score * unit
                total += 1.0
                acc += value.to(tl.float32)
        first_masked = first_tile
        if not (IS_DECODE or HAS_WINDOW or HAS_CHUNK):  # tiles that every row sees in full
            first_masked = tl.minimum(tl.maximum((first_position + 1) // BLOCK_N, first_tile), end_tile)
            block = block_ids(table, first_tile * BLOCK_N + column, 0, end, B)
            for tile in tl.range(first_tile, first_masked, num_stages=STAGES):
                token = tile * BLOCK_N + column
                keys, values = load_tile(
                    block, k_head, v_head, token, token < end, d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d,
                    queries, B, D, BLOCK_D, EXTRA > 0, False,
                )  # fmt: skip
                extra_keys = keys
                if EXTRA > 0:
                    extra_keys = load_extra(
                        block, k_head, token, token < end, kc_n, kc_b, kc_d, queries, B, D, EXTRA, BLOCK_E, False
                    )
                block = block_ids(table, token + BLOCK_N, 0, end, B)
                scores = scores_of(
                    queries, keys, extra, extra_keys, factor, cap, EXTRA > 0, HAS_CAP, IS_SCALED, PRECISION
                )
                if alibi is not None:
                    scores = with_alibi(scores, slopes, token, position)
                acc, best, total = add_tile(acc, best, total, scores, values, unit, False, PRECISION)
        block = block_ids(table, first_masked * BLOCK_N + column, oldest, end, B)
        for tile in tl.range(first_masked, end_tile, num_stages=STAGES):
            token = tile * BLOCK_N + column
            keys, values = load_tile(
                block, k_head, v_head, token, (token < end) & (token >= oldest), d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d,
                queries, B, D, BLOCK_D, EXTRA > 0, True,
            )  # fmt: skip
            extra_keys = keys
            if EXTRA > 0:
                extra_keys = load_extra(
                    block, k_head, token, token < end, kc_n, kc_b, kc_d, queries, B, D, EXTRA, BLOCK_E, True
                )
            block = block_ids(table, token + BLOCK_N, oldest, end, B)
            scores = scores_of(queries, keys, extra, extra_keys, factor, cap, EXTRA > 0, HAS_CAP, IS_SCALED, PRECISION)
            if alibi is not None:
                scores = with_alibi(scores, slopes, token, position)
            is_seen = token[None, :] < end if IS_FOLDED else token[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen &= token[None, :] > position[:, None] - window
            if HAS_CHUNK:
                is_seen &= token[None, :] >= (position // chunk * chunk)[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
            # A decode row sees a token of each of its tiles; an early row of an extend tile may see none.
            acc, best, total = add_tile(acc, best, total, scores, values, unit, not IS_DECODE, PRECISION)

        if HAS_V_SCALE:
            acc *= tl.load(v_scale + g)
        if partial < 0:
            if sinks is not None:  # in the sum once: pieces get it in the merge
                total += tl.exp2(tl.load(sinks + head) * BASE_2 - best)  # infinite if nothing else is in it
            result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a padding row has no weights: zeros
            place = out + (query[:, None] * num_heads + head[:, None]) * D + d[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=is_row)
        else:
            piece = partial.to(tl.int64) * (TOKENS * GROUP) + row
            tl.store(sums + piece[:, None] * D + d[None, :], acc, mask=is_row)
            tl.store(weights + piece * 2, best, mask=new < num_tokens)
            tl.store(weights + piece * 2 + 1, total, mask=new < num_tokens)
            tl.debug_barrier()  # all threads have stored before one of them says so
            first_partial = tl.load(item + 8)
            num_pieces = tl.load(item + 9)
            num_ended = tl.atomic_add(arrivals + first_partial, 1, sem="acq_rel", scope="gpu") + 1
            if num_ended % num_pieces == 0:  # of this layer: each layer adds as many
                for first in range(0, num_tokens * GROUP, BLOCK_R):
                    _merge(
                        out, sums, weights, sinks, first_partial, num_pieces, first_row, num_tokens, g, first,
                        num_heads, GROUP, TOKENS * GROUP, D, BLOCK_D, BLOCK_R, BLOCK_P,
                    )  # fmt: skip


@triton.jit
def _merge(
    out, sums, weights, sinks, first_partial, num_pieces, first_row, num_tokens, g, first, num_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Joins the partial sums of the rows [first, first + BLOCK_R) of a task, and writes their result.

    Reads past the L1 cache, which does not see what other multiprocessors wrote.
    """
    row = first + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    is_row = row < num_tokens * GROUP
    head = g * GROUP + row % GROUP
    best = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if sinks is not None:  # as if a piece had seen them
        best = tl.load(sinks + head, mask=is_row, other=0.0) * BASE_2
        total += 1.0
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first_piece in range(0, num_pieces, BLOCK_P):
        index = first_piece + tl.arange(0, BLOCK_P)
        place = (first_partial + index).to(tl.int64)[:, None] * ROWS + row[None, :]
        is_piece = (index < num_pieces)[:, None] & is_row[None, :]
        bests = tl.load(weights + place * 2, mask=is_piece, other=float("-inf"), cache_modifier=".cg")  # [P, R]
        totals = tl.load(weights + place * 2 + 1, mask=is_piece, other=0.0, cache_modifier=".cg")
        is_element = is_piece[:, :, None] & (d < D)[None, None, :]
        element = sums + place[:, :, None] * D + d[None, None, :]
        parts = tl.load(element, mask=is_element, other=0.0, cache_modifier=".cg")  # [P, R, D]
        new_best = tl.maximum(best, tl.max(bests, axis=0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(bests - base[None, :])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(totals * weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(parts * weight[:, :, None], axis=0)
        best = new_best
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    query = (first_row + row // GROUP).to(tl.int64)
    place = out + (query[:, None] * num_heads + head[:, None]) * D + d[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None] & (d < D)[None, :])
