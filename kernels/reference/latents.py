"""Attention over latents in its absorbed form, in plain PyTorch: all heads read the one head that the cache keeps.

A token's latent c [R] stands for the keys and values of all heads. Head h has the key (K_h c, r), where r [E] is
rotated and all heads share it, and the value V_h c. Its query (a, b) scores a . K_h c + b . r = (K_h' a, b) . (c, r).
What it sees, a sum of values by probability, is V_h times the same sum of latents. So queries take K_h in, and outputs
V_h. The attention between them is that of one key/value head (c, r) of R + E numbers, whose first R are its value.

`LatentKernels` in `kernels/layer_kernels.py` says what the functions take, and what the letters are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.work_lists import AttentionPlan
from .attention import paged_attention, paged_decode
from .attention_prologue import rope, write_latents


def latent_prologue(
    q: Tensor,
    latents: Tensor,
    rotated: Tensor,
    key_up: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """See `LatentKernels.latent_prologue`."""
    num_tokens, num_heads, _ = q.shape
    plain, rank = key_up.shape[1:]
    absorbed = q.new_empty(num_tokens, num_heads, rank + rotated.shape[1])
    absorbed[..., :rank] = torch.bmm(q[..., :plain].transpose(0, 1), key_up).transpose(0, 1)
    absorbed[..., rank:] = q[..., plain:]
    keys = torch.cat((latents, rotated), -1).unsqueeze(1)  # [T, 1, R + E]
    rope(absorbed[..., rank:], keys[..., rank:], cos, sin, positions)
    write_latents(keys, cache, slot_mapping)
    return absorbed


def latent_attention(
    q: Tensor,
    cache: Tensor,
    rank: int,
    block_tables: Tensor,
    query_starts: Tensor | None,
    lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """See `LatentKernels.latent_attention`."""
    if query_starts is None:
        return paged_decode(q, cache, cache, block_tables, lengths, scale, plan=plan)
    return paged_attention(q, cache, cache, block_tables, query_starts, lengths, scale, plan=plan)


def latent_values(seen: Tensor, value_up: Tensor) -> Tensor:
    """See `LatentKernels.latent_values`."""
    values = torch.bmm(seen[..., : value_up.shape[2]].transpose(0, 1), value_up.transpose(1, 2))  # [H, T, W]
    return values.transpose(0, 1).flatten(1)
