"""The Triton kernels against their twins, in Triton's interpreter on the CPU.

The interpreter must be chosen before the kernels are imported, so `test_triton_interpreted.py` runs this file in a
process of its own. By hand: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted.py`.
"""

from __future__ import annotations

import pytest
import torch

from millrace.kernels import backend, reference, triton_attention, triton_launch, triton_layers
from tests.kernels.paged import LAYOUTS, PagedCase, make_case

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def assert_decodes_alike(case: PagedCase, window: int | None = None, splits: int = 1) -> None:
    arguments = (case.k_cache, case.v_cache, case.block_tables)
    want = reference.paged_decode(case.q, *arguments, case.lengths, 0.25, window)
    out = torch.full(want.shape, float("nan"), dtype=want.dtype)
    triton_attention.launch_decode(out, case.q, *arguments, None, case.lengths, 0.25, window, splits)
    assert_close(out, want)


def assert_attends_alike(case: PagedCase, window: int | None = None) -> None:
    arguments = (case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, 0.25, window)
    assert_close(triton_attention.paged_attention(case.q, *arguments), reference.paged_attention(case.q, *arguments))


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 17), (2, 3, 40)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    assert_close(triton_layers.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_inside_a_fused_projection() -> None:
    torch.manual_seed(0)
    q, weight = torch.randn(3, 100)[:, 16:96].view(3, 4, 20), torch.randn(20)
    assert_close(triton_layers.rms_norm(q, weight, 1e-5), reference.rms_norm(q, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 20).to(dtype), torch.randn(3, 20).to(dtype), torch.randn(20).to(dtype)
    theirs = residual.clone()
    got = triton_layers.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(got, reference.add_rms_norm(x, theirs, weight, 1e-5))
    assert torch.equal(residual, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 1025])
def test_silu_mul(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(2, 2 * dim).to(dtype)
    assert_close(triton_layers.silu_mul(gate_up), reference.silu_mul(gate_up))


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
def test_decode(head_dim: int, dtype: torch.dtype) -> None:
    assert_decodes_alike(make_case([1] * 5, [0, 1, 3, 4, 37], head_dim=head_dim, group=3, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_takes_any_layout(layout: str) -> None:
    assert_decodes_alike(make_case([1, 1], [9, 5], layout=layout))


def test_decode_of_a_group_wider_than_a_tile() -> None:
    assert_decodes_alike(make_case([1, 1], [9, 5], group=19, num_groups=1))


@pytest.mark.parametrize("window", [1, 4, 5, 33])
def test_decode_with_a_window(window: int) -> None:
    assert_decodes_alike(make_case([1] * 4, [0, 3, 5, 70]), window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
def test_decode_in_pieces(window: int | None, dtype: torch.dtype) -> None:
    case = make_case([1] * 4, [0, 1, 33, 200], block_size=16, num_groups=1, dtype=dtype)
    assert_decodes_alike(case, window, splits=4)


def test_pieces_are_chosen_where_programs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "num_multiprocessors", lambda device: 4)
    long = make_case([1], [300], block_size=16, num_groups=1)
    assert triton_attention.num_splits(long.q, long.k_cache, long.block_tables) == 2  # 10 tiles of 32, 4 a piece
    many = make_case([1] * 8, [300] * 8, block_size=16, num_groups=1)
    assert triton_attention.num_splits(many.q, many.k_cache, many.block_tables) == 1
    assert_attends_alike(long)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
def test_extend(head_dim: int, dtype: torch.dtype) -> None:
    assert_attends_alike(make_case([4, 3, 9], [4, 40, 9], head_dim=head_dim, group=3, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_batch_with_padding(layout: str) -> None:
    assert_attends_alike(make_case([1, 5, 0, 1, 1, 12], [9, 5, 0, 36, 0, 40], layout=layout))


@pytest.mark.parametrize("window", [1, 3, 8, 35])
def test_a_mixed_batch_with_a_window(window: int) -> None:
    assert_attends_alike(make_case([1, 7, 20], [38, 40, 20]), window)


def test_rows_past_the_last_sequence_are_zero() -> None:
    case = make_case([2, 3], [6, 3])
    padded = torch.cat([case.q, torch.full((9, *case.q.shape[1:]), float("nan"))])
    arguments = (case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, 0.25)
    got = triton_attention.paged_attention(padded, *arguments)
    assert_close(got, reference.paged_attention(padded, *arguments))
    assert not got[5:].any()


def test_no_tokens_give_an_empty_result() -> None:
    assert_attends_alike(make_case([0, 0], [0, 3]))


def test_offsets_beyond_two_to_the_31_elements_are_reached() -> None:
    # [N, 2, G, B, D] of 4 GiB, of which only the touched pages ever exist.
    num_blocks = (1 << 31) // (2 * 16 * 64) + 2
    kv = torch.empty(num_blocks, 2, 1, 16, 64, dtype=torch.float16)
    caches = kv[:, 0], kv[:, 1]
    last = num_blocks - 1
    assert last * kv.stride(0) >= 1 << 31
    torch.manual_seed(0)
    k, v, q = torch.randn(3, 1, 64).half(), torch.randn(3, 1, 64).half(), torch.randn(3, 2, 64).half()
    reference.write_kv(k, v, *caches, torch.arange(3) + last * 16)
    tables = torch.tensor([[last]], dtype=torch.int32)
    length = torch.tensor([3], dtype=torch.int32)
    assert_close(
        triton_attention.paged_decode(q[2:], *caches, tables, length, 0.125),
        reference.paged_decode(q[2:], *caches, tables, length, 0.125),
    )
    starts = torch.tensor([0, 3], dtype=torch.int32)
    assert_close(
        triton_attention.paged_attention(q, *caches, tables, starts, length, 0.125),
        reference.paged_attention(q, *caches, tables, starts, length, 0.125),
    )


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_bfloat16_is_refused_as_the_interpreter_computes_it_wrongly() -> None:
    with pytest.raises(TypeError, match="interpreter cannot compute in bfloat16; use float32"):
        triton_layers.silu_mul(torch.ones(2, 8, dtype=torch.bfloat16))


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch\.float64"):
        triton_layers.silu_mul(torch.ones(2, 8, dtype=torch.float64))


def test_the_backend_loads() -> None:
    assert backend.load("triton").paged_decode is triton_attention.paged_decode
