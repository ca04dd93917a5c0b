"""The Triton products of few rows against float64, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_products.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from millrace.kernels.layout.layer_options import Activation
from millrace.kernels.layout.products import FewRows, RowNorm, num_counters
from millrace.kernels.reference import layers as reference
from millrace.kernels.reference import products as composed
from millrace.kernels.tilings.predicted import predicted_forms
from millrace.kernels.tilings.products import LIBRARY, ProductForm
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.products import activated_linear, gated_linear, linear_add, norm_linear
from millrace.model.decoder.linear import Linear

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
SPLIT = ProductForm(form="split", block_m=16, block_n=16, block_k=64, num_stages=3)
FORMS = {
    "vectors": ProductForm(form="vector", block_m=8, block_n=16, block_k=256, num_warps=1, fuses_norm=True),
    "plain": replace(SPLIT, fuses_norm=True),
    "swapped": replace(SPLIT, block_n=32, is_swapped=True, fuses_norm=True),
    "split": replace(SPLIT, num_splits=3),
    "swapped and split": replace(SPLIT, block_m=32, num_splits=2, is_swapped=True, fuses_norm=True),
}
CASES = [  # (M, N, K): tiles of the weight are whole, whole in K, whole in N, and in neither
    ((1, 32, 512), torch.float16),
    ((3, 42, 256), torch.float32),
    ((4, 32, 9), torch.float32),
    ((5, 33, 300), torch.float16),
]


class Untouched(Linear):
    """The library's product, which the kernels must not take."""

    def unrounded(self, x: Tensor) -> Tensor:
        raise AssertionError("a kernel left the product to the library")

    __call__ = unrounded

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.unrounded(x)


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    torch.manual_seed(sum(shape))
    return (torch.randn(shape) * scale).to(dtype)


def made(weight: Tensor, bias: Tensor | None, form: ProductForm, num_rows: int = 64, halves: int = 1) -> dict[str, Any]:
    """The arguments of a product: a linear that must not be used, and the weight for the kernels."""
    forms = ((num_rows, form),)
    counters = torch.zeros(num_counters(forms, len(weight) // halves), dtype=torch.int32)
    return {"linear": Untouched(weight, bias), "few": FewRows(weight, bias, forms, counters)}


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize(("size", "dtype"), CASES)
@pytest.mark.parametrize("kind", FORMS)
def test_a_normed_product_with_a_bias_is_that_of_float64(
    kind: str, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, num_outputs, num_inner = size
    x, weight = (
        drawn(num_rows, num_inner, dtype=dtype),
        drawn(num_outputs, num_inner, dtype=dtype, scale=num_inner**-0.5),
    )
    bias = drawn(num_outputs, dtype=dtype)
    assert_close(norm_linear(x, None, **made(weight, None, FORMS[kind])), exact(x, weight, None), dtype)
    norm = RowNorm(kind="rms", eps=1e-5, weight=drawn(num_inner, dtype=dtype))
    want = exact(reference.rms_norm(x, norm.weight, norm.eps), weight, bias)
    assert_close(norm_linear(x, norm, **made(weight, bias, FORMS[kind])), want, dtype)


@pytest.mark.parametrize(("size", "dtype"), CASES[::3])
@pytest.mark.parametrize("kind", ["vectors", "plain"])
@pytest.mark.parametrize("norm_kind", ["exact", "without weight", "layer", "layer with bias"])
def test_each_norm_is_that_of_the_separate_kernel(
    norm_kind: str, kind: str, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, num_outputs, num_inner = size
    x = drawn(num_rows, num_inner, dtype=dtype) * 3 + 1
    weight, factors = (
        drawn(num_outputs, num_inner, dtype=dtype, scale=num_inner**-0.5),
        drawn(num_inner, dtype=torch.float32),
    )
    norm = {
        "exact": RowNorm(kind="rms", eps=1e-5, weight=factors),
        "without weight": RowNorm(kind="rms", eps=1e-5, weight=None),
        "layer": RowNorm(kind="layer", eps=1e-5, weight=factors.to(dtype)),
        "layer with bias": RowNorm(kind="layer", eps=1e-5, weight=factors, bias=factors.flip(0)),
    }[norm_kind]
    want = exact(composed._composed.norm(x, norm), weight, None)
    assert_close(norm_linear(x, norm, **made(weight, None, FORMS[kind])), want, dtype)


@pytest.mark.parametrize(("size", "dtype"), CASES)
@pytest.mark.parametrize("kind", FORMS)
def test_a_residual_takes_the_product_and_is_rounded_once(
    kind: str, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, num_outputs, num_inner = size
    x, weight = (
        drawn(num_rows, num_inner, dtype=dtype),
        drawn(num_outputs, num_inner, dtype=dtype, scale=num_inner**-0.5),
    )
    residual, bias = drawn(num_rows, num_outputs, dtype=dtype, scale=8), drawn(num_outputs, dtype=dtype)
    want = residual.double() + exact(x, weight, bias)
    got = linear_add(residual, x, **made(weight, bias, FORMS[kind]))
    assert got is residual
    assert_close(got, want, dtype)


@pytest.mark.parametrize(("size", "dtype"), CASES)
@pytest.mark.parametrize("kind", FORMS)
def test_a_gated_product_is_the_gate_of_the_rounded_product(
    kind: str, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, num_outputs, num_inner = size
    x, bias = drawn(num_rows, num_inner, dtype=dtype), drawn(2 * num_outputs, dtype=dtype)
    weight = drawn(2 * num_outputs, num_inner, dtype=dtype, scale=num_inner**-0.5)
    norm = RowNorm(kind="rms", eps=1e-5, weight=drawn(num_inner, dtype=dtype))
    normed = reference.rms_norm(x, norm.weight, norm.eps)
    want = reference.gated(exact(normed, weight, bias).to(dtype), "silu")
    assert_close(gated_linear(x, norm, activation="silu", **made(weight, bias, FORMS[kind], halves=2)), want, dtype)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_are_those_of_the_separate_kernels(activation: Activation) -> None:
    x, params = drawn(3, 40, dtype=torch.float32), torch.tensor([0.8, 1.1])
    weight = drawn(24, 40, dtype=torch.float32, scale=0.3)
    for kind in ("vectors", "split"):
        if activation != "xielu":
            got = gated_linear(
                x, None, activation=activation, alpha=1.5, limit=3.0, **made(weight, None, FORMS[kind], halves=2)
            )
            want = reference.gated(exact(x, weight, None).float(), activation, 1.5, 3.0)
            assert_close(got, want, torch.float32)
        if activation != "swiglu_clamped":
            got = activated_linear(x, None, activation=activation, params=params, **made(weight, None, FORMS[kind]))
            assert_close(got, reference.activated(exact(x, weight, None).float(), activation, params), torch.float32)


@pytest.mark.parametrize("num_rows", [16, 63])
def test_rows_may_take_several_tiles(num_rows: int) -> None:
    x, weight = drawn(num_rows, 70, dtype=torch.float32), drawn(24, 70, dtype=torch.float32)
    for kind in ("split", "swapped and split"):
        assert_close(norm_linear(x, None, **made(weight, None, FORMS[kind])), exact(x, weight, None), torch.float32)


@pytest.mark.parametrize("kind", ["split", "swapped and split"])
def test_splits_repeat_their_bits_from_counters_that_begin_at_zero(kind: str) -> None:
    x, weight = drawn(17, 400, dtype=torch.float32), drawn(34, 400, dtype=torch.float32, scale=0.05)
    given = made(weight, None, FORMS[kind])
    counters = given["few"].counters
    first = norm_linear(x, None, **given)
    assert set(counters.tolist()) <= {0, FORMS[kind].num_splits} and counters.any()
    counters.zero_()
    assert torch.equal(norm_linear(x, None, **given), first)
    given["few"] = replace(given["few"], counters=None)
    with pytest.raises(AssertionError, match="too few counters for 6 tiles|too few counters for 3 tiles"):
        norm_linear(x, None, **given)


def test_more_splits_than_tiles_of_k_leave_none_without_work() -> None:
    x, weight = drawn(2, 150, dtype=torch.float32), drawn(16, 150, dtype=torch.float32, scale=0.1)
    form = replace(SPLIT, num_splits=8)
    assert_close(norm_linear(x, None, **made(weight, None, form)), exact(x, weight, None), torch.float32)


@pytest.mark.parametrize("kind", FORMS)
def test_rows_may_lie_apart(kind: str) -> None:
    x, weight = drawn(5, 80, dtype=torch.float32), drawn(20, 80, dtype=torch.float32)
    wide, out = torch.full((5, 100), torch.nan), torch.zeros(5, 30)
    wide[:, 10:90] = x
    thick = torch.full((20, 99), torch.nan)
    thick[:, 7:87] = weight
    linear_add(out[:, 4:24], wide[:, 10:90], **made(thick[:, 7:87], None, FORMS[kind]))
    assert_close(out[:, 4:24], exact(x, weight, None), torch.float32)
    assert not out[:, :4].any() and not out[:, 24:].any()


def test_no_rows_are_multiplied_by_no_launch() -> None:
    assert norm_linear(torch.zeros(0, 8), None, **made(torch.zeros(3, 8), None, SPLIT)).shape == (0, 3)


def test_rows_beyond_the_forms_are_the_librarys_bit_by_bit() -> None:
    x, weight, bias = (
        drawn(9, 40, dtype=torch.float32),
        drawn(24, 40, dtype=torch.float32),
        drawn(24, dtype=torch.float32),
    )
    linear, norm = Linear(weight, bias), RowNorm(kind="rms", eps=1e-5, weight=drawn(40, dtype=torch.float32))
    for few in (None, FewRows(weight, bias, ((8, FORMS["vectors"]),)), FewRows(weight, bias, ((9, LIBRARY),))):
        assert torch.equal(linear_add(x[:, :24].clone(), x, linear, few), linear.add_to(x[:, :24].clone(), x))
        assert_close(
            norm_linear(x, norm, linear, few), linear(reference.rms_norm(x, norm.weight, norm.eps)), torch.float32
        )


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_a_predicted_form_computes_its_product(num_rows: int) -> None:
    x, weight = drawn(num_rows, 608, dtype=torch.float16), drawn(24, 608, dtype=torch.float16, scale=608**-0.5)
    forms = predicted_forms(24, 608, "plain", "float16", 2)
    few = FewRows(weight, None, forms, torch.zeros(num_counters(forms, 24), dtype=torch.int32))
    norm = RowNorm(kind="rms", eps=1e-5, weight=drawn(608, dtype=torch.float16))
    want = exact(reference.rms_norm(x, norm.weight, norm.eps), weight, None)
    assert_close(norm_linear(x, norm, Untouched(weight), few), want, torch.float16)


def test_bfloat16_is_refused_as_the_interpreter_computes_it_wrongly() -> None:
    x, weight = (torch.ones(2, 8, dtype=torch.bfloat16) for _ in range(2))
    with pytest.raises(TypeError, match="interpreter cannot compute in bfloat16; use float32"):
        norm_linear(x, None, **made(weight, None, SPLIT))
