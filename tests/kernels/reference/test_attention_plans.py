"""Which rows of a decode step are gathered together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.kernels.reference import attention as reference
from millrace.kernels.reference import attention_plans
from tests.kernels.paged import dense_attention, make_case


def plan_of(lengths: list[int], window: int | None = None) -> attention_plans.DecodePlan:
    case = make_case([1] * len(lengths), lengths)
    return attention_plans.plan_decode(
        case.k_cache, case.v_cache, case.block_tables, case.lengths, window, torch.float32
    )


def test_rows_of_equal_length_need_no_mask() -> None:
    (bucket,) = plan_of([6, 6, 6]).buckets
    assert bucket.rows is None
    assert (bucket.start, bucket.end) == (0, 6)
    assert bucket.mask is None
    assert bucket.unwritten is None


def test_similar_rows_share_a_bucket_and_padding_rows_are_in_none() -> None:
    plan = plan_of([6, 0, 9])
    assert not plan.is_whole
    (bucket,) = plan.buckets
    assert bucket.rows is not None
    assert bucket.rows.tolist() == [0, 2]


def test_a_window_gathers_only_its_own_blocks() -> None:
    (bucket,) = plan_of([40, 38], window=6).buckets
    assert bucket.blocks.shape == (2, 2)  # tokens [34, 40) and [32, 38) in blocks of 4


def test_rows_are_split_where_padding_would_cost_more() -> None:
    blocks = np.array([1, 100, 1, 100, 0])
    assert [rows.tolist() for rows in attention_plans._rows_that_go_together(blocks, 16, 500, 10**6)] == [
        [1, 3],
        [0, 2],
    ]
    assert [rows.tolist() for rows in attention_plans._rows_that_go_together(blocks, 16, 5000, 10**6)] == [[0, 1, 2, 3]]


def test_rows_are_split_where_the_workspace_would_grow_too_large() -> None:
    blocks = np.full(5, 10)
    assert [len(rows) for rows in attention_plans._rows_that_go_together(blocks, 16, 0, 320)] == [2, 2, 1]
    assert [len(rows) for rows in attention_plans._rows_that_go_together(blocks, 16, 0, 1)] == [
        1
    ] * 5  # one row always goes


@given(st.lists(st.integers(0, 50)), st.integers(0, 200), st.integers(1, 400))
def test_each_row_with_blocks_is_in_one_bucket(num_blocks: list[int], max_padding: int, max_tokens: int) -> None:
    blocks = np.array(num_blocks, dtype=np.int64)
    buckets = attention_plans._rows_that_go_together(blocks, 4, max_padding, max_tokens)
    assert sorted(np.concatenate([*buckets, []]).tolist()) == np.nonzero(blocks)[0].tolist()
    for rows in buckets:
        longest = blocks[rows].max()
        assert (longest - blocks[rows]).sum() * 4 <= max_padding
        assert len(rows) == 1 or len(rows) * longest * 4 <= max_tokens


def test_several_buckets_give_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plans, "MAX_PADDING_ELEMENTS", 0)
    case = make_case([1] * 6, [3, 30, 9, 30, 1, 10], head_dim=24)
    got = reference.paged_decode(case.q, case.k_cache, case.v_cache, case.block_tables, case.lengths, 0.2)
    torch.testing.assert_close(got.double(), dense_attention(case, 0.2), rtol=2e-6, atol=2e-6)


def test_a_length_past_the_table_is_refused() -> None:
    case = make_case([1], [6])
    case.lengths[0] = 4 * case.block_tables.shape[1] + 1
    with pytest.raises(ValueError, match="exceeds its block table"):
        reference.paged_decode(case.q, case.k_cache, case.v_cache, case.block_tables, case.lengths, 0.2)
