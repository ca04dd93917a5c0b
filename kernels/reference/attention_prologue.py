"""Norms of heads, rotary positions and the cache write in plain PyTorch, on any device.

The protocol in `kernels/kernel_set.py` says what the prologue takes and returns. Its twin is
`kernels/triton/attention_prologue.py`.

Shapes: qkv [T, H + 2G, D], a layer's cache [N, G, B, D], slots and positions [T]; T new tokens of a step, H query
heads, G key/value heads, D head size, N blocks of B tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.layer_options import HeadNorms
from .layers import layer_norm, rms_norm
from .per_step import PerStepCache

_rotations = PerStepCache[tuple[Tensor, Tensor, Tensor, Tensor]]()
_places = PerStepCache[tuple[Tensor | None, tuple[Tensor, Tensor]]]()


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Rotates queries and keys to their positions, in place; the two halves of a head are the pairs (NeoX).

    q          [T, H, D]   contiguous in D
    k          [T, G, D]   as q
    cos, sin   [P, D_rot / 2] f32   D_rot <= D; the rest of each head is not rotated; never written to
    positions  [T] i64     row of the tables, 0 <= position < P
    """
    # The value holds the tables, so that no other object can get their ids.
    _, _, cosines, sines = _rotations.get(
        (id(cos), id(sin)), (positions,), lambda: (cos, sin, *_rotation(cos[positions], sin[positions]))
    )
    half = cos.shape[-1]
    for heads in _adjoined(q, k):
        if heads.shape[0] == 1:
            # For a single row the calls dominate: 55 us against 86 for the form below, in bf16 on one 2.5 GHz core. At
            # 512 rows the copies would cost twice what the form below takes.
            turned = heads if heads.shape[-1] == 2 * half else heads[..., : 2 * half]
            both = turned.float()
            turned.copy_(both * cosines + both.roll(half, -1) * sines)
            continue
        first, second = heads[..., :half], heads[..., half : 2 * half]
        rotated = first * cosines - second * sines  # f32, as the tables are
        second.copy_(second * cosines + first * sines)
        first.copy_(rotated)


def _rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of T rows, from tables of [T, D_rot / 2]: [T, 1, D_rot / 2], for each half of a head.

    For a single row [1, 1, D_rot]: the factors of the head, and those of the head with its halves swapped.
    """
    if len(cos) == 1:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos.unsqueeze(1), sin.unsqueeze(1)


def _adjoined(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """One view [T, H + G, D] of both if k follows q in memory, as in a fused projection: half the calls."""
    num_tokens, num_heads, head_dim = q.shape
    gap = num_heads * q.stride(1)
    is_one_storage = k.data_ptr() - q.data_ptr() == (k.storage_offset() - q.storage_offset()) * q.element_size()
    is_next = k.storage_offset() - q.storage_offset() == gap and q.stride()[1:] == k.stride()[1:]
    if not (is_one_storage and is_next and (num_tokens <= 1 or q.stride(0) == k.stride(0))):
        return q, k
    return (q.as_strided((num_tokens, num_heads + k.shape[1], head_dim), q.stride()),)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the keys and values of new tokens into their slots of one layer's cache.

    k, v          [T, G, D]
    k/v_cache     [N, G, B, D]   as k; any strides
    slot_mapping  [T] i64        block * B + offset in the block; negative = nothing is written
    """
    block_size = k_cache.shape[2]
    written, place = _places.get(block_size, (slot_mapping,), lambda: _places_of(slot_mapping, block_size))
    if written is not None:
        k, v = k[written], v[written]
    k_cache.transpose(1, 2).index_put_(place, k)
    v_cache.transpose(1, 2).index_put_(place, v)


def write_latents(latents: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """As `write_kv`, of latents [T, G, D], which are keys and values at once."""
    block_size = cache.shape[2]
    written, place = _places.get(block_size, (slot_mapping,), lambda: _places_of(slot_mapping, block_size))
    cache.transpose(1, 2).index_put_(place, latents if written is None else latents[written])


def _places_of(slot_mapping: Tensor, block_size: int) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
    """The tokens that are written, None for all; and where: their blocks and the offsets in them."""
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[written]
    is_all = len(written) == len(slot_mapping)
    return None if is_all else written, (slots // block_size, slots % block_size)


def attention_prologue(
    qkv: Tensor,
    norms: HeadNorms | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    query_factors: Tensor | None = None,
) -> Tensor:
    """See `KernelSet.attention_prologue`. qkv is [T, H + 2G, D]. Works out rotations and slots once a step."""
    num_groups = k_cache.shape[1]
    q, k, v = qkv.split_with_sizes((qkv.shape[1] - 2 * num_groups, num_groups, num_groups), dim=1)
    if norms is not None and not norms.is_after_rope:
        q, k = _normed(q, norms.q, norms.q_bias, norms), _normed(k, norms.k, norms.k_bias, norms)
    if cos is not None and sin is not None:
        rope(q, k, cos, sin, positions)
    if norms is not None and norms.is_after_rope:
        q, k = _normed(q, norms.q, norms.q_bias, norms), _normed(k, norms.k, norms.k_bias, norms)
    if query_factors is not None:
        q.mul_(query_factors[positions][:, None, None])
    if k_scale is not None and v_scale is not None:
        k, v = _to_fp8(k, k_scale), _to_fp8(v, v_scale)
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def _normed(heads: Tensor, weight: Tensor | None, bias: Tensor | None, norms: HeadNorms) -> Tensor:
    """Heads [T, n, D] normed, each by itself or all of a token as one row."""
    rows = heads
    if norms.is_over_row:
        rows = heads.flatten(1)
        weight, bias = (None if factor is None else factor.flatten() for factor in (weight, bias))
    normed = rms_norm(rows, weight, norms.eps) if norms.kind == "rms" else layer_norm(rows, weight, bias, norms.eps)
    return normed.view(heads.shape)


def _to_fp8(heads: Tensor, scale: Tensor) -> Tensor:
    """Heads [T, G, D] divided by `scale` [G], in e4m3, as u8."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    numbers = (heads.float() / scale[:, None]).clamp(-largest, largest)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
