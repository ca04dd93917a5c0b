"""Recurrent layers: the same numbers as transformers' layers, in any chunks, in any company, and by slot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)

from millrace.kernels.reference.recurrent import SequenceRows, causal_conv, gated_norm, recur, unit

HEADS, GROUPS, KEY, VALUE, CHANNELS, WIDTH = 4, 2, 16, 8, 48, 4
NUM_SLOTS = 7


class Inputs:
    """Random inputs of one sequence."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        draws = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(num_tokens, *shape, generator=draws)

        self.x, self.q, self.k = normal(CHANNELS), normal(GROUPS, KEY), unit(normal(GROUPS, KEY))
        self.v, self.log_decay, self.beta = normal(HEADS, VALUE), -normal(HEADS).exp(), normal(HEADS).sigmoid()
        self.weight = torch.randn(CHANNELS, WIDTH, generator=draws.manual_seed(99))
        self.bias = torch.randn(CHANNELS, generator=draws)


class Slots:
    """The states of all slots, which hold NaN at first."""

    def __init__(self) -> None:
        self.tails = torch.full((NUM_SLOTS, WIDTH - 1, CHANNELS), torch.nan)
        self.matrices = torch.full((NUM_SLOTS, HEADS, KEY, VALUE), torch.nan)

    def step(self, parts: Sequence[tuple[int, Inputs, int, int]], *, has_rate: bool = True) -> list[tuple[Tensor, ...]]:
        """Computes tokens [start, end) of sequences in slots: (slot, inputs, start, end). Returns (conv, out) each."""
        counts = torch.tensor([end - start for _, _, start, end in parts])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        lengths = torch.tensor([end for *_, end in parts], dtype=torch.int32)
        rows = SequenceRows(torch.tensor([slot for slot, *_ in parts]), starts, lengths)

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(inputs, name)[start:end] for _, inputs, start, end in parts])

        conv = causal_conv(joined("x"), self.tails, parts[0][1].weight, parts[0][1].bias, rows)
        beta = joined("beta") if has_rate else None
        out = recur(self.matrices, joined("q"), joined("k"), joined("v"), joined("log_decay"), beta, rows)
        return list(zip(conv.split(counts.tolist()), out.split(counts.tolist()), strict=True))


def alone(inputs: Inputs, *, has_rate: bool = True) -> tuple[Tensor, ...]:
    """The whole sequence in one step."""
    return Slots().step([(3, inputs, 0, len(inputs.x))], has_rate=has_rate)[0]


def test_the_delta_rule_is_that_of_transformers() -> None:
    one = Inputs(19)
    batch = [part[None] for part in (one.q, one.k, one.v, one.log_decay, one.beta)]
    out, state = torch_recurrent_gated_delta_rule(*batch, output_final_state=True)
    slots = Slots()
    [(_, found)] = slots.step([(5, one, 0, 19)])
    assert torch.allclose(found * KEY**-0.5, out[0], atol=1e-5)
    assert torch.allclose(slots.matrices[5], state[0], atol=1e-5)


def test_mamba2_is_that_of_transformers_in_chunks() -> None:
    one = Inputs(37)
    step, decay, skip = one.log_decay.neg(), -torch.rand(HEADS) - 0.1, torch.zeros(HEADS)
    out = mamba2_chunk_scan(
        one.v[None], step[None], decay, one.k[None], one.q[None], chunk_size=16, D=skip, dt_softplus=False
    )
    one.v, one.log_decay = one.v * step[..., None], step * decay
    assert torch.allclose(alone(one, has_rate=False)[1], out[0], atol=1e-5)


def test_the_convolution_is_that_of_transformers() -> None:
    one = Inputs(11)
    wanted = causal_conv1d_fn(one.x.T[None], one.weight, one.bias)[0].T
    assert torch.allclose(alone(one)[0], wanted, atol=1e-5)


def test_the_gated_norm_is_that_of_transformers() -> None:
    one, norm = Inputs(5), Qwen3NextRMSNormGated(VALUE)
    gate = one.v.flip(0)
    norm.weight.data = torch.randn(VALUE, generator=torch.Generator().manual_seed(1))
    found = gated_norm(one.v, gate, norm.weight.data, 1e-6, is_gated_first=False)
    assert torch.allclose(found.view(one.v.shape), norm(one.v, gate), atol=1e-6)


@pytest.mark.parametrize("has_rate", [True, False])
@pytest.mark.parametrize("sizes", [(23,), (1,) * 23, (1, 2, 3, 17), (16, 7), (22, 1)])
def test_chunks_of_a_sequence_give_the_bits_of_the_whole(sizes: tuple[int, ...], has_rate: bool) -> None:
    one, slots, start, found = Inputs(23), Slots(), 0, []
    for size in sizes:
        found += slots.step([(2, one, start, start + size)], has_rate=has_rate)
        start += size
    for parts, whole in zip(zip(*found, strict=True), alone(one, has_rate=has_rate), strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_a_sequence_gives_the_same_bits_in_any_company() -> None:
    draws, slots = torch.Generator().manual_seed(7), Slots()
    sequences = [Inputs(length, seed) for seed, length in enumerate((1, 9, 31, 14, 5, 22))]
    at, found = [0] * len(sequences), [[] for _ in sequences]
    while any(len(one.x) > begun for one, begun in zip(sequences, at, strict=True)):
        parts = []
        for slot in torch.randperm(len(sequences), generator=draws).tolist():
            left = len(sequences[slot].x) - at[slot]
            size = min(left, int(torch.randint(0, 9, (), generator=draws)))
            if size:
                parts.append((slot, sequences[slot], at[slot], at[slot] + size))
                at[slot] += size
        if parts:
            for (slot, *_), outputs in zip(parts, slots.step(parts), strict=True):
                found[slot].append(outputs)
    for one, pieces in zip(sequences, found, strict=True):
        for parts, whole in zip(zip(*pieces, strict=True), alone(one), strict=True):
            assert torch.equal(torch.cat(parts), whole)


def test_a_sequence_begins_with_zeros_in_a_slot_that_another_left() -> None:
    first, second, slots = Inputs(6, 1), Inputs(8, 2), Slots()
    slots.step([(4, first, 0, 6)])
    [found] = slots.step([(4, second, 0, 8)])
    assert all(torch.equal(*pair) for pair in zip(found, alone(second), strict=True))


def test_other_slots_are_left_as_they_are() -> None:
    slots = Slots()
    slots.step([(0, Inputs(3), 0, 3), (6, Inputs(2, 1), 0, 2)])
    assert slots.matrices[1:6].isnan().all() and slots.tails[1:6].isnan().all()
    assert slots.matrices[[0, 6]].isfinite().all() and slots.tails[[0, 6]].isfinite().all()
