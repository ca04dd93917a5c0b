"""Attention over latents in its absorbed form, in plain PyTorch: all heads read the one head that the cache keeps.

A token's latent c [R] stands for the keys and values of all heads. Head h has the key (K_h c, r), where r [E] is
rotated and all heads share it, and the value V_h c. Its query (a, b) scores a . K_h c + b . r = (K_h' a, b) . (c, r).
What it sees, a sum of values by probability, is V_h times the same sum of latents. So queries take K_h in, and outputs
V_h. The attention between them is that of one key/value head (c, r) of R + E numbers, whose first R are its value.

Letters as in `kernels/kernel_set.py`, and

    R  numbers of a latent       E  numbers of the rotated key       W  numbers of a head's value
    A  numbers of a head's query and key that are not rotated
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Queries for the cache, [T, H, R + E] as q, and the cache write of the new tokens.

    q             [T, H, A + E]   the last E numbers of a head are rotated, in halves
    latents       [T, R]          as q, normed
    rotated       [T, E]          as q, not yet rotated; any strides over rows
    key_up        [H, A, R]       as q
    cos, sin      [P, E / 2] f32
    positions     [T] i64
    cache         [N, 1, B, R + E]   as q, one layer's; any strides
    slot_mapping  [T] i64            as in `write_kv`
    """
    num_tokens, num_heads, _ = q.shape
    plain, rank = key_up.shape[1:]
    absorbed = q.new_empty(num_tokens, num_heads, rank + rotated.shape[1])
    absorbed[..., :rank] = torch.bmm(q[..., :plain].transpose(0, 1), key_up).transpose(0, 1)
    absorbed[..., rank:] = q[..., plain:]
    keys = torch.cat((latents, rotated), -1).unsqueeze(1)  # [T, 1, R + E]
    rope(absorbed[..., rank:], keys[..., rank:], cos, sin, positions)
    write_latents(keys, cache, slot_mapping)
    return absorbed


def latent_values(seen: Tensor, value_up: Tensor) -> Tensor:
    """What each head sees, [T, H * W], of the latents that it sees.

    seen      [T, H, R or more]   the first R numbers count
    value_up  [H, W, R]           as seen
    """
    values = torch.bmm(seen[..., : value_up.shape[2]].transpose(0, 1), value_up.transpose(1, 2))  # [H, T, W]
    return values.transpose(0, 1).flatten(1)
