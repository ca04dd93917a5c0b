"""The Triton kernels of recurrent layers against their twins, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_recurrent.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels.reference import recurrent as reference
from millrace.kernels.reference.recurrent import SequenceRows
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.recurrent import launches
from tests.counts import FULL

NUM_SLOTS, GROUPS, HEADS = 5, 2, 4
COUNTS = {  # new tokens of each sequence
    "single tokens": [1, 1, 1],
    "prompts": [3, 9, 1],
    "one long": [16],
}
CHUNKED = {  # with those of few tokens beside them
    "some prompts": [1, 70, 16, 17],
    "prompts of whole chunks": [64, 128, *[64] * FULL],
}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def rows_of(counts: list[int]) -> SequenceRows:
    """Sequences in slots from the last on; the second one goes on, or of one alone that."""
    slots = torch.arange(NUM_SLOTS - 1, NUM_SLOTS - 1 - len(counts), -1)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor(counts, dtype=torch.int32)
    lengths[min(1, len(counts) - 1)] += 7
    return SequenceRows(slots, starts, lengths)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_a_convolution_and_what_slots_keep_are_the_twins(name: str, has_bias: bool) -> None:
    rows, channels, width = rows_of(COUNTS[name]), 37, 4
    x, weight = drawn(sum(COUNTS[name]), channels + 3)[:, 3:], drawn(channels, width)
    bias = drawn(channels) if has_bias else None
    memory = drawn(NUM_SLOTS, 2, width - 1, channels)  # of two layers
    theirs = memory.clone()
    got = launches.causal_conv(x, memory[:, 1], weight, bias, rows)
    assert_close(got, reference.causal_conv(x, theirs[:, 1], weight, bias, rows))
    assert torch.equal(memory, theirs)


@pytest.mark.parametrize("is_delta", [True, False])
def test_what_a_recurrence_reads_of_products_is_the_twins(is_delta: bool) -> None:
    key_dim, value_dim, count = 20, 24, 3
    joined = drawn(count, 2 * GROUPS * key_dim + HEADS * value_dim + 2 * HEADS + 3).half()[:, 3:]
    mixed = joined[:, : -2 * HEADS].float()
    step, rate = joined[:, -2 * HEADS : -HEADS] * 4 - 6, joined[:, -HEADS:]  # of exponents that are small, too
    places = -drawn(HEADS).exp(), drawn(HEADS).flip(0)
    for kernels in (launches, reference):
        if is_delta:
            found = kernels.delta_inputs(mixed, step, rate, *places, GROUPS, key_dim)  # type: ignore[attr-defined]
        else:
            found = kernels.mamba_inputs(mixed, step, *places, (0.001, 0.5), GROUPS, key_dim)  # type: ignore[attr-defined]
        if kernels is launches:
            got = found
    for ours, theirs in zip(got, found, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("is_gated_first", [True, False])
def test_a_gated_norm_is_the_twins(is_gated_first: bool) -> None:
    x, joined = drawn(3, 4, 20), drawn(3, 83).half()
    for weight in (drawn(80), drawn(20).half()):
        got, want = (
            one.gated_norm(x, joined[:, 3:], weight, 1e-5, is_gated_first=is_gated_first)
            for one in (launches, reference)
        )
        assert got.dtype == want.dtype == torch.float16
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("name", COUNTS)
def test_a_recurrence_and_its_states_are_the_twins(name: str, is_delta: bool) -> None:
    rows, count = rows_of(COUNTS[name]), sum(COUNTS[name])
    for key_dim, value_dim in ((20, 24), *([(16, 16), (3, 5), (64, 72)] if FULL else [])):
        q, k = drawn(count, GROUPS, key_dim), reference.unit(drawn(count, GROUPS, key_dim).flip(0))
        v, log_decay = drawn(count, HEADS, value_dim), -drawn(count, HEADS).exp()
        beta = drawn(count, HEADS).sigmoid() if is_delta else None
        states = drawn(NUM_SLOTS, 2, HEADS, key_dim, value_dim)
        theirs = states.clone()
        got = launches.recur(states[:, 1], q, k, v, log_decay, beta, rows)
        assert_close(got, reference.recur(theirs[:, 1], q, k, v, log_decay, beta, rows))
        assert_close(states, theirs)


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("name", CHUNKED)
def test_prompts_in_chunks_have_the_numbers_and_states_of_the_twins(name: str, is_delta: bool) -> None:
    """With padding, and with keys that are much alike, where an inverse by powers would lose all digits."""
    counts, (key_dim, value_dim) = CHUNKED[name], (20, 40)
    rows, count = rows_of(counts), sum(counts) + 3
    q = drawn(count, GROUPS, key_dim)
    k = reference.unit(drawn(count, GROUPS, key_dim).flip(0) * 0.3 + 1)
    v, log_decay = drawn(count, HEADS, value_dim), -drawn(count, HEADS).exp() * 0.02
    beta = (drawn(count, HEADS) + 2).sigmoid() if is_delta else None
    states = drawn(NUM_SLOTS, 2, HEADS, key_dim, value_dim)
    theirs = states.clone()
    got = launches.recur(states[:, 1], q, k, v, log_decay, beta, rows)
    want = reference.recur(theirs[:, 1], q, k, v, log_decay, beta, rows)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(states, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("count", "is_fixed"), [(9, False), (30, True)])
def test_a_prompt_in_two_steps_has_the_bits_of_one(count: int, is_fixed: bool) -> None:
    x, weight, q, k = drawn(count, 8), drawn(8, 4), drawn(count, 1, 5), drawn(count, 1, 5).flip(0)
    v, log_decay, beta = drawn(count, 2, 6), -drawn(count, 2).exp(), drawn(count, 2).sigmoid()

    def run(*cuts: int) -> list[Tensor]:
        tails, states, found = torch.full((1, 3, 8), torch.nan), torch.full((1, 2, 5, 6), torch.nan), []
        for begin, end in pairwise((0, *cuts, count)):
            starts, lengths = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
            rows = SequenceRows(torch.tensor([0]), starts, lengths, is_fixed)
            part = slice(begin, end)
            conv = launches.causal_conv(x[part], tails, weight, None, rows)
            out = launches.recur(states, q[part], k[part], v[part], log_decay[part], beta[part], rows)
            found.append(torch.cat([conv, out.flatten(1)], 1))
        return [torch.cat(found), tails, states]

    for whole, other in zip(run(), run(2, 7), strict=True):
        assert torch.equal(whole, other)


@pytest.mark.parametrize("kernels", [launches, reference], ids=["triton", "twins"])
def test_slots_without_new_tokens_are_left_alone_and_padding_gives_numbers(kernels: Any) -> None:
    """A padded step: of two sequences, and of two tokens behind those of the first."""
    rows = SequenceRows(torch.tensor([3, 0, 0]), torch.tensor([0, 2, 2, 2]).int(), torch.tensor([2, 0, 0]).int())
    tails, states = torch.full((NUM_SLOTS, 3, 8), torch.nan), torch.full((NUM_SLOTS, HEADS, 4, 4), torch.nan)
    conv = kernels.causal_conv(drawn(4, 8), tails, drawn(8, 4), None, rows)
    heads = drawn(4, 2, 4), drawn(4, 2, 4), drawn(4, 4, 4), -drawn(4, 4).exp(), None
    out = kernels.recur(states, *heads, rows)
    assert conv.isfinite().all() and out.isfinite().all() and out[:2].all()
    for memory in (tails, states):
        assert not memory[3].isnan().any() and memory[[0, 1, 2, 4]].isnan().all()
