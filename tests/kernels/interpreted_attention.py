"""The Triton kernels of attention and of its work lists against their twins, in Triton's interpreter on the CPU.

Run as `interpreted.py` is. Caches are poisoned: NaN where no token is, and block ids far out of range past a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.kernels.layout import work_lists
from millrace.kernels.layout.list_work import SplitTask, list_work
from millrace.kernels.layout.work_lists import AttentionPlan, AttentionShape, WorkItem
from millrace.kernels.reference import attention as reference
from millrace.kernels.triton import attention as triton_attention
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.attention_plan import plan_attention, workspace_bytes
from tests.counts import count
from tests.kernels.paged import LAYOUTS, PagedCase, make_case

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
SCALE = 0.25


class Scales(NamedTuple):
    """Of keys and values, one for each of 2 key/value heads."""

    k_scale: torch.Tensor
    v_scale: torch.Tensor


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def plan_of(
    case: PagedCase, window: int | None = None, num_processors: int = 1, is_batch_invariant: bool = False
) -> AttentionPlan:
    shape = triton_attention.shape_of(case.q, case.k_cache, window)
    shape = replace(shape, is_batch_invariant=is_batch_invariant)
    starts = None if is_decode(case) else case.query_starts
    return plan_attention(shape, case.lengths, starts, len(case.q), num_processors)


def is_decode(case: PagedCase) -> bool:
    return len(case.q) == len(case.lengths) and bool((case.query_starts.diff() == 1).all())


@contextmanager
def apart() -> Iterator[None]:
    """Few sequences have two lists, as many have."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(work_lists, "is_joint", lambda *_: False)
        yield


def attend(
    case: PagedCase,
    window: int | None = None,
    plan: AttentionPlan | None = None,
    soft_cap: float | None = None,
    scales: Scales | None = None,
    is_twin: bool = False,
    **others: torch.Tensor | int,
) -> torch.Tensor:
    """By the kernels, or their twins."""
    kernels = reference if is_twin else triton_attention
    tensors = (case.q, case.k_cache, case.v_cache, case.block_tables)
    options = {"soft_cap": soft_cap, "plan": plan, **(scales._asdict() if scales else {}), **others}
    if is_decode(case):
        return kernels.paged_decode(*tensors, case.lengths, SCALE, window, **options)
    return kernels.paged_attention(*tensors, case.query_starts, case.lengths, SCALE, window, **options)


def assert_alike(
    case: PagedCase,
    window: int | None = None,
    num_processors: int = 1,
    soft_cap: float | None = None,
    scales: Scales | None = None,
    is_batch_invariant: bool = False,
    *,
    is_apart: bool = False,  # by two lists as well
    **others: torch.Tensor | int,
) -> None:
    want = attend(case, window, None, soft_cap, scales, is_twin=True, **others)
    plans = [plan_of(case, window, num_processors, is_batch_invariant)]
    if is_apart:
        assert not plans[0].decode
        with apart():
            plans.append(plan_of(case, window, num_processors))
    for plan in plans:
        plan.partials.fill_(float("nan"))
        got = attend(case, window, plan, soft_cap, scales, **others)
        assert got.dtype == want.dtype
        tolerance = TOLERANCE[got.dtype]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# ---- work lists -----------------------------------------------------------------------------------------------------


@settings(max_examples=count(15, 500), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 1, 2, 17, 40]), st.sampled_from([0, 5, 31, 900])), min_size=1),
    st.sampled_from([0, 0, 1, 9]),
    st.sampled_from([1, 2, 40]),
    st.sampled_from([None, 1, 33, 200]),
    st.booleans(),
    st.booleans(),
)
def test_lists_are_those_of_the_twin(
    rows: list[tuple[int, int]], num_tail: int, num_processors: int, window: int | None, is_fixed: bool, is_pure: bool
) -> None:
    if is_pure:
        rows, num_tail = [(1, num_old) for _, num_old in rows], 0
    lengths = torch.tensor([0 if num_old == 5 else new + num_old for new, num_old in rows], dtype=torch.int32)
    starts = None if is_pure else torch.tensor([0, *(num_new for num_new, _ in rows)]).cumsum(0).int()
    shape = AttentionShape(6, 2, 16, torch.float32, torch.float32, (window,), is_fixed)
    num_tokens = len(rows) if starts is None else int(starts[-1]) + num_tail
    plan = plan_attention(shape, lengths, starts, num_tokens, num_processors)
    for work in (*plan.decode.values(), *plan.extend.values()):
        want = list_work(work.division, lengths, starts, window)
        assert work.counts.tolist() == [len(want.items), len(want.splits)]
        assert work.items[: len(want.items)].tolist() == want.items.tolist()
        assert not work.arrivals[want.splits[:, SplitTask.FIRST_PARTIAL]].any()
        assert work.starts.tolist() == want.starts.tolist()


@pytest.mark.parametrize("num_processors", [3, 300])
def test_a_list_longer_than_a_block_of_the_kernel_is_that_of_the_twin(num_processors: int) -> None:
    lengths = torch.arange(700, dtype=torch.int32) % 900
    starts = torch.arange(701, dtype=torch.int32) * 2
    shape = AttentionShape(2, 2, 16, torch.float32, torch.float32)
    (alone,) = plan_attention(shape, lengths, None, 700, num_processors).decode.values()
    (extend,) = plan_attention(shape, lengths, starts, 1400, num_processors).extend.values()
    for work, begins in ((alone, None), (extend, starts)):
        want = list_work(work.division, lengths, begins, None)
        assert work.items[: len(want.items)].tolist() == want.items.tolist()
        assert work.starts.tolist() == want.starts.tolist()


@pytest.mark.parametrize(("num_processors", "is_joint"), [(4, False), (5, True)])
def test_few_sequences_are_in_one_list(num_processors: int, is_joint: bool) -> None:
    case = make_case([1, 5, 0, 12, 1], [9, 70, 0, 40, 0])  # tasks of 5 sequences and 2 heads; 2 programs a processor
    plan = plan_of(case, None, num_processors)
    (work,) = plan.extend.values()
    assert work.division.is_joint == is_joint and len(plan.decode) == (not is_joint)
    want = list_work(work.division, case.lengths, case.query_starts, None)
    assert set(want.items[:, WorkItem.SEQUENCE].tolist()) == ({0, 1, 3, 4} if is_joint else {1, 3})
    assert work.items[: len(want.items)].tolist() == want.items.tolist()
    assert plan_of(case, None, num_processors, is_batch_invariant=True).decode


def test_an_extend_list_is_whole_or_cut_by_what_ends_earlier() -> None:
    shape = AttentionShape(6, 2, 16, torch.float32, torch.float32)
    cuts = []
    for length in (100, 3000):
        lengths, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, 30], dtype=torch.int32)
        (work,) = plan_attention(shape, lengths, starts, 30, 9).extend.values()
        want = list_work(work.division, lengths, starts, None)
        assert work.items[: len(want.items)].tolist() == want.items.tolist()
        cuts.append(int(work.counts[1]))
    assert cuts[0] == 0 and cuts[1] > 0


# ---- decode ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
def test_decode(head_dim: int, dtype: torch.dtype) -> None:
    assert_alike(make_case([1] * 5, [0, 1, 3, 4, 37], head_dim=head_dim, group=3, dtype=dtype))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33])
def test_decode_about_the_ends_of_blocks_and_tiles(length: int) -> None:
    assert_alike(make_case([1], [length]), num_processors=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_takes_any_layout(layout: str) -> None:
    assert_alike(make_case([1, 1], [9, 5], layout=layout))


def test_decode_of_a_group_wider_than_the_smallest_tile() -> None:
    assert_alike(make_case([1, 1], [9, 5], group=19, num_groups=1))


@pytest.mark.parametrize("window", [1, 4, 5, 33])
def test_decode_with_a_window(window: int) -> None:
    assert_alike(make_case([1] * 4, [0, 3, 5, 70]), window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_decode_in_pieces(window: int | None, dtype: torch.dtype) -> None:
    case = make_case([1] * 4, [0, 1, 33, 700], block_size=16, num_groups=1, dtype=dtype)
    (work,) = plan_of(case, window, 4).decode.values()
    assert work.counts[1] == 1
    assert_alike(case, window, 4)


def test_a_task_of_more_pieces_than_a_merge_takes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([1], [300], block_size=32, num_groups=1, head_dim=64)
    (work,) = plan_of(case, num_processors=20).decode.values()
    monkeypatch.setitem(triton_attention.MERGED_ELEMENTS, "decode", 4 * 64)  # of 4 warps: 4 pieces of a row at a time
    assert work.items[0, WorkItem.NUM_PIECES] == 10
    assert_alike(case, None, 20)


def test_pieces_that_end_in_any_order_give_the_same_bits_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([1, 11], [150, 420], block_size=16)
    with monkeypatch.context() as patched, apart():  # what memory held before, such as a step that died
        patched.setattr(torch, "empty", lambda *sizes, **options: torch.full(sizes, 7, **options))
        plan = plan_of(case, num_processors=5)
    want = attend(case, plan=plan)
    for _ in range(2):
        for work in (plan.decode[None], plan.extend[None]):
            assert (work.items[: work.counts[0], WorkItem.NUM_PIECES] > 1).any()
            work.items[: work.counts[0]] = work.items[: work.counts[0]].flip(0)  # the last items are done first
            work.starts.copy_(work.counts[0] - work.starts.flip(0))
        assert torch.equal(attend(case, plan=plan), want)


# ---- extend, and mixed batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
def test_extend(head_dim: int, dtype: torch.dtype) -> None:
    assert_alike(make_case([4, 3, 9], [4, 40, 9], head_dim=head_dim, group=3, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_batch_with_padding(layout: str) -> None:
    assert_alike(
        make_case([1, 5, 0, 1, 1, 12, 0], [9, 5, 0, 36, 0, 40, 7], layout=layout),
        None,
        7,
        is_apart=layout == LAYOUTS[0],
    )


@pytest.mark.parametrize("window", [1, 3, 8, 35])
def test_a_mixed_batch_with_a_window(window: int) -> None:
    assert_alike(make_case([1, 7, 20], [38, 40, 20]), window, 3, is_apart=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 800])
def test_a_mixed_batch_in_pieces(window: int | None, dtype: torch.dtype) -> None:
    """The last piece of the second sequence begins past what the first of its new tokens see."""
    case = make_case([1, 11], [700, 850], block_size=16, num_groups=1, dtype=dtype)
    with apart():
        plan = plan_of(case, window, 5)
    assert plan.decode[window].counts[1] and plan.extend[window].counts[1]
    assert_alike(case, window, 5, is_apart=dtype == torch.float32)


def test_rows_past_the_last_sequence_are_zero() -> None:
    case = make_case([2, 3], [6, 3])
    case = replace(case, q=torch.cat([case.q, torch.full((9, *case.q.shape[1:]), float("nan"))]))
    assert_alike(case)
    assert not attend(case)[5:].any()


def test_padding_sequences_of_several_rows_are_zero() -> None:
    case = make_case([5, 3], [5, 3])
    case.lengths[0] = 0
    got = attend(case)
    assert not got[:5].any()
    assert got[5:].all()


def test_no_tokens_give_an_empty_result() -> None:
    assert_alike(make_case([0, 0], [0, 3]))
    assert attend(make_case([], [])).shape == (0, 4, 16)


# ---- caps, caches in 8 bits, equal bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_new", [[1, 1, 1], [1, 6, 20]])
@pytest.mark.parametrize("soft_cap", [0.5, 3.0])
def test_scores_are_capped(soft_cap: float, num_new: list[int]) -> None:
    assert_alike(make_case(num_new, [40, 6, 300]), num_processors=2, soft_cap=soft_cap)


SINKS = torch.tensor([-2.0, 0.0, 1.5, 6.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_new", "window", "soft_cap"), [([1, 1, 1], None, 2.0), ([1, 6, 0], 9, None)])
def test_a_head_has_a_sink(num_new: list[int], window: int | None, soft_cap: float | None, dtype: torch.dtype) -> None:
    assert_alike(make_case(num_new, [40, 6, 0], dtype=dtype), window, 2, soft_cap, sinks=SINKS)


@pytest.mark.parametrize("num_new", [[1, 1], [1, 11]])
def test_sinks_count_once_in_pieces(num_new: list[int]) -> None:
    case = make_case(num_new, [700, 516], block_size=16)
    plan = plan_of(case, None, 5)
    assert sum(int(work.counts[1]) for work in (*plan.decode.values(), *plan.extend.values())) > 1
    assert_alike(case, None, 5, sinks=SINKS)


def test_padding_rows_with_sinks_are_zero() -> None:
    case = make_case([1, 1], [0, 5])
    assert not attend(case, sinks=SINKS)[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_new", "window"), [([1, 1, 1], None), ([1, 6, 20], 9), ([1, 6, 0], None)])
def test_alibi_lowers_scores_by_distance(num_new: list[int], window: int | None, dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.01])
    assert_alike(make_case(num_new, [40, 6, 300], dtype=dtype), window, 2, alibi=slopes, sinks=SINKS)


@pytest.mark.parametrize("chunk", [1, 5, 32, 100])
@pytest.mark.parametrize(("num_new", "window"), [([1, 1, 1], None), ([1, 6, 40], None), ([1, 6, 40], 9)])
def test_a_token_sees_its_own_chunk_only(num_new: list[int], window: int | None, chunk: int) -> None:
    assert_alike(make_case(num_new, [40, 6, 300]), window, 2, chunk=chunk)


def test_pieces_before_a_chunk_have_no_part_in_its_sum() -> None:
    case = make_case([1, 11], [700, 516], block_size=16)
    with apart():
        assert plan_of(case, None, 5).decode[None].counts[1] > 0
    assert_alike(case, None, 5, chunk=512, sinks=SINKS)


def test_blocks_before_a_chunk_are_not_read() -> None:
    case = make_case([1, 3], [13, 14])
    want = attend(case, chunk=8)
    case.block_tables[:, 0] = -7  # freed: tokens 0 to 3
    assert torch.equal(attend(case, chunk=8), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_new", "window"), [([1, 1, 1], None), ([1, 6, 20], None), ([1, 6, 20], 9)])
def test_caches_in_8_bits_are_scaled(num_new: list[int], window: int | None, dtype: torch.dtype) -> None:
    case = make_case(num_new, [40, 6, 300], dtype=dtype)
    small = replace(case, k_cache=case.k_cache.to(torch.float8_e4m3fn), v_cache=case.v_cache.to(torch.float8_e4m3fn))
    assert small.k_cache.float().isnan().any()
    scales = Scales(torch.tensor([0.5, 2.0]), torch.tensor([1.25, 0.75]))
    assert_alike(small, window, 3, scales=scales, is_apart=num_new[1] > 1 and dtype == torch.float32)


def test_a_scale_of_one_can_be_left_out() -> None:
    case = make_case([1, 3], [9, 5])
    small = replace(case, k_cache=case.k_cache.to(torch.float8_e4m3fn), v_cache=case.v_cache.to(torch.float8_e4m3fn))
    assert torch.equal(attend(small), attend(small, scales=Scales(torch.ones(2), torch.ones(2))))


def test_a_scale_that_is_not_above_zero_is_refused() -> None:
    case = make_case([1], [5])
    tensors = (case.q, case.k_cache, case.v_cache, case.block_tables, case.lengths)
    with pytest.raises(ValueError, match="scale = -0.5: the Triton kernels take a scale of scores above 0"):
        triton_attention.paged_decode(*tensors, -0.5)


def test_other_types_of_a_cache_are_refused() -> None:
    case = make_case([1], [5])
    with pytest.raises(TypeError, match="a cache of torch.float16 and queries of torch.float32"):
        attend(replace(case, k_cache=case.k_cache.half(), v_cache=case.v_cache.half()))


@pytest.mark.parametrize("num_new", [1, 9])
def test_in_batch_invariant_mode_a_sequence_has_the_same_bits_alone_and_among_others(num_new: int) -> None:
    others = [(1, 3), (num_new, 150), (6, 40)]
    among = make_case([new for new, _ in others], [length for _, length in others], block_size=16)
    alone = replace(
        among,
        q=among.q[1 : 1 + num_new],
        block_tables=among.block_tables[1:2],
        query_starts=torch.tensor([0, num_new], dtype=torch.int32),
        lengths=among.lengths[1:2],
    )
    bits = [
        attend(case, plan=plan_of(case, None, num_processors, True))[rows]
        for case, rows, num_processors in (
            (alone, slice(None), 1),
            (alone, slice(None), 3),
            (among, slice(1, 1 + num_new), 2),
        )
    ]
    assert all(torch.equal(bits[0], other) for other in bits[1:])
    assert_alike(among, num_processors=5, is_batch_invariant=True)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_layers_of_several_windows_share_a_plan() -> None:
    case = make_case([1, 4], [50, 20])
    shape = replace(triton_attention.shape_of(case.q, case.k_cache, None), windows=(None, 9))
    plan = plan_attention(shape, case.lengths, case.query_starts, len(case.q))
    for window in (None, 9):
        got = attend(case, window, plan)
        torch.testing.assert_close(got, attend(case, window, is_twin=True), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("num_new", [[1, 1, 1], [1, 4, 40]])
def test_the_bytes_of_a_plan_are_known_beforehand_and_do_not_depend_on_lengths(
    num_new: list[int], is_fixed: bool
) -> None:
    shape = AttentionShape(8, 4, 16, torch.float32, torch.float32, (None, 40), is_fixed)
    starts = torch.tensor([0, *num_new]).cumsum(0).int() if sum(num_new) > 3 else None
    sizes = set()
    for lengths in ([45, 45, 45], [1, 700, 3000]):
        plan = plan_attention(shape, torch.tensor(lengths, dtype=torch.int32), starts, sum(num_new), 9)
        lists = [*plan.decode.values(), *plan.extend.values()]
        sizes.add(sum(work.items.untyped_storage().nbytes() for work in lists) + plan.partials.nbytes)
    assert sizes == {workspace_bytes(shape, 3, sum(num_new), starts is None, torch.device("cpu"), 9)}


def test_offsets_beyond_two_to_the_31_elements_are_reached() -> None:
    # [N, 2, G, B, D] of 4 GiB, of which only the touched pages ever exist.
    num_blocks = (1 << 31) // (2 * 16 * 64) + 2
    kv = torch.empty(num_blocks, 2, 1, 16, 64, dtype=torch.float16)
    last = num_blocks - 1
    assert last * kv.stride(0) >= 1 << 31
    torch.manual_seed(0)
    kv[last, :, 0, :3] = torch.randn(2, 3, 64).half()
    tables, length = torch.tensor([[last]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    q = torch.randn(3, 2, 64).half()
    for num_new in (1, 3):
        starts = torch.tensor([0, num_new], dtype=torch.int32)
        assert_alike(PagedCase(q[:num_new], kv[:, 0], kv[:, 1], tables, starts, length, [], []))
