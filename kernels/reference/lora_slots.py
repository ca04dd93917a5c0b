"""LoRA of adapters in slots, in PyTorch: the twins of `kernels/triton/lora`. Sums in f32; they read lists and ranks.

`lora.py` computes the same for adapters that the host groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from ..layout.layer_options import Activation
from ..layout.lora_lists import LoraLists, LoraWeights, chunk_size, num_chunks, num_sums
from . import layers


def group_tokens(adapters: Tensor, lists: LoraLists) -> None:
    """See `LoraKernels.group_tokens`."""
    size, base = lists.tile_tokens, lists.num_slots
    keys = torch.where(adapters > 0, adapters - 1, base)
    lists.order.copy_(torch.argsort(keys, stable=True))
    totals = torch.bincount(keys, minlength=base + 1).tolist()
    rows = [
        (0 if key == base else key + 1, begin + first, min(size, total - first))
        for key, (begin, total) in enumerate(zip(accumulate([0, *totals]), totals, strict=False))
        for first in range(0, total, size)
    ]
    if rows:
        lists.tiles[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    lists.counts[0], lists.counts[1] = sum(slot > 0 for slot, _, _ in rows), len(rows)


def lora_shrink(x: Tensor, weights: LoraWeights, lists: LoraLists) -> Tensor:
    """See `LoraKernels.lora_shrink`."""
    num_parts, max_rank = weights.a.shape[1:3]
    sums = x.new_zeros((num_sums(lists, weights.num_inner), len(x), num_parts * max_rank), dtype=torch.float32)
    size = chunk_size(weights.num_inner)
    for slot, begin, tokens, part, rank in _tiles_with_ranks(weights, lists):
        rows, a = x[tokens].float(), weights.a[slot, part, :rank].float()
        for chunk in range(num_chunks(weights.num_inner)):
            inner = slice(chunk * size, (chunk + 1) * size)
            place = sums[min(chunk, len(sums) - 1), begin : begin + len(tokens)]
            place[:, part * max_rank : part * max_rank + rank] += rows[:, inner] @ a[:, inner].t()
    return sums


def lora_add(out: Tensor, sums: Tensor, weights: LoraWeights, lists: LoraLists) -> None:
    """See `LoraKernels.lora_add`."""
    for slot, begin, tokens, part, rank in _tiles_with_ranks(weights, lists):
        first = part * weights.max_rank
        h = _joined(sums[:, begin : begin + len(tokens), first : first + rank])
        columns = slice(sum(weights.sizes[:part]), sum(weights.sizes[: part + 1]))
        update = h @ weights.b[slot, :rank, columns].float()
        out[tokens, columns] = (out[tokens, columns].float() + update).to(out.dtype)


def lora_gated(
    product: Tensor,
    sums: Tensor,
    weights: LoraWeights,
    lists: LoraLists,
    activation: Activation,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """See `LoraKernels.lora_gated`."""
    adapted = product.clone()
    lora_add(adapted, sums, weights, lists)
    return layers.gated(adapted, activation, alpha, limit)


def _tiles_with_ranks(weights: LoraWeights, lists: LoraLists) -> Iterator[tuple[int, int, Tensor, int, int]]:
    """Slot index, first place, tokens, part and rank of each tile of an adapter, for each part that it changes."""
    for slot, begin, count in lists.tiles[: int(lists.counts[0])].tolist():
        for part, rank in enumerate(weights.ranks[slot - 1].tolist()):
            if rank:
                yield slot - 1, begin, lists.order[begin : begin + count].long(), part, rank


def _joined(sums: Tensor) -> Tensor:
    """The sum over chunks, in their order."""
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total
