"""The Triton kernels of LoRA against their twins and float64, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_lora.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millrace.kernels.layout.layer_options import Activation
from millrace.kernels.layout.lora_lists import (
    FEW_TILE,
    FEW_TOKENS,
    LoraLists,
    LoraWeights,
    chunk_size,
    make_lists,
    num_chunks,
)
from millrace.kernels.reference import layers, lora_slots
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.lora import launches as lora

IS_FULL = os.environ.get("MILLRACE_FULL") == "1"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def listed(adapters: Sequence[int], num_slots: int, group: Callable[[Tensor, LoraLists], None]) -> LoraLists:
    """The lists of tokens, in memory for more of them that holds other numbers."""
    lists = make_lists(zeros, len(adapters) + 40, num_slots)
    for memory in (lists.order, lists.tiles, lists.counts, lists.begins):
        memory.fill_(-7)
    lists = lists.of(len(adapters))
    group(torch.tensor(adapters, dtype=torch.int32), lists)
    return lists


def made(ranks: list[list[int]], sizes: tuple[int, ...], num_inner: int, dtype: torch.dtype) -> LoraWeights:
    """Matrices of adapters, with no number beyond a rank."""
    torch.manual_seed(num_inner)
    most, num_slots, num_parts = max(max(row) for row in ranks), len(ranks), len(sizes)
    a = (torch.randn(num_slots, num_parts, most, num_inner) * num_inner**-0.5).to(dtype)
    b = torch.randn(num_slots, most, sum(sizes)).to(dtype)
    for slot, row in enumerate(ranks):
        for part, rank in enumerate(row):
            a[slot, part, rank:] = torch.nan
            b[slot, rank:, sum(sizes[:part]) : sum(sizes[: part + 1])] = torch.nan
    return LoraWeights(a, b, torch.tensor(ranks, dtype=torch.int32), sizes)


def exact(x: Tensor, adapters: Sequence[int], weights: LoraWeights) -> Tensor:
    """The updates of all tokens in float64, [T, M]."""
    update = torch.zeros(len(x), sum(weights.sizes), dtype=torch.float64)
    for token, slot in enumerate(adapters):
        for part, rank in enumerate(weights.ranks[slot - 1].tolist() if slot else []):
            columns = slice(sum(weights.sizes[:part]), sum(weights.sizes[: part + 1]))
            a, b = weights.a[slot - 1, part, :rank].double(), weights.b[slot - 1, :rank, columns].double()
            update[token, columns] = (x[token].double() @ a.t()) @ b
    return update


MIXES: dict[str, tuple[list[int], int]] = {
    "no token": ([], 2),
    "base alone": ([0] * 3, 2),
    "one token": ([2], 2),
    "base among others": ([0, 3, 0, 1, 1, 0, 3, 3, 0], 3),
    "all of one": ([1] * 33, 1),
    "every slot": ([*range(6)] * 3, 5),
    "more than a tile": ([0] * 20 + [2, 1] * 25, 2),
}


@pytest.mark.parametrize("mix", MIXES)
def test_lists_are_the_twins_number_by_number(mix: str) -> None:
    adapters, num_slots = MIXES[mix]
    got, want = (listed(adapters, num_slots, each.group_tokens) for each in (lora, lora_slots))
    assert torch.equal(got.counts, want.counts) and torch.equal(got.order, want.order)
    num_tiles = int(want.counts[1])
    assert torch.equal(got.tiles[:num_tiles], want.tiles[:num_tiles])
    assert num_tiles <= got.most_tiles and sorted(got.order.tolist()) == [*range(len(adapters))]
    for slot, begin, count in got.tiles[:num_tiles].tolist():
        assert 0 < count <= FEW_TILE
        assert {adapters[token] for token in got.order[begin : begin + count].tolist()} == {slot}


def test_lists_of_a_large_step_have_larger_tiles() -> None:
    adapters = [token % 3 for token in range(FEW_TOKENS + 1)]
    got, want = (listed(adapters, 2, each.group_tokens) for each in (lora, lora_slots))
    assert torch.equal(got.order, want.order) and torch.equal(got.counts, want.counts)
    assert got.counts.tolist() == [6, 9] and got.most_tiles == 11


CASES = {  # tokens' adapters, ranks by slot and part, sizes of parts, K
    "one row": ([1], [[8, 8, 8]], (40, 8, 8), 48),
    "rank 1 and base rows": ([0, 1, 0], [[1]], (33,), 300),
    "ranks that differ": ([3, 0, 1, 2, 3], [[3, 0, 17], [0, 8, 1], [17, 17, 17]], (24, 9, 9), 96),
    "33 rows": ([1] * 33, [[8]], (130,), 20),
    "rank 64": ([2, 1, 2], [[0], [64]], (40,), 40),
}
FULL_CASES = {
    f"{rows} rows of {spread}, rank {rank}": (
        [spread and index % (spread + 1) for index in range(rows)],
        [[rank, max(1, rank // 2), 0]] * max(1, spread),
        (136, 24, 24),
        600,
    )
    for rows in (1, 3, 33)
    for spread in (0, 1, 4)
    for rank in (1, 3, 8, 17, 64)
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *(FULL_CASES if IS_FULL else ())])
def test_updates_are_those_of_float64_and_leave_other_rows(case: str, dtype: torch.dtype) -> None:
    adapters, ranks, sizes, num_inner = (CASES | FULL_CASES)[case]
    weights = made(ranks, sizes, num_inner, dtype)
    torch.manual_seed(1)
    x, out = torch.randn(len(adapters), num_inner).to(dtype), torch.randn(len(adapters), sum(sizes)).to(dtype)
    want = out.double() + exact(x, adapters, weights)
    before = out.clone()
    lists = listed(adapters, len(ranks), lora.group_tokens)
    lora.lora_add(out, lora.lora_shrink(x, weights, lists), weights, lists)
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    base = [token for token, slot in enumerate(adapters) if not slot]
    assert torch.equal(out[base], before[base])
    lora_slots.lora_add(before, lora_slots.lora_shrink(x, weights, lists), weights, lists)
    torch.testing.assert_close(before.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("activation", "dtype"), [("silu", torch.float16), ("swiglu_clamped", torch.float32)])
def test_a_gated_product_takes_updates_before_its_activation(activation: Activation, dtype: torch.dtype) -> None:
    adapters = [2, 0, 1, 3, 0]
    weights = made([[5, 0], [3, 17], [0, 2]], (70, 70), 64, dtype)
    torch.manual_seed(1)
    x, product = torch.randn(5, 64).to(dtype), torch.randn(5, 140).to(dtype)
    want = layers.gated((product.double() + exact(x, adapters, weights)).to(dtype), activation, 1.5, 3.0)
    for kernels in (lora, lora_slots):
        lists = listed(adapters, 3, kernels.group_tokens)
        sums = kernels.lora_shrink(x, weights, lists)
        got = kernels.lora_gated(product.clone(), sums, weights, lists, activation, 1.5, 3.0)
        torch.testing.assert_close(got, want, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def test_steps_without_rows_or_without_adapters_change_nothing() -> None:
    weights = made([[4]], (24,), 40, torch.float32)
    for adapters in ([], [0, 0]):
        lists = listed(adapters, 1, lora.group_tokens)
        x, out = torch.full((len(adapters), 40), torch.nan), torch.ones(len(adapters), 24)
        lora.lora_add(out, lora.lora_shrink(x, weights, lists), weights, lists)
        assert (out == 1).all()


def test_a_row_has_equal_bits_alone_and_in_a_large_step() -> None:
    weights = made([[6], [6]], (40,), 1200, torch.float32)
    assert num_chunks(1200) == 5 and chunk_size(1200) == 256
    torch.manual_seed(1)
    x, out = torch.randn(FEW_TOKENS + 1, 1200), torch.randn(FEW_TOKENS + 1, 40)
    alone, few, many = out[9:10].clone(), out[:20].clone(), out.clone()
    for some, adapters in ((alone, [2]), (few, [2, 1] * 10), (many, [1] * 9 + [2] + [0] * (FEW_TOKENS - 9))):
        lists = listed(adapters, 2, lora.group_tokens)
        rows = x[9:10] if some is alone else x[: len(some)]
        if some is few:
            adapters[9] = 2
            lists = listed(adapters, 2, lora.group_tokens)
        lora.lora_add(some, lora.lora_shrink(rows, weights, lists), weights, lists)
    assert torch.equal(alone[0], few[9]) and torch.equal(alone[0], many[9])


def test_slots_and_rows_may_lie_apart() -> None:
    weights = made([[3, 2], [2, 3]], (16, 8), 32, torch.float32)
    wide, thick = torch.full((2, 2 * 3 * 32 + 24), torch.nan), torch.full((2, 3 * 24 + 16), torch.nan)
    wide[:, : 2 * 3 * 32], thick[:, : 3 * 24] = weights.a.flatten(1), weights.b.flatten(1)
    apart = replace(
        weights, a=wide[:, : 2 * 3 * 32].unflatten(1, (2, 3, 32)), b=thick[:, : 3 * 24].unflatten(1, (3, 24))
    )
    torch.manual_seed(1)
    rows, out = torch.full((3, 64), torch.nan), torch.zeros(3, 40)
    rows[:, 16:48] = torch.randn(3, 32)
    lists = listed([2, 1, 2], 2, lora.group_tokens)
    lora.lora_add(out[:, 8:32], lora.lora_shrink(rows[:, 16:48], apart, lists), apart, lists)
    want = exact(rows[:, 16:48], [2, 1, 2], weights)
    torch.testing.assert_close(out[:, 8:32].double(), want, rtol=1e-5, atol=1e-5)
    assert not out[:, :8].any() and not out[:, 32:].any()
