"""Triton kernels of the same recurrence for prompts: chunks of tokens by matrix products. `launches.py` launches them.

Within a chunk that begins with the state S, token i has the key k_i, the query q_i and the decay d_i since the chunk's
begin, the product of exp(log_decay). It adds outer(k_i, u_i), which later tokens of the chunk see decayed:

    u_i = beta_i * (v_i - d_i * k_i @ S - sum over j < i of d_i / d_j * (k_i . k_j) * u_j)
    out_i = d_i * q_i @ S + sum over j <= i of d_i / d_j * (q_i . k_j) * u_j
    S' = d_last * S + sum over j of d_last / d_j * outer(k_j, u_j)

With A[i, j] = beta_i * d_i / d_j * (k_i . k_j) for j < i, and 0 elsewhere, u is inverse(I + A) @ (beta * (v - d * k @
S)): the WY form of the product of the tokens' updates. What pairs of tokens of a chunk have, the inverse and the
products of queries and keys, does not depend on states. So one kernel makes it for all chunks at once, and another
takes a sequence's chunks one after another, some columns of the state in each program.

Quotients of decays are exponents of differences, at most 0: none overflows. Matrix products round their factors to 10
bits, as numbers of 16 bits have no more; sums and states are in f32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import start_early

PART = tl.constexpr(16)  # rows of a diagonal block, which is inverted row by row
PRECISION = tl.constexpr("tf32")


@triton.jit(do_not_specialize=["num_rows"])
def pairs_kernel(
    inverses, seen, q, k, log_decay, beta, starts, num_rows, groups, heads,
    LEAST: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head: inverse(I + A) with `beta`, and `seen`, what a token's query sees of each of the chunk.

    Both have a row of CHUNK numbers for each token and head. The chunks of sequence s are those from starts[s] // CHUNK
    + s on, which leaves room for any lengths.
    """
    start_early(IS_EARLY)
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    firsts = tl.load(starts + row, mask=row < num_rows, other=1 << 30) // CHUNK + row
    sequence = tl.sum((firsts <= chunk).to(tl.int32), axis=0) - 1
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    first = begin + (chunk - begin // CHUNK - sequence) * CHUNK
    if (end - begin >= LEAST) & (first < end):
        c = tl.arange(0, CHUNK)
        is_token = first + c < end
        keys = load_keys(k, first + c, is_token, head // (heads // groups), groups, KEYS, BLOCK_K)
        decays = tl.cumsum(tl.load(log_decay + (first + c) * heads + head, mask=is_token, other=0.0), axis=0)
        place = ((first + c).to(tl.int64) * heads + head)[:, None] * CHUNK + c[None, :]
        queries = load_keys(q, first + c, is_token, head // (heads // groups), groups, KEYS, BLOCK_K)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        products *= quotients(decays, c[:, None] >= c[None, :])
        tl.store(seen + place, products, mask=is_token[:, None])
        if beta is not None:
            rates = tl.load(beta + (first + c) * heads + head, mask=is_token, other=0.0)
            products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
            a = products * rates[:, None] * quotients(decays, c[:, None] > c[None, :])
            tl.store(inverses + place, inverse_of(a, c, CHUNK), mask=is_token[:, None])


@triton.jit
def inverse_of(a, c, CHUNK: tl.constexpr):
    """inverse(I + A) for A [C, C] that has numbers below its diagonal alone."""
    # The diagonal blocks row by row: row i of the inverse is that of I less A[i, :] @ the rows before.
    BLOCKS: tl.constexpr = CHUNK // PART
    block = tl.arange(0, BLOCKS)
    part = tl.arange(0, PART)
    is_diagonal = (block[:, None] == block[None, :])[:, None, :, None]  # [B, 1, B, 1]
    own = tl.sum(tl.where(is_diagonal, a.reshape(BLOCKS, PART, BLOCKS, PART), 0.0), axis=2)  # [B, P, P]
    inner = (part[:, None] == part[None, :]).to(tl.float32)[None, :, :] + tl.zeros_like(own)
    for i in range(1, PART):
        is_row = (part == i)[None, :, None]
        factors = tl.sum(tl.where(is_row, own, 0.0), axis=1)  # [B, P]
        less = tl.sum(factors[:, :, None] * inner, axis=1)
        inner = tl.where(is_row, inner - less[:, None, :], inner)
    whole = tl.where(is_diagonal, inner[:, :, None, :], 0.0) + tl.zeros([BLOCKS, PART, BLOCKS, PART], tl.float32)
    diagonal = whole.reshape(CHUNK, CHUNK)
    # I + A = (I + diagonal of A) (I + M), and M ** 4 = 0 for up to 4 blocks.
    lower = tl.where((c // PART)[:, None] > (c // PART)[None, :], a, 0.0)
    m = tl.dot(diagonal, lower, input_precision=PRECISION)
    square = tl.dot(m, m, input_precision=PRECISION)
    series = tl.where(c[:, None] == c[None, :], 1.0, 0.0) - m + square
    series -= tl.dot(m, square, input_precision=PRECISION)
    return tl.dot(series, diagonal, input_precision=PRECISION)


@triton.jit
def chunk_kernel(
    out, states, q, k, v, log_decay, beta, inverses, seen, slots, starts, lengths,
    groups, heads, slot_stride, head_stride, key_stride,
    LEAST: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Chunk by chunk, for sequences of at least LEAST new tokens; the others are `token_kernel`'s."""
    start_early(IS_EARLY)
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if end - begin >= LEAST:
        key = tl.arange(0, BLOCK_K)
        value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_value = (value < VALUES)[None, :]
        slot = tl.load(slots + sequence).to(tl.int64)
        place = states + slot * slot_stride + head * head_stride + key[:, None] * key_stride + value[None, :]
        num_kept = tl.where(tl.load(lengths + sequence) > end - begin, KEYS, 0)  # of one with earlier tokens
        state = tl.load(place, mask=(key < num_kept)[:, None] & is_value, other=0.0)
        c = tl.arange(0, CHUNK)
        for first in range(begin, end, CHUNK):
            token = first + c
            is_token = token < end
            at_head = token * heads + head
            keys = load_keys(k, token, is_token, head // (heads // groups), groups, KEYS, BLOCK_K)
            values = v + at_head[:, None] * VALUES + value[None, :]
            update = tl.load(values, mask=is_token[:, None] & is_value, other=0.0)  # [C, V]
            decays = tl.cumsum(tl.load(log_decay + at_head, mask=is_token, other=0.0), axis=0)
            since = tl.exp(decays)[:, None]
            if beta is not None:
                update -= since * tl.dot(keys, state, input_precision=PRECISION)
                update *= tl.load(beta + at_head, mask=is_token, other=0.0)[:, None]
                inverse = inverses + at_head.to(tl.int64)[:, None] * CHUNK + c[None, :]
                inverse = tl.load(inverse, mask=is_token[:, None], other=0.0)
                update = tl.dot(inverse, update, input_precision=PRECISION)
            queries = load_keys(q, token, is_token, head // (heads // groups), groups, KEYS, BLOCK_K)
            found = since * tl.dot(queries, state, input_precision=PRECISION)
            products = seen + at_head.to(tl.int64)[:, None] * CHUNK + c[None, :]
            products = tl.load(products, mask=is_token[:, None], other=0.0)
            found = tl.dot(products, update, found, input_precision=PRECISION)
            tl.store(out + at_head[:, None] * VALUES + value[None, :], found, mask=is_token[:, None] & is_value)
            last = tl.min(decays, axis=0)  # as decays fall, and stay behind the last token
            update *= tl.exp(last - decays)[:, None]
            state = tl.dot(tl.trans(keys), update, state * tl.exp(last), input_precision=PRECISION)
        tl.store(place, state, mask=(key < KEYS)[:, None] & is_value)


@triton.jit
def load_keys(x, token, is_token, group, groups, KEYS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Keys or queries [C, K] of tokens; zeros where there is none."""
    key = tl.arange(0, BLOCK_K)
    place = x + ((token * groups + group) * KEYS)[:, None] + key[None, :]
    return tl.load(place, mask=is_token[:, None] & (key < KEYS)[None, :], other=0.0)


@triton.jit
def quotients(decays, is_seen):
    """The decay [C, C] between two tokens, 0 where not `is_seen`."""
    return tl.exp(tl.where(is_seen, decays[:, None] - decays[None, :], float("-inf")))
