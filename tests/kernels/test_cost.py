"""The floors of GPU kernels, on numbers one can check by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.kernels import cost


@given(st.integers(0, 30), st.integers(0, 30), st.none() | st.integers(1, 70))
def test_seen_pairs_counts_what_each_new_token_sees(num_new: int, num_before: int, window: int | None) -> None:
    length = num_before + num_new
    seen = [num_before + j + 1 for j in range(num_new)]
    want = sum(seen) if window is None else sum(min(count, window) for count in seen)
    assert cost.seen_pairs(num_new, length, window) == want


def test_decode_reads_its_cached_tokens_once_a_group() -> None:
    # 2 sequences of 10 and 3 tokens, 4 heads on 2, D = 8, bf16: 13 tokens x K and V x 2 groups x 8 x 2 bytes.
    work = cost.paged_decode([10, 3, 0], 4, 2, 8, 4, 2)
    assert work.num_bytes == 13 * 2 * 2 * 8 * 2 + 2 * 2 * 4 * 8 * 2 + 4 * (3 + 1 + 2 * 3)
    assert work.num_flops == 4 * 13 * 4 * 8


def test_a_window_bounds_the_bytes_of_decode() -> None:
    narrow, wide = (cost.paged_decode([length], 4, 2, 8, 4, 2, window=64) for length in (64, 6400))
    assert narrow == wide


def test_decode_of_an_8b_layer_is_bound_by_memory() -> None:
    # Llama-3.1-8B, 64 sequences of 1,024: 268 MB of keys and values a layer, 62 us at 4.3 TB/s.
    work = cost.paged_decode([1024] * 64, 32, 8, 128, 16, 2)
    assert work.num_bytes == 64 * 1024 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2 + 4 * 64 * (64 + 2)
    assert round(work.floor_s(4.3e12, 790e12) * 1e6, 1) == round(work.num_bytes / 4.3e12 * 1e6, 1) == 62.7


def test_prefill_of_a_long_prompt_is_bound_by_arithmetic() -> None:
    work = cost.paged_attention([8192], [8192], 32, 8, 128, 16, 2)
    assert work.num_flops == 4 * 8192 * 8193 // 2 * 32 * 128
    assert work.floor_s(4.3e12, 790e12) == work.num_flops / 790e12


def test_small_kernels_move_what_they_read_and_write() -> None:
    assert cost.rms_norm(3, 10, 2).num_bytes == (30 + 30 + 10) * 2
    assert cost.add_rms_norm(3, 10, 2).num_bytes == (4 * 30 + 10) * 2
    assert cost.silu_mul(3, 10, 4).num_bytes == (60 + 30) * 4
    assert cost.copy_blocks(3, 100).num_bytes == 3 * (100 + 100 + 8 + 8)


def test_the_prologue_reads_a_projection_once_and_writes_queries_and_cache() -> None:
    # 3 tokens, 4 heads on 2 of 8 numbers, bf16 in a bf16 cache: all is read and written once.
    plain = cost.attention_prologue(3, 4, 2, 8, 8, 2, 2)
    assert plain.num_bytes == 2 * (3 * 8 * 8 * 2) + 3 * (8 * 4 + 16)
    assert plain.num_flops == 3 * 6 * 8 * 3
    # 4 of the 8 numbers turn: the other half of a query stays where it is, unread.
    partly = cost.attention_prologue(3, 4, 2, 8, 4, 2, 2)
    assert plain.num_bytes - partly.num_bytes == 3 * (2 * 4 * 4 * 2 + 4 * 4)
    # An fp8 cache takes a byte less for each key and value; norms read a weight each.
    normed = cost.attention_prologue(3, 4, 2, 8, 4, 2, 1, has_norms=True)
    assert normed.num_bytes == plain.num_bytes - 3 * (2 * 2 * 8 + 4 * 4) + 2 * 8 * 2


def test_costs_add_up() -> None:
    assert cost.Cost(1, 2) + cost.Cost(10, 20) == cost.Cost(11, 22)
