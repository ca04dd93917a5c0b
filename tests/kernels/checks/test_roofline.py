"""The floors of GPU kernels, on numbers one can check by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.kernels.checks import roofline
from millrace.kernels.layout.list_work import list_work
from millrace.kernels.layout.work_lists import Division, WorkItem
from tests.kernels.paged import dense_attention, make_case
from tests.kernels.walked import walk


@given(st.integers(0, 30), st.integers(0, 30), st.none() | st.integers(1, 70))
def test_seen_pairs_counts_what_each_new_token_sees(num_new: int, num_before: int, window: int | None) -> None:
    length = num_before + num_new
    seen = [num_before + j + 1 for j in range(num_new)]
    want = sum(seen) if window is None else sum(min(count, window) for count in seen)
    assert roofline.seen_pairs(num_new, length, window) == want


def test_decode_reads_its_cached_tokens_once_a_group() -> None:
    # 2 sequences of 10 and 3 tokens, 4 heads on 2, D = 8, bf16: 13 tokens x K and V x 2 groups x 8 x 2 bytes.
    work = roofline.paged_decode([10, 3, 0], 4, 2, 8, 4, 2)
    assert work.num_bytes == 13 * 2 * 2 * 8 * 2 + 2 * 2 * 4 * 8 * 2 + 4 * (3 + 1)
    assert work.num_flops == 4 * 13 * 4 * 8


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("num_programs", [1, 3, 20])
def test_attention_moves_and_computes_what_walking_its_lists_counts(num_programs: int, window: int | None) -> None:
    num_new, lengths = [1, 6, 0, 1, 1, 9], [90, 6, 0, 3, 17, 50]
    case = make_case(num_new, lengths)  # 4 heads on 2, D = 16, blocks of 4
    lists = []
    for kind, tokens in (("decode", 1), ("extend", 4)):
        division = Division(kind, 6, len(case.q), 2, tokens, 4, num_programs, False)  # type: ignore[arg-type]
        lists.append((division, list_work(division, case.lengths, case.query_starts, window)))
    got, counted = walk(case, lists, 0.25, window)
    torch.testing.assert_close(got, dense_attention(case, 0.25, window))
    assert counted.num_merged_rows or num_programs == 1 or window

    num_splits = sum(len(listed.splits) for _, listed in lists)
    parts = (counted.num_partial_rows, counted.num_merged_rows)
    work = roofline.paged_attention(num_new, lengths, 4, 2, 16, 4, 2, window, cache_element_size=1)
    work += roofline.walk_list(counted.num_items, num_programs, *parts, 16, 2)
    counted_bytes = 2 * len(counted.cached) * 16 + 4 * len(counted.table_entries)
    counted_bytes += (len(counted.queries) + len(counted.results)) * 16 * 2 + counted.num_partial_rows * 18 * 4
    assert work.num_bytes == counted_bytes + counted.num_items * len(WorkItem) * 4 + (num_programs + 1) * 4
    assert work.num_flops == counted.num_pairs * 2 * 16 * 2
    merged = roofline.merge(num_splits, *parts, 16, 2)
    assert merged.num_bytes == parts[0] * 18 * 4 + parts[1] * 16 * 2 + num_splits * 8
    assert merged.num_flops == parts[0] * 2 * 16


def test_a_work_list_is_written_once() -> None:
    assert roofline.list_work(3, 10, 2, 4).num_bytes == 4 * (3 + 4 + 10 * (len(WorkItem) + 1) + 2 + 5 + 2)


def test_a_window_bounds_the_bytes_of_decode() -> None:
    narrow, wide = (roofline.paged_decode([length], 4, 2, 8, 4, 2, window=64) for length in (64, 6400))
    assert narrow == wide


def test_decode_of_an_8b_layer_is_bound_by_memory() -> None:
    # Llama-3.1-8B, 64 sequences of 1,024: 268 MB of keys and values a layer, 62 us at 4.3 TB/s.
    work = roofline.paged_decode([1024] * 64, 32, 8, 128, 16, 2)
    assert work.num_bytes == 64 * 1024 * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2 + 4 * 64 * 64
    assert round(work.floor_s(4.3e12, 790e12) * 1e6, 1) == round(work.num_bytes / 4.3e12 * 1e6, 1) == 62.7


def test_prefill_of_a_long_prompt_is_bound_by_arithmetic() -> None:
    work = roofline.paged_attention([8192], [8192], 32, 8, 128, 16, 2)
    assert work.num_flops == 4 * 8192 * 8193 // 2 * 32 * 128
    assert work.floor_s(4.3e12, 790e12) == work.num_flops / 790e12


def test_small_kernels_move_what_they_read_and_write() -> None:
    assert roofline.rms_norm(3, 10, 2).num_bytes == (30 + 30 + 10) * 2
    assert roofline.add_rms_norm(3, 10, 2).num_bytes == (4 * 30 + 10) * 2
    assert roofline.layer_norm(3, 10, 2).num_bytes == (30 + 30 + 2 * 10) * 2
    assert roofline.gated(3, 10, 4).num_bytes == (60 + 30) * 4
    assert roofline.activated(3, 10, 4).num_bytes == (30 + 30) * 4
    assert roofline.copy_blocks(3, 100).num_bytes == 3 * (100 + 100 + 8 + 8)


def test_the_prologue_reads_a_projection_once_and_writes_queries_and_cache() -> None:
    # 3 tokens, 4 heads on 2 of 8 numbers, bf16 in a bf16 cache: all is read and written once.
    plain = roofline.attention_prologue(3, 4, 2, 8, 8, 2, 2)
    assert plain.num_bytes == 2 * (3 * 8 * 8 * 2) + 3 * (8 * 4 + 16)
    assert plain.num_flops == 3 * 6 * 8 * 3
    # 4 of the 8 numbers turn: the other half of a query stays where it is, unread.
    partly = roofline.attention_prologue(3, 4, 2, 8, 4, 2, 2)
    assert plain.num_bytes - partly.num_bytes == 3 * (2 * 4 * 4 * 2 + 4 * 4)
    # An fp8 cache takes a byte less for each key and value; norms read a weight each.
    normed = roofline.attention_prologue(3, 4, 2, 8, 4, 2, 1, has_norms=True)
    assert normed.num_bytes == plain.num_bytes - 3 * (2 * 2 * 8 + 4 * 4) + 2 * 8 * 2


def test_decode_with_its_prologue_reads_the_projection_and_no_query_twice() -> None:
    # Lengths 3 and 1, 4 heads on 2 of 8 numbers, bf16: results, the projection, what is cached and written, block ids.
    folded = roofline.prologue_decode([3, 0, 1], 4, 2, 8, 8, 4, 2)
    cached = (2 + 0) * 2 * 2 * 8 * 2
    one = 4 * 8 * 2 + (4 + 2 * 2) * 8 * 2 + 2 * 2 * 8 * 2 + 8 * 4 + 8 + 8 + 4
    assert folded.num_bytes == cached + 2 * one
    apart = roofline.paged_decode([3, 0, 1], 4, 2, 8, 4, 2) + roofline.attention_prologue(2, 4, 2, 8, 8, 2, 2)
    assert folded.num_flops == apart.num_flops and folded.num_bytes < apart.num_bytes


def test_costs_add_up() -> None:
    assert roofline.LaunchCost(1, 2) + roofline.LaunchCost(10, 20) == roofline.LaunchCost(11, 22)
