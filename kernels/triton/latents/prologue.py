"""The Triton kernel between a layer's products and its attention over latents. `launches.py` launches it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import start_early


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def latent_prologue_kernel(
    absorbed, q, latents, rotated, cos, sin, positions, cache, slot_mapping, num_heads, plain,
    q_row, q_head, absorbed_row, absorbed_head, latents_row, rotated_row, cos_row, sin_row, cache_n, cache_b, cache_d,
    B: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Rotates the last numbers of a token's queries; the last program of a token writes it into the cache."""
    start_early(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    position = tl.load(positions + token)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    cosines = tl.load(cos + position * cos_row + pair, mask=is_pair, other=0.0)  # [1, HALF] f32
    sines = tl.load(sin + position * sin_row + pair, mask=is_pair, other=0.0)
    if program < tl.num_programs(1) - 1:
        head = program * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        is_number = is_pair & (head < num_heads)  # of another shape than `is_pair`, and so of another name
        source = q + token * q_row + head * q_head + plain + pair
        first, second = turned(source, is_number, cosines, sines, HALF)
        rest = absorbed + token * absorbed_row + head * absorbed_head + R + pair
        tl.store(rest, first, mask=is_number)
        tl.store(rest + HALF, second, mask=is_number)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            place = cache + slot // B * cache_n + slot % B * cache_b
            r = tl.arange(0, BLOCK_R)
            numbers = tl.load(latents + token * latents_row + r, mask=r < R, other=0.0)
            tl.store(place + r * cache_d, numbers, mask=r < R)
            first, second = turned(rotated + token * rotated_row + pair, is_pair, cosines, sines, HALF)
            tl.store(place + (R + pair) * cache_d, first, mask=is_pair)
            tl.store(place + (R + HALF + pair) * cache_d, second, mask=is_pair)


@triton.jit
def turned(source, is_pair, cosines, sines, HALF: tl.constexpr):
    """Both halves of rotated numbers, in f32."""
    first = tl.load(source, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_pair, other=0.0).to(tl.float32)
    return first * cosines - second * sines, second * cosines + first * sines
