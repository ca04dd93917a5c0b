"""Contexts that begin alike: which are found, and that seeing their beginning together changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.kernels.reference import attention as reference
from millrace.kernels.reference.shared_prefix import shared_prefixes
from tests.kernels.paged import PagedCase, dense_attention, make_case

BLOCK = 4


def found(tables: list[list[int]], ends: list[int], least_tokens: int = 1) -> list[tuple[list[int], int]]:
    width = max(map(len, tables))
    padded = np.array([table + [-1] * (width - len(table)) for table in tables], np.int32)
    prefixes = shared_prefixes(padded, np.array(ends, np.int64), BLOCK, least_tokens)
    return [(rows.tolist(), num_blocks) for rows, num_blocks in prefixes]


def test_rows_that_begin_with_the_same_blocks_are_found():
    assert found([[7, 8, 1], [2, 3], [7, 8, 4], [7, 8, 5]], [12, 8, 9, 10]) == [([0, 2, 3], 2)]


def test_every_row_keeps_a_token_of_its_own():
    assert found([[7, 8], [7, 8, 4]], [8, 12]) == [([0, 1], 1)]
    assert found([[7], [7]], [4, 4]) == []
    assert found([[7, 1], [7, 2]], [5, 5]) == [([0, 1], 1)]


def test_the_depth_is_the_one_that_saves_most():
    assert found([[7, 8, 9, 1], [7, 8, 9, 2], [7, 3]], [16, 16, 8]) == [([0, 1], 3)]
    assert found([[7, 8, 9, 1], [7, 8, 9, 2], *([[7, 3]] * 4)], [16, 16, *([8] * 4)]) == [([0, 1, 2, 3, 4, 5], 1)]


def test_each_common_beginning_is_found_and_padding_rows_are_not():
    tables = [[7, 1], [9, 2], [0, 0], [7, 3], [9, 4], [0, 0]]
    assert found(tables, [8, 8, 0, 8, 8, 0]) == [([0, 3], 1), ([1, 4], 1)]


def test_a_prefix_that_saves_too_little_is_left_alone():
    tables = [[7, 1], [7, 2], [7, 3]]
    assert found(tables, [8, 8, 8], least_tokens=2 * BLOCK) == [([0, 1, 2], 1)]
    assert found(tables, [8, 8, 8], least_tokens=2 * BLOCK + 1) == []


def sharing(case: PagedCase, rows: list[int], num_blocks: int) -> PagedCase:
    """The same step, but its `rows` have the first `num_blocks` blocks of the first of them."""
    first = rows[0]
    for row in rows[1:]:
        case.block_tables[row, :num_blocks] = case.block_tables[first, :num_blocks]
        for kept in (case.keys, case.values):
            kept[row] = torch.cat((kept[first][: num_blocks * BLOCK], kept[row][num_blocks * BLOCK :]))
    return case


def decode(case: PagedCase) -> torch.Tensor:
    return reference.paged_decode(case.q, case.k_cache, case.v_cache, case.block_tables, case.lengths, 0.25)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it saves."""
    monkeypatch.setattr(reference, "MIN_SHARED_ELEMENTS", 1)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("layout", ["layer-major", "block-major", "token-major"])
def test_what_rows_have_in_common_is_seen_once_and_the_result_is_attention(
    layout: str, dtype: torch.dtype, tolerance: float
):
    lengths = [12, 5, 9, 0, 17, 30]
    case = sharing(make_case([1] * 6, lengths, dtype=dtype, layout=layout), [0, 2, 4, 5], 2)
    torch.testing.assert_close(decode(case).double(), dense_attention(case, 0.25), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("always")
def test_large_scores_on_either_side_do_not_overflow():
    case = sharing(make_case([1] * 3, [9, 10, 11]), [0, 1, 2], 2)
    case.q.mul_(1e4)
    torch.testing.assert_close(decode(case).double(), dense_attention(case, 0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("always")
def test_decoding_rows_among_prefills_share_too():
    num_new, lengths = [1, 6, 1, 1], [13, 6, 14, 9]
    case = sharing(make_case(num_new, lengths), [0, 2, 3], 2)
    got = reference.paged_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, 0.25
    )
    torch.testing.assert_close(got.double(), dense_attention(case, 0.25), rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("layout", ["layer-major", "token-major"])
def test_chunks_of_prompts_that_begin_alike_see_that_together(layout: str):
    num_new, lengths = [5, 6, 1, 3, 7, 2], [14, 6, 14, 12, 15, 9]
    case = sharing(make_case(num_new, lengths, layout=layout), [0, 3, 4, 2], 2)
    rows_past_the_end = torch.full((3, *case.q.shape[1:]), float("nan"))
    padded = torch.cat([case.q, rows_past_the_end])
    got = reference.paged_attention(
        padded, case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, 0.25
    )
    torch.testing.assert_close(got[:-3].double(), dense_attention(case, 0.25), rtol=2e-6, atol=2e-6)
    assert not got[-3:].any()


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rows_sharing_anything_is_attention(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=8), "lengths")
    num_new = [data.draw(st.integers(min(length, 1), min(length, 9)), "new tokens") for length in lengths]
    num_groups, group = data.draw(st.integers(1, 3), "groups"), data.draw(st.integers(1, 3), "heads a group")
    case = make_case(num_new, lengths, num_groups=num_groups, group=group)
    num_blocks = data.draw(st.integers(1, 5), "blocks in common")
    able = [row for row, length in enumerate(lengths) if length - num_new[row] >= num_blocks * BLOCK]
    rows = data.draw(st.lists(st.sampled_from(able), unique=True), "rows") if able else []
    if rows:
        case = sharing(case, rows, num_blocks)
    got = reference.paged_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, 0.25
    )
    torch.testing.assert_close(got.double(), dense_attention(case, 0.25), rtol=5e-6, atol=5e-6)


def test_a_common_beginning_is_read_once_where_that_pays(monkeypatch: pytest.MonkeyPatch):
    case = sharing(make_case([1] * 3, [9, 10, 11]), [0, 1, 2], 2)
    read: list[int] = []
    gather = reference.gather
    monkeypatch.setattr(
        reference, "gather", lambda k, v, bucket: read.append(bucket.blocks.numel()) or gather(k, v, bucket)
    )
    decode(case)
    assert read == [9]
    monkeypatch.setattr(reference, "MIN_SHARED_ELEMENTS", 1)
    read.clear()
    decode(case)
    assert read == [3, 2]
