"""Attention over latents in the absorbed form is that of the keys and values that the latents stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millrace.kernels.reference.attention import paged_attention, paged_decode
from millrace.kernels.reference.latents import latent_prologue, latent_values
from millrace.model.decoder.rope import rope_tables
from millrace.model.rope_config import RopeConfig

HEADS, PLAIN, ROTATED, RANK, VALUE, SCALE = 3, 5, 4, 7, 6, 0.3
BLOCK_SIZE, NUM_BLOCKS = 4, 9
ROPE = RopeConfig(dim=ROTATED, original_max_position=64)
COS, SIN = (torch.from_numpy(table) for table in rope_tables(ROPE, 32))
DRAWS = torch.Generator().manual_seed(3)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAWS)


KEY_UP, VALUE_UP = drawn(HEADS, PLAIN, RANK), drawn(HEADS, VALUE, RANK)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [T, ..., E] rotated by complex numbers."""
    pairs = torch.complex(x[..., : ROTATED // 2], x[..., ROTATED // 2 :])
    angles = torch.complex(COS[positions], SIN[positions])
    pairs = pairs * angles.view(len(x), *[1] * (x.dim() - 2), -1)
    return torch.cat((pairs.real, pairs.imag), -1)


def expanded(q: Tensor, latents: Tensor, rotated: Tensor) -> Tensor:
    """Attention of one sequence over the keys and values of all heads, [T, H * W], in float64."""
    positions = torch.arange(len(q))
    keys = torch.einsum("tr,har->tha", latents, KEY_UP)
    keys = torch.cat((keys, turned(rotated, positions)[:, None].expand(-1, HEADS, -1)), -1)
    values = torch.einsum("tr,hwr->thw", latents, VALUE_UP)
    q = torch.cat((q[..., :PLAIN], turned(q[..., PLAIN:], positions)), -1)
    scores = torch.einsum("thd,shd->hts", q.double(), keys.double()) * SCALE
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), float("-inf"))
    return torch.einsum("hts,shw->thw", scores.softmax(-1), values.double()).flatten(1).float()


@pytest.mark.parametrize("chunk", [1, 5, 11])
def test_tokens_see_what_the_expanded_form_sees(chunk: int) -> None:
    num_tokens, table = 11, torch.tensor([[7, 2, 5]], dtype=torch.int32)
    q, latents = drawn(num_tokens, HEADS, PLAIN + ROTATED), drawn(num_tokens, RANK)
    rotated = drawn(num_tokens, 2 * ROTATED)[:, ::2]
    cache = torch.full((NUM_BLOCKS, 1, BLOCK_SIZE, RANK + ROTATED), float("nan"))
    found = []
    for start in range(0, num_tokens, chunk):
        positions = torch.arange(start, min(start + chunk, num_tokens))
        slots = table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        new = slice(start, start + chunk)
        places = (KEY_UP, COS, SIN, positions, cache, slots)
        absorbed = latent_prologue(q[new], latents[new], rotated[new], *places)
        lengths = torch.tensor([int(positions[-1]) + 1], dtype=torch.int32)
        starts = torch.tensor([0, len(positions)], dtype=torch.int32)
        if chunk == 1:
            seen = paged_decode(absorbed, cache, cache, table, lengths, SCALE)
        else:
            seen = paged_attention(absorbed, cache, cache, table, starts, lengths, SCALE)
        found.append(latent_values(seen, VALUE_UP))
    torch.testing.assert_close(torch.cat(found), expanded(q, latents, rotated), rtol=1e-5, atol=1e-5)


def test_a_token_without_a_slot_writes_nothing() -> None:
    cache = torch.zeros(2, 1, BLOCK_SIZE, RANK + ROTATED)
    tokens = drawn(2, HEADS, PLAIN + ROTATED), drawn(2, RANK), drawn(2, ROTATED)
    q = tokens[0].clone()
    latent_prologue(*tokens, KEY_UP, COS, SIN, torch.tensor([0, 3]), cache, torch.tensor([-1, 6]))
    written = cache.abs().sum(-1).flatten().nonzero().flatten().tolist()
    assert written == [6]
    torch.testing.assert_close(cache[1, 0, 2, :RANK], tokens[1][1])
    assert torch.equal(tokens[0], q), "the queries of the caller have changed"
