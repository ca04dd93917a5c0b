"""Triton kernels of a causal convolution over tokens and over those that slots keep. `launches.py` launches them.

A token's taps are tokens of the step, or of its slot where the sequence has no earlier ones in the step. The first
launch reads the slots, the second replaces what they keep.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import start_early


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def conv_kernel(
    out, x, tails, weight, bias, slots, starts, lengths, num_tokens, num_rows, channels, x_row, slot_stride, tail_row,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens, and BLOCK channels of each. ROWS: a power of two with room for all sequences."""
    start_early(IS_EARLY)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = (c < channels)[None, :]
    row = tl.arange(0, ROWS)
    ends = tl.load(starts + 1 + row, mask=row < num_rows, other=1 << 30)
    sequence = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    is_token = (token < num_tokens) & (sequence < num_rows)
    begin = tl.load(starts + sequence, mask=is_token, other=0)
    end = tl.load(starts + sequence + 1, mask=is_token, other=0)
    is_kept = is_token & (tl.load(lengths + sequence, mask=is_token, other=0) > end - begin)  # has earlier tokens
    slot = tl.load(slots + sequence, mask=is_token, other=0).to(tl.int64)
    acc = tl.zeros([BLOCK_T, BLOCK], tl.float32)
    if bias is not None:
        acc += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        place = token - (WIDTH - 1 - tap)
        is_new = is_token & (place >= begin)
        some = tl.load(
            x + place.to(tl.int64)[:, None] * x_row + c[None, :], mask=is_new[:, None] & is_channel, other=0.0
        )
        before = WIDTH - 1 + place - begin  # of what the slot keeps
        kept_place = tails + slot[:, None] * slot_stride + before[:, None] * tail_row + c[None, :]
        some += tl.load(kept_place, mask=(is_kept & (place < begin))[:, None] & is_channel, other=0.0)
        factor = tl.load(weight + c * WIDTH + tap, mask=c < channels, other=0.0).to(tl.float32)
        acc += some.to(tl.float32) * factor[None, :]
    out_place = out + token.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(out_place, acc, mask=(token < num_tokens)[:, None] & is_channel)


@triton.jit
def tail_kernel(
    x, tails, slots, starts, lengths, channels, x_row, slot_stride, tail_row,
    KEPT: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """What the slot of a sequence keeps: its last KEPT tokens. Row by row, as one takes another's place."""
    start_early(IS_EARLY)
    sequence = tl.program_id(0)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    is_kept = tl.load(lengths + sequence) > end - begin
    slot = tl.load(slots + sequence).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.where(end > begin, channels, 0)
    for index in tl.static_range(KEPT):
        place = end - KEPT + index
        num_new = tl.where(place >= begin, channels, 0)
        some = tl.load(x + place.to(tl.int64) * x_row + c, mask=c < num_new, other=0.0)
        old = tails + slot * slot_stride + (index + end - begin).to(tl.int64) * tail_row + c
        num_old = tl.where(is_kept, channels - num_new, 0)
        some += tl.load(old, mask=c < num_old, other=0.0)
        tl.store(tails + slot * slot_stride + index * tail_row + c, some, mask=c < channels)
