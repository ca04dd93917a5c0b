"""The Triton sampling kernels against their twins, in Triton's interpreter on the CPU: the same tokens exactly.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_sampling.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.kernels.layout import sampling_rows
from millrace.kernels.reference import sampling as reference_sampling
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton import logit_edits as triton_edits
from millrace.kernels.triton import sampling as triton_sampling
from millrace.kernels.triton import token_scores as triton_scores
from tests.kernels.sampling_cases import noise, spoil, table

DTYPES = [torch.float32, torch.float16]
SIZES = [1, 100, 4096, 8193]  # of edits
ROWS = [(1, torch.float32), (127, torch.float16), (129, torch.float32), (8193, torch.float16)]
ROUNDING = 2e-6  # of a row's probability, summed in f32
CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.02},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_n_sigma": 1.0},
    {"typical_p": 0.3},
    {"typical_p": 0.9, "top_k": 40},
    {"top_n_sigma": 2.5, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.6, "min_p": 0.01},
]


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def chosen_alike(logits: Tensor, rows: Tensor, slots: list[int], positions: list[int]) -> list[int]:
    indices = (torch.tensor(numbers, dtype=torch.int64) for numbers in (slots, positions))
    arguments = (logits, rows, *indices)
    token_ids = triton_sampling.choose(*arguments)
    assert torch.equal(token_ids, reference_sampling.choose(*arguments)) and token_ids.dtype == torch.int64
    return token_ids.tolist()


def cut_alike(
    logits: Tensor, rows: Tensor, slots: list[int], positions: list[int] | None = None
) -> tuple[list[int], Tensor]:
    """Tokens and bounds, having seen that the twin's keep the same, but for rounding, and draw the same."""
    indices = (torch.tensor(numbers, dtype=torch.int64) for numbers in (slots, positions or range(len(slots))))
    arguments = (logits, rows, *indices)
    token_ids, bounds = triton_sampling.choose_truncated(*arguments)
    want_ids, want = reference_sampling.choose_truncated(*arguments)
    wide = logits.double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    temperature = rows[slots].view(torch.float32)[:, sampling_rows.TEMPERATURE, None].double().clamp(min=1e-30)
    shares = ((wide - wide.amax(1, keepdim=True)) / temperature).softmax(1)
    is_between = ((wide >= bounds[:, :1]) & (wide <= bounds[:, 1:])) != ((wide >= want[:, :1]) & (wide <= want[:, 1:]))
    assert bool(((shares * is_between).sum(1).nan_to_num() <= ROUNDING).all())
    assert torch.equal(token_ids, want_ids) and token_ids.dtype == torch.int64
    return token_ids.tolist(), bounds[:, 0]


# ---- choosing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dtype"), ROWS)
def test_tokens_are_those_of_the_twin(size: int, dtype: torch.dtype) -> None:
    asked = [{"temperature": t, "seed": seed} for t, seed in ((0.0, 0), (1.0, 5), (0.3, -1), (20.0, 0), (1e-30, 2))]
    slots, positions = [0, 1, 2, 3, 1, 4], [0, 1, 99, 5, 6, 131_000]
    token_ids = chosen_alike(noise(6, size).to(dtype), table(*asked), slots, positions)
    assert min(token_ids) >= 0 and max(token_ids) < size


def test_tokens_of_a_vocabulary_as_large_as_they_come() -> None:
    rows = table({}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.0, "top_k": 200, "top_p": 0.7})
    logits = noise(2, 151_936)
    logits[1] /= 3
    token_ids = chosen_alike(logits, rows, [0, 1], [7, 8])
    assert token_ids[0] != token_ids[1] and max(token_ids) > 50_000
    cut_alike(logits[:1], rows, [2])


def test_what_slots_ask_for_may_lie_in_wider_rows_and_slots_be_of_32_bits() -> None:
    rows, logits = table({"temperature": 1.0, "seed": 4, "top_k": 6}, {}), noise(2, 300)
    wide = torch.full((2, 31), -1, dtype=torch.int32)
    wide[:, 5:21] = rows
    slots, positions = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    token_ids, bounds = triton_sampling.choose_truncated(logits, wide[:, 5:], slots, positions)
    want_ids, want = cut_alike(logits, rows, [1, 0], [4, 5])
    assert token_ids.tolist() == want_ids and torch.equal(bounds[:, 0], want)


def test_no_rows_give_no_tokens() -> None:
    nothing = torch.zeros(0, 100)
    assert chosen_alike(nothing, table({}), [], []) == cut_alike(nothing, table({}), [])[0] == []


@pytest.mark.parametrize("size", [100, 8193])
def test_the_lowest_id_wins_among_equals(size: int) -> None:
    logits = torch.zeros(3, size)
    logits[0, [size - 1, size // 2, size // 2 + 1]] = 3.0
    logits[1, [size - 1]] = 3.0
    assert chosen_alike(logits, table({}), [0, 0, 0], [0, 0, 0]) == [size // 2, size - 1, 0]


def test_equals_are_drawn_at_the_lowest_temperature() -> None:
    logits = torch.full((12, 300), -1e6)
    logits[:, [3, 299]] = 1e6
    assert set(chosen_alike(logits, table({"temperature": 1e-30}), [0] * 12, [*range(12)])) == {3, 299}


@pytest.mark.parametrize("size", [100, 8193])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum_are_broken_and_the_others_are_not(temperature: float, size: int) -> None:
    rows, logits = table({"temperature": temperature, "top_k": 3}), spoil(noise(5, size))
    for token_ids in (chosen_alike(logits, rows, [0] * 5, [3] * 5), cut_alike(logits, rows, [0] * 5)[0]):
        assert token_ids[0] >= 0 and token_ids[1:] == [-1, -1, -1, size // 2]


def test_padding_gets_token_0_and_is_not_broken() -> None:
    logits = torch.full((3, 100), float("nan"))
    logits[1] = noise(1, 100)
    token_ids = chosen_alike(logits, table({"temperature": 1.0}), [-1, 0, -1], [0, 4, 0])
    assert token_ids[0] == token_ids[2] == 0 < token_ids[1]


def test_a_token_depends_on_its_row_alone() -> None:
    asked = [{"temperature": 1.0, "seed": seed, "top_p": 0.9} for seed in (1, 2)]
    rows, moved, logits = table(*asked, {}), table(*asked[::-1]), noise(3, 5000)
    together = chosen_alike(logits[[2, 0, 1]], rows, [2, 0, 1], [9, 8, 7])
    alone = [chosen_alike(logits[:1], moved, [1], [8]), chosen_alike(logits[1:2], moved, [0], [7])]
    assert [[token_id] for token_id in together[1:]] == alone
    together = cut_alike(logits[[2, 0, 1]], rows, [2, 0, 1], [9, 8, 7])[0]
    alone = [cut_alike(logits[:1], moved, [1], [8])[0], cut_alike(logits[1:2], moved, [0], [7])[0]]
    assert [[token_id] for token_id in together[1:]] == alone


def test_seed_and_position_both_change_what_is_drawn() -> None:
    rows = table(*({"temperature": 1.0, "seed": seed} for seed in (0, 1, 1 << 32)))
    token_ids = chosen_alike(torch.zeros(4, 8193), rows, [0, 1, 2, 0], [0, 0, 0, 1])
    assert len(set(token_ids)) == 4


def test_logits_beyond_two_to_the_31_elements_are_reached_by_their_stride() -> None:
    apart = 1 << 31  # of two rows of float16, 4 GiB of which only the touched pages ever exist
    memory = torch.empty(apart + 200, dtype=torch.float16)
    logits = memory.as_strided((2, 100), (apart, 1))
    logits[0], logits[1] = noise(1, 100).half()[0], noise(1, 100, seed=1).half()[0]
    rows, slots, positions = table({}, {"temperature": 1.0, "top_k": 3}), torch.tensor([1, 0]), torch.tensor([4, 5])
    near = logits.clone()
    found = triton_sampling.choose_truncated(logits, rows, slots, positions)
    for mine, his in zip(found, reference_sampling.choose_truncated(near, rows, slots, positions), strict=True):
        assert torch.equal(mine, his)
    scored = triton_scores.score(logits, torch.tensor([1]), torch.tensor([0, 3]), 2)
    assert torch.equal(scored[2], near[1:].float().topk(2).indices)
    assert torch.equal(edited(logits, rows, slots), near.float())


# ---- top_k, top_p and min_p -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dtype"), ROWS)
def test_the_tokens_kept_are_those_of_a_sort(size: int, dtype: torch.dtype) -> None:
    rows = table(*({"temperature": 1.0} | cut for cut in CUTS), *({"temperature": 0.5} | cut for cut in CUTS[-3:]))
    cut_alike(noise(len(rows), size).to(dtype), rows, list(range(len(rows))))


@pytest.mark.parametrize("scale", [0.01, 20.0])
def test_the_tokens_kept_of_flat_rows_and_of_peaked_ones(scale: float) -> None:
    rows = table(*({"temperature": 1.0} | cut for cut in CUTS))
    cut_alike(noise(len(rows), 8193, scale=scale), rows, list(range(len(rows))))


def test_ties_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]] * 3)
    rows = table(*({"temperature": 1.0} | cut for cut in ({"top_k": 2}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.9})))
    assert cut_alike(logits, rows, [0, 1, 2])[1].tolist() == [1.0] * 3


def test_more_ties_than_fit_among_the_candidates_are_kept() -> None:
    logits = noise(2, 8193).clamp(max=4.0)
    logits[:, 1000 : 1005 + triton_sampling.NUM_CANDIDATES], logits[1, 5] = 4.0, 4.5
    rows = table({"temperature": 1.0, "top_k": 9}, {"temperature": 1.0, "top_k": 9, "top_p": 0.01})
    assert cut_alike(logits, rows, [0, 1])[1].tolist() == [4.0, 4.0]


def test_rows_that_keep_all_have_no_threshold() -> None:
    logits = spoil(noise(8, 100))
    logits[5, :] = -3.0
    rows = table({"temperature": 1.0}, {"top_k": 3}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5})
    found = cut_alike(logits, rows, [0, 2, 2, 2, 2, 2, 1, -1])[1].tolist()
    assert found[0] == found[2] == found[3] == found[6] == found[7] == float("-inf")
    assert found[4] == -7.0 and found[5] == -3.0


def test_signed_zeros_are_equals() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0]])
    for cut in ({"top_k": 1}, {"top_k": 3}, {"top_p": 0.2}, {"top_p": 0.8}):
        _, least = cut_alike(logits, table({"temperature": 1.0} | cut), [0])
        assert (logits >= least).tolist() == [[True, True, False, True]]


# ---- edits ----------------------------------------------------------------------------------------------------------


def edited(logits: Tensor, rows: Tensor, slots: Tensor, **more: Any) -> Tensor:
    """By the Triton kernel, having seen that the twin's are the same."""
    num_slots, size = len(rows), logits.shape[1]
    made = {
        "positions": torch.zeros(len(slots), dtype=torch.int64),
        "counts": torch.zeros(num_slots, size, dtype=torch.int16),
        "biased_ids": torch.zeros(num_slots, 1, dtype=torch.int32),
        "bias": torch.zeros(num_slots, 1),
        "end_ids": torch.zeros(num_slots, 1, dtype=torch.int32),
    } | more
    got = triton_edits.edit(logits, rows, slots, **made)
    torch.testing.assert_close(
        got, reference_sampling.edit(logits, rows, slots, **made), rtol=2e-6, atol=2e-6, equal_nan=True
    )
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_edits_at_once(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = np.random.default_rng(0)
    everything = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "num_biased": min(size, 300),
        "num_ends": 1,
    }
    rows = table(everything | {"end_position": 9}, {}, {"num_biased": 1}, {"frequency_penalty": 1.0, "end_position": 2})
    counts = np.stack([sampling_rows.count(draw.integers(0, size, 50, np.int32), 20, size) for _ in range(4)])
    biased = torch.stack([torch.from_numpy(draw.permutation(size)[: min(size, 300)].astype(np.int32))] * 4)
    words = -(-size // 32)
    edited(
        spoil(noise(6, size)).to(dtype),
        rows,
        torch.tensor([0, 1, 2, 3, -1, 0]),
        positions=torch.tensor([8, 8, 8, 8, 8, 9]),
        counts=torch.from_numpy(counts),
        biased_ids=biased,
        bias=torch.randn(4, min(size, 300), generator=generator),
        end_ids=torch.full((4, 2), size - 1, dtype=torch.int32),
        masks=torch.from_numpy(draw.integers(-(1 << 31), 1 << 31, (3, words)).astype(np.int32)),
        mask_rows=torch.tensor([2, 0, -1, 1, 1, -1]),
    )


def test_ids_that_end_a_row_are_banned_before_their_position_even_if_they_are_biased() -> None:
    rows = table({"num_ends": 2, "end_position": 5, "num_biased": 1})
    more = {"end_ids": torch.tensor([[7, 5000, 3]], dtype=torch.int32), "bias": torch.tensor([[100.0]])}
    found = edited(
        torch.zeros(2, 5001),
        rows,
        torch.tensor([0, 0]),
        positions=torch.tensor([4, 5]),
        biased_ids=torch.tensor([[7]], dtype=torch.int32),
        **more,
    )
    assert found[0].isinf().nonzero()[:, 0].tolist() == [7, 5000]
    assert found[1, 7] == 100.0 and not found[1].isinf().any()


def test_no_rows_are_edited() -> None:
    assert edited(torch.zeros(0, 10), table({}), torch.zeros(0, dtype=torch.int64)).shape == (0, 10)


def test_tokens_are_counted_where_there_is_a_penalty_and_no_further_than_a_count_goes() -> None:
    most = sampling_rows.MAX_COUNT
    rows = table({"frequency_penalty": 1.0}, {}, {"repetition_penalty": 2.0}, {"presence_penalty": 1.0})
    counts = torch.zeros(4, 6, dtype=torch.int16)
    counts[0, 2], counts[2, 5], counts[3, 0] = most, sampling_rows.IN_PROMPT, sampling_rows.IN_PROMPT + most
    theirs = counts.clone()
    slots, token_ids = torch.tensor([0, 1, 2, 3, -1]), torch.tensor([2, 2, 5, 0, 1])
    triton_edits.count_tokens(counts, rows, slots, token_ids)
    reference_sampling.count_tokens(theirs, rows, slots, token_ids)
    assert torch.equal(counts, theirs)
    assert counts[2, 5] == sampling_rows.IN_PROMPT + 1 and counts[0, 2] == most and not counts[1].any()


@pytest.mark.parametrize("num_rows", [0, 1, 3, 130])
def test_a_forced_token_replaces_a_chosen_one_and_a_forced_end_a_broken_one_too(num_rows: int) -> None:
    draw = np.random.default_rng(num_rows)
    chosen = torch.from_numpy(draw.integers(-1, 3, num_rows))
    forced = torch.from_numpy(draw.choice([-1, 7, 0, -2, -11], num_rows).astype(np.int32))
    got, want = chosen.clone(), chosen.clone()
    triton_edits.force(got, forced)
    reference_sampling.force(want, forced)
    each = zip(chosen.tolist(), forced.tolist(), strict=True)
    assert got.tolist() == [-2 - f if f < -1 else f if f >= 0 <= c else c for c, f in each] == want.tolist()


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("size", [20, 8193])
def test_logprobs_ranks_and_the_likeliest(size: int, num_top: int, dtype: torch.dtype) -> None:
    logits = noise(4, size).to(dtype)
    logits[3] = logits[3].round()  # ties
    token_ids, row_ids = torch.tensor([0, size - 1, 5, 7]), torch.tensor([3, 1, 0])
    drawn = {"rows": table({"temperature": 0.7}, {}), "slots": torch.tensor([0, 1, 0, 0])}
    for more in ({}, drawn, drawn | {"bounds": logits.float().topk(9).values[:, [8, 1]].contiguous()}):
        got = triton_scores.score(logits, row_ids, token_ids, num_top, **more)
        want = reference_sampling.score(logits, row_ids, token_ids, num_top, **more)
        for mine, his in zip(got, want, strict=True):
            torch.testing.assert_close(mine, his, rtol=1e-5, atol=1e-5)


def test_no_row_asks_for_logprobs() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert [len(x) for x in triton_scores.score(torch.zeros(2, 9), nothing, torch.zeros(2).long(), 3)] == [0] * 4


def test_logprobs_of_a_row_with_groups_of_nothing() -> None:
    logits = torch.full((1, 8193), float("-inf"))
    logits[0, [4, 8192]] = 1.0
    logprobs, ranks, top_ids, top = triton_scores.score(logits, torch.tensor([0]), torch.tensor([8192]), 3)
    assert top_ids.tolist() == [[4, 8192, 0]] and ranks.tolist() == [1]
    assert logprobs.item() == top[0, 0].item() == pytest.approx(-np.log(2)) and top[0, 2] == float("-inf")


@pytest.mark.parametrize("launch", [triton_sampling.choose, triton_sampling.choose_truncated, triton_edits.edit])
def test_bfloat16_is_refused_by_the_sampling_kernels(launch: Any) -> None:
    rows, nothing = table({}), torch.zeros(1, dtype=torch.int64)
    more = [nothing, nothing, *[torch.zeros(1, 1)] * 4]
    num_arguments = {"choose": 2, "choose_truncated": 2, "edit": 6}[launch.__name__]
    with pytest.raises(TypeError, match="interpreter cannot compute in bfloat16"):
        launch(torch.zeros(1, 8, dtype=torch.bfloat16), rows, *more[:num_arguments])
