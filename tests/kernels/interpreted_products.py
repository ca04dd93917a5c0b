"""The Triton products of few rows against float64, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_products.py`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from millrace.kernels.reference import layers as reference
from millrace.kernels.triton import launch as triton_launch
from tests.bench.gpu.few_rows import (
    Tiling,
    activated,
    add_product,
    join_counters,
    product,
    product_tiling,
    vector_tiling,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
CPU = torch.device("cpu")
TILINGS = {
    "plain": Tiling(16, 16, 16, 1, 4, 3),
    "swapped": Tiling(16, 32, 16, 1, 4, 3, is_swapped=True),
    "split": Tiling(16, 16, 16, 3, 4, 3),
    "swapped and split": Tiling(32, 16, 32, 2, 4, 3, is_swapped=True),
    "vectors": Tiling(8, 16, 32, 1, 1, 2),
}
CASES = [  # (M, N, K): tiles of the weight are whole, whole in K, whole in N, and in neither
    ((1, 32, 64), torch.float16),
    ((3, 40, 96), torch.float32),
    ((16, 32, 1), torch.float32),
    ((17, 33, 50), torch.float16),
]


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def drawn(num_rows: int, num_outputs: int, num_inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(num_rows + num_outputs)
    weight = torch.randn(num_outputs, num_inner) / num_inner**0.5
    return torch.randn(num_rows, num_inner).to(dtype), weight.to(dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().t()


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("size", "dtype"), CASES)
@pytest.mark.parametrize("kind", TILINGS)
def test_products_are_those_of_float64(kind: str, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight = drawn(*size, dtype)
    assert_close(product(x, weight, tiling=TILINGS[kind]), exact(x, weight), dtype)


@pytest.mark.parametrize(("size", "dtype"), CASES)
@pytest.mark.parametrize("kind", TILINGS)
def test_a_residual_takes_the_product_and_is_rounded_once(
    kind: str, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight = drawn(*size, dtype)
    residual = (torch.randn(size[0], size[1]) * 8).to(dtype)
    want = residual.double() + exact(x, weight)
    got = add_product(residual, x, weight, tiling=TILINGS[kind])
    assert got is residual
    assert_close(got, want, dtype)


@pytest.mark.parametrize(("size", "dtype"), CASES)
@pytest.mark.parametrize("kind", TILINGS)
def test_an_activated_product_is_the_activation_of_the_product(
    kind: str, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, num_outputs, num_inner = size
    x, weight = drawn(num_rows, 2 * num_outputs, num_inner, dtype)
    want = reference.gated(exact(x, weight).to(dtype), "silu")
    assert_close(activated(x, weight, tiling=TILINGS[kind]), want, dtype)


@pytest.mark.parametrize("kind", ["split", "swapped and split"])
def test_splits_leave_counters_at_zero_and_repeat_their_bits(kind: str) -> None:
    x, weight = drawn(17, 34, 100, torch.float32)
    counters = join_counters(34, CPU, num_row_tiles=2)
    first = product(x, weight, counters, TILINGS[kind])
    assert not counters.any()
    for _ in range(2):
        assert torch.equal(product(x, weight, counters, TILINGS[kind]), first)
    gated = activated(x, weight, counters, TILINGS[kind])
    assert torch.equal(activated(x, weight, counters, TILINGS[kind]), gated)
    assert not counters.any()


def test_more_splits_than_tiles_of_k_leave_none_without_work() -> None:
    x, weight = drawn(2, 16, 40, torch.float32)
    assert_close(product(x, weight, tiling=Tiling(16, 16, 16, 8, 4, 3)), exact(x, weight), torch.float32)


@pytest.mark.parametrize("kind", TILINGS)
def test_rows_may_lie_apart(kind: str) -> None:
    x, weight = drawn(5, 20, 80, torch.float32)
    wide, out = torch.full((5, 100), torch.nan), torch.zeros(5, 30)
    wide[:, 10:90] = x
    thick = torch.full((20, 99), torch.nan)
    thick[:, 7:87] = weight
    add_product(out[:, 4:24], wide[:, 10:90], thick[:, 7:87], tiling=TILINGS[kind])
    assert_close(out[:, 4:24], exact(x, weight), torch.float32)
    assert not out[:, :4].any() and not out[:, 24:].any()


def test_no_rows_are_multiplied_by_no_launch() -> None:
    assert product(torch.zeros(0, 8), torch.zeros(3, 8)).shape == (0, 3)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 33])
def test_a_product_finds_a_tiling(num_rows: int) -> None:
    x, weight = drawn(num_rows, 24, 300, torch.float32)
    assert_close(product(x, weight), exact(x, weight), torch.float32)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 17, 64, 100])
def test_a_tiling_covers_the_rows_it_was_made_for(num_rows: int) -> None:
    for num_outputs, num_inner in itertools.product((64, 1024, 6144, 28_672), (64, 1024, 3072, 14_336)):
        tiling = product_tiling(num_rows, num_outputs, num_inner, 132)
        assert tiling.block_m >= min(num_rows, 64)
        assert 1 <= tiling.num_splits <= max(1, num_inner // tiling.block_k)


def test_a_warp_has_256_numbers_of_a_row() -> None:
    assert vector_tiling(3, 4, 1024, 4) == Tiling(4, 4, 1024, 1, 4, 1)
    assert vector_tiling(1, 4, 512, 8) == Tiling(1, 4, 512, 1, 2, 1)
    assert vector_tiling(1, 4, 16, 4) == Tiling(1, 4, 256, 1, 1, 1)


def test_bfloat16_is_refused_as_the_interpreter_computes_it_wrongly() -> None:
    with pytest.raises(TypeError, match="interpreter cannot compute in bfloat16; use float32"):
        product(torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2, 8, dtype=torch.bfloat16))
