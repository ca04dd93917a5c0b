"""The Triton kernels of attention over latents against their twins, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_latents.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels.reference import latents as reference
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.latents import launches
from tests.counts import FULL

PLAIN, RANK, EXTRA, BLOCK, NUM_BLOCKS, LAYERS = 10, 24, 6, 4, 12, 2
LENGTHS = [9, 3, 5, 1]  # tokens in the cache, of which the last are new
NEW = {"decode": [1, 1, 1, 1], "mixed": [4, 1, 5, 1]}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def step(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Positions and slots of new tokens, block tables, starts and lengths; a row of padding is the last."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    tables = order.view(4, 3)
    places = [torch.arange(length - new, length) for length, new in zip(LENGTHS, NEW[name], strict=True)]
    slots = [tables[row, at // BLOCK].long() * BLOCK + at % BLOCK for row, at in enumerate(places)]
    starts = torch.tensor([0, *NEW[name], 0]).cumsum(0).int()
    padded = torch.cat((tables, tables[:1]))
    return torch.cat(places), torch.cat(slots), padded, starts, torch.tensor([*LENGTHS, 0]).int()


@pytest.mark.parametrize("num_heads", [6, *[34, 1] * FULL])  # 34: 17 groups of 2, as no tile has 17 heads
@pytest.mark.parametrize("name", NEW)
def test_a_step_writes_and_sees_the_latents_that_the_twins_do(name: str, num_heads: int) -> None:
    positions, slots, tables, starts, lengths = step(name)
    count, width = len(positions), RANK + EXTRA
    joined = drawn(count, width)
    angle = drawn(16, EXTRA // 2)
    inputs = drawn(count, num_heads, PLAIN + EXTRA), joined[:, :RANK].contiguous(), joined[:, RANK:]
    places = drawn(num_heads, PLAIN, RANK), angle.cos(), angle.sin(), positions, slots
    memory = drawn(NUM_BLOCKS, LAYERS, 1, 1, BLOCK, width)  # other layers', too
    found = []
    for kernels, own in ((launches, memory), (reference, memory.clone())):
        cache: Any = own[:, 1, 0]  # [N, 1, B, R + E]
        q = kernels.latent_prologue(*inputs, *places[:-1], cache, slots)
        if name == "decode":
            q, query_starts = torch.cat((q, q[:1])), None
        else:
            query_starts = starts
        seen = kernels.latent_attention(q, cache, RANK, tables, query_starts, lengths, 0.3)[..., :RANK]
        found.append((q, own, seen, kernels.latent_values(seen, drawn(num_heads, 7, RANK))))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_tokens_without_a_place_write_nothing() -> None:
    cache, angle = torch.full((2, 1, BLOCK, RANK + EXTRA), torch.nan), drawn(16, EXTRA // 2)
    inputs = drawn(2, 3, PLAIN + EXTRA), drawn(2, RANK), drawn(2, EXTRA), drawn(3, PLAIN, RANK)
    launches.latent_prologue(*inputs, angle, angle, torch.tensor([3, 0]), cache, torch.tensor([-1, 6]))
    assert not cache[1, 0, 2].isnan().any() and int(cache.isnan().sum()) == 7 * (RANK + EXTRA)
