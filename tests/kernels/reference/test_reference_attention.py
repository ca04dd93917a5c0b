"""The PyTorch twins of attention against the definition in float64, on poisoned caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.kernels.reference import attention as reference
from millrace.kernels.reference.attention_prologue import write_kv
from millrace.kernels.reference.kv_gather import GatherBucket, gather, run_of
from tests.kernels.paged import LAYOUTS, PagedCase, dense_attention, make_case

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def decode(case: PagedCase, scale: float, window: int | None = None) -> torch.Tensor:
    return reference.paged_decode(case.q, case.k_cache, case.v_cache, case.block_tables, case.lengths, scale, window)


def attend(case: PagedCase, scale: float, window: int | None = None) -> torch.Tensor:
    return reference.paged_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, scale, window
    )


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128, 256])
def test_decode_is_attention_for_every_head_size(head_dim: int) -> None:
    case = make_case([1] * 5, [1, 3, 4, 5, 17], head_dim=head_dim, num_groups=3, group=3)
    assert_close(decode(case, head_dim**-0.5), dense_attention(case, head_dim**-0.5))


@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128, 256])
def test_extend_is_attention_for_every_head_size(head_dim: int) -> None:
    case = make_case([4, 5, 1, 3], [4, 13, 9, 3], head_dim=head_dim, num_groups=3, group=3)
    assert_close(attend(case, head_dim**-0.5), dense_attention(case, head_dim**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_cache_gives_the_same_attention(layout: str, dtype: torch.dtype) -> None:
    case = make_case([1, 1, 6, 2, 1], [9, 1, 11, 2, 4], layout=layout, dtype=dtype)
    assert_close(attend(case, 0.25), dense_attention(case, 0.25))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_one_block_and_one_group_are_no_special_case(layout: str, num_groups: int) -> None:
    case = make_case([1], [1], num_groups=num_groups, block_size=1, layout=layout)
    assert_close(decode(case, 1.0), dense_attention(case, 1.0))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_follow_each_other_give_the_same_attention_and_are_not_copied(
    layout: str, num_new: int, window: int | None
) -> None:
    case = make_case([num_new], [14], layout=layout, is_scattered=False)
    blocks = case.block_tables[:1, :4].long()
    is_one_piece = layout in ("head-major", "token-major")
    assert run_of(case.k_cache, case.v_cache, blocks) == (1 if is_one_piece else None)
    assert run_of(case.k_cache, case.v_cache, blocks.flip(1)) is None
    assert_close(attend(case, 0.25, window), dense_attention(case, 0.25, window))
    if is_one_piece:
        keys, _ = gather(case.k_cache, case.v_cache, GatherBucket(None, None, blocks, 2, 14, run=1))
        assert keys.data_ptr() == case.k_cache[1, 0, 2].data_ptr()
        assert torch.equal(keys[0].transpose(0, 1), case.keys[0][2:])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_lengths_around_a_block_edge(block_size: int) -> None:
    around = [length for length in (block_size - 1, block_size, block_size + 1, 2 * block_size) if length]
    case = make_case([1] * len(around), around, block_size=block_size)
    assert_close(decode(case, 0.25), dense_attention(case, 0.25))


def test_padding_rows_are_zero_and_do_not_disturb_others() -> None:
    case = make_case([1, 1, 1, 1], [0, 5, 0, 9])
    got = decode(case, 0.25)
    assert not got[0].any()
    assert not got[2].any()
    assert_close(got, dense_attention(case, 0.25))


def test_a_batch_of_padding_alone_is_zero() -> None:
    case = make_case([1, 1], [0, 0])
    assert torch.equal(decode(case, 0.25), torch.zeros_like(case.q))
    assert torch.equal(attend(case, 0.25), torch.zeros_like(case.q))


def test_no_sequences_and_no_tokens_give_empty_results() -> None:
    case = make_case([], [])
    assert decode(case, 0.25).shape == case.q.shape == (0, 4, 16)
    assert attend(case, 0.25).shape == (0, 4, 16)


def test_rows_past_the_last_sequence_are_zero() -> None:
    case = make_case([2, 3], [6, 3])
    padded = torch.cat([case.q, torch.full((4, *case.q.shape[1:]), float("nan"))])
    got = reference.paged_attention(
        padded, case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, 0.25
    )
    assert_close(got[:5], dense_attention(case, 0.25))
    assert not got[5:].any()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 100])
def test_a_window_sees_its_last_tokens_the_new_one_included(window: int) -> None:
    decoding = make_case([1] * 5, [1, 4, 5, 9, 21])
    assert_close(decode(decoding, 0.25, window), dense_attention(decoding, 0.25, window))
    mixed = make_case([7, 1, 3, 9], [7, 12, 13, 20])
    assert_close(attend(mixed, 0.25, window), dense_attention(mixed, 0.25, window))


def test_blocks_that_left_the_window_are_not_read() -> None:
    case = make_case([1, 3], [13, 14])
    want = dense_attention(case, 0.25, 5)
    case.block_tables[:, 0] = -7  # freed: tokens 0 to 3
    assert_close(attend(case, 0.25, 5), want)


def test_queries_may_be_views_of_a_fused_projection() -> None:
    case = make_case([1, 4, 1], [8, 9, 3])
    fused = torch.cat([case.q, torch.full_like(case.q, float("nan"))], dim=1)
    got = reference.paged_attention(
        fused[:, :4], case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, 0.25
    )
    assert_close(got, dense_attention(case, 0.25))


@pytest.mark.parametrize("window", [None, 300])
def test_a_prompt_longer_than_a_query_tile(window: int | None) -> None:
    num_new = reference.QUERY_TILE + 9
    case = make_case([num_new], [num_new + 31], num_groups=1, head_dim=8, block_size=16)
    assert_close(attend(case, 0.3, window), dense_attention(case, 0.3, window))


def test_chunked_prefill_equals_prefill_at_once() -> None:
    whole = make_case([13], [13])
    want = attend(whole, 0.25)
    for start, end in ((0, 5), (5, 6), (6, 13)):
        got = reference.paged_attention(
            whole.q[start:end],
            whole.k_cache,
            whole.v_cache,
            whole.block_tables,
            torch.tensor([0, end - start], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            0.25,
        )
        torch.testing.assert_close(got, want[start:end], rtol=1e-6, atol=1e-6)


def test_changing_tables_or_lengths_in_place_changes_the_result() -> None:
    case = make_case([1, 1], [8, 7])
    assert_close(decode(case, 0.25), dense_attention(case, 0.25))
    case.block_tables.copy_(case.block_tables.flip(0))
    case.lengths.copy_(case.lengths.flip(0))
    case.keys.reverse()
    case.values.reverse()
    assert_close(decode(case, 0.25), dense_attention(case, 0.25))
    case.lengths[1] = 3
    case.keys[1], case.values[1] = case.keys[1][:3], case.values[1][:3]
    assert_close(decode(case, 0.25), dense_attention(case, 0.25))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mix_of_sequences_is_attention(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=8), "lengths")
    num_new = [data.draw(st.integers(0, min(length, 9)), "new tokens") for length in lengths]
    case = make_case(
        num_new,
        lengths,
        num_groups=data.draw(st.integers(1, 3), "groups"),
        group=data.draw(st.integers(1, 4), "heads a group"),
        head_dim=data.draw(st.sampled_from([8, 16, 24]), "head size"),
        block_size=data.draw(st.sampled_from([1, 4, 16]), "block size"),
        layout=data.draw(st.sampled_from(LAYOUTS), "layout"),
        seed=data.draw(st.integers(0, 1 << 16), "seed"),
    )
    window = data.draw(st.none() | st.integers(1, 45), "window")
    assert_close(attend(case, 0.25, window), dense_attention(case, 0.25, window))


def test_offsets_beyond_two_to_the_31_elements_are_reached() -> None:
    # [N, 2, G, B, D] of 4 GiB, of which only the touched pages ever exist.
    num_blocks = (1 << 31) // (2 * 16 * 64) + 2
    kv = torch.empty(num_blocks, 2, 1, 16, 64, dtype=torch.float16)
    k_cache, v_cache = kv[:, 0], kv[:, 1]
    last = num_blocks - 1
    k, v = torch.randn(3, 1, 64).half(), torch.randn(3, 1, 64).half()
    write_kv(k, v, k_cache, v_cache, torch.arange(3) + last * 16)
    assert torch.equal(kv[last, 0, 0, :3], k[:, 0])
    q = torch.randn(1, 2, 64).half()
    tables, length = torch.tensor([[last]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    got = reference.paged_decode(q, k_cache, v_cache, tables, length, 0.125)
    scores = torch.einsum("hd,ld->hl", q[0].double(), k[:, 0].double()) * 0.125
    want = scores.softmax(-1) @ v[:, 0].double()
    torch.testing.assert_close(got[0].double(), want, rtol=2e-3, atol=2e-3)


# ---- what PyTorch's own attention lacks -----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_new", [[1, 1, 1], [1, 4, 3]])
def test_a_soft_cap_bends_scores(num_new: list[int], window: int | None) -> None:
    case = make_case(num_new, [9, 12, 3])
    arguments = (case.k_cache, case.v_cache, case.block_tables)
    if num_new[1] == 1:
        got = reference.paged_decode(case.q, *arguments, case.lengths, 0.5, window, soft_cap=2.0)
    else:
        got = reference.paged_attention(case.q, *arguments, case.query_starts, case.lengths, 0.5, window, soft_cap=2.0)
    assert_close(got, dense_attention(case, 0.5, window, 2.0))
    assert not torch.allclose(got.double(), dense_attention(case, 0.5, window), atol=1e-3)


def test_a_cache_in_8_bits_stands_for_its_numbers_times_a_scale() -> None:
    case = make_case([1, 4, 0], [9, 12, 0])
    scales = torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])
    small = [cache.to(torch.float8_e4m3fn) for cache in (case.k_cache, case.v_cache)]
    for kept, scale in zip((case.keys, case.values), scales, strict=True):
        kept[:] = [tokens.to(torch.float8_e4m3fn).float() * scale[:, None] for tokens in kept]
    got = reference.paged_attention(
        case.q, *small, case.block_tables, case.query_starts, case.lengths, 0.25, k_scale=scales[0], v_scale=scales[1]
    )
    assert_close(got, dense_attention(case, 0.25))
