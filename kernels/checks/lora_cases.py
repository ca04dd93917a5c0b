"""The launches of LoRA that the checks compile: linears of Llama-3.1-8B and SmolLM2-135M, small and large steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..layout.lora_lists import LoraLists, LoraWeights, make_lists, num_sums
from ..triton.lora import launches as lora
from .compile_cases import TYPE_NAMES, CompileCase

LINEARS: dict[str, tuple[tuple[int, ...], int]] = {  # rows of each part, and K
    "8B qkv": ((4096, 1024, 1024), 4096),
    "8B gate_up": ((14_336, 14_336), 4096),
    "8B down": ((4096,), 14_336),
    "135M qkv": ((576, 192, 192), 576),
}
TOKENS = (1, 64, 2048)
RANKS = (8, 16, 64)


def lora_cases(
    dtype: torch.dtype, tokens: Sequence[int] = TOKENS, ranks: Sequence[int] = RANKS, names: Sequence[str] = ()
) -> list[CompileCase]:
    """Lists, and both products of each linear for each number of tokens and largest rank; 8 slots."""
    size = TYPE_NAMES[dtype]
    cases = [CompileCase(f"lora group {count} {size}", partial(_group, count)) for count in tokens]
    cases.append(CompileCase(f"lora group 1024 slots {size}", partial(_group, 2048, 1024)))
    for name in names or LINEARS:
        for count in tokens:
            for rank in ranks:
                about = f"{name} {count} rank {rank} {size}"
                launch: Callable[..., object] = partial(_update, *LINEARS[name], count, rank, dtype)
                cases.append(CompileCase(f"lora add {about}", launch))
                if name.endswith("gate_up"):
                    cases.append(CompileCase(f"lora gated {about}", partial(launch, is_gated=True)))
    return cases


def _group(num_tokens: int, num_slots: int = 8) -> None:
    lora.group_tokens(_meta(num_tokens, dtype=torch.int32), _lists(num_tokens, num_slots))


def _update(
    sizes: tuple[int, ...],
    num_inner: int,
    num_tokens: int,
    rank: int,
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
) -> None:
    num_slots, num_outputs = 8, sum(sizes)
    a, b = _meta(num_slots, len(sizes), rank, num_inner, dtype=dtype), _meta(num_slots, rank, num_outputs, dtype=dtype)
    weights = LoraWeights(a, b, _meta(num_slots, len(sizes), dtype=torch.int32), sizes)
    lists, x = _lists(num_tokens, num_slots), _meta(num_tokens, num_inner, dtype=dtype)
    out = _meta(num_tokens, num_outputs, dtype=dtype)
    if is_gated:
        sums = _meta(num_sums(lists, num_inner), num_tokens, len(sizes) * rank, dtype=torch.float32)
        lora.lora_gated(out, sums, weights, lists, "silu")
    else:
        lora.lora_add(out, lora.lora_shrink(x, weights, lists), weights, lists)


def _lists(num_tokens: int, num_slots: int) -> LoraLists:
    return make_lists(lambda shape, dtype: _meta(*shape, dtype=getattr(torch, dtype)), num_tokens, num_slots)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
