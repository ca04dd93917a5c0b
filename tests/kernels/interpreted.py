"""The Triton kernels of layers against their twins, in Triton's interpreter on the CPU.

The interpreter must be chosen before the kernels are imported, so `tests/kernels/triton/test_triton_interpreted.py`
runs this file in a process of its own. By hand: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted.py`.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from millrace.kernels import kernel_set
from millrace.kernels.kernel_set import Activation
from millrace.kernels.reference import layers as reference
from millrace.kernels.triton import attention as triton_attention
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton import layers as triton_layers

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


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
@pytest.mark.parametrize("weights", ["as x", "f32", "each head", "none"])
def test_norms_of_heads_with_other_weights(weights: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = (torch.randn(3, 100) * 3 + 1).to(dtype)[:, 16:96].view(3, 4, 20)
    weight, bias = torch.randn(4, 20), torch.randn(4, 20)
    if weights == "none":
        weight = bias = None
    elif weights != "each head":
        weight, bias = weight[0].to(dtype if weights == "as x" else torch.float32), bias[0]
    assert_close(triton_layers.rms_norm(q, weight, 1e-5), reference.rms_norm(q, weight, 1e-5))
    for some in (None, bias):
        want = reference.layer_norm(q, weight, some, 1e-5)
        assert_close(triton_layers.layer_norm(q, weight, some, 1e-5), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations(activation: Activation, dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-9, 9, 2053), torch.tensor([0.0, -1e-7, 1e-4, -1e-4, -0.29]))).view(2, 1029).to(dtype)
    x = torch.cat((x, x.flip(0)), -1)
    params = torch.tensor([0.8, 1.1]) if activation == "xielu" else None
    if activation != "swiglu_clamped":
        assert_close(triton_layers.activated(x, activation, params), reference.activated(x, activation, params))
    if activation != "xielu":
        assert_close(triton_layers.gated(x, activation, 1.5, 3.0), reference.gated(x, activation, 1.5, 3.0))


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_keep_nan(activation: Activation) -> None:
    x = torch.full((1, 2), float("nan"))
    if activation != "swiglu_clamped":
        assert triton_layers.activated(x, activation, torch.ones(2)).isnan().all()
    if activation != "xielu":
        assert triton_layers.gated(x, activation).isnan().all()


def test_activations_of_the_other_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="activation = 'xielu': gated takes silu, "):
        triton_layers.gated(torch.ones(1, 2), "xielu")
    with pytest.raises(ValueError, match="activation = 'swiglu_clamped': activated takes silu, "):
        triton_layers.activated(torch.ones(1, 2), "swiglu_clamped")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 1025])
def test_gated_rows_of_any_size(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(2, 2 * dim).to(dtype)
    assert_close(triton_layers.gated(gate_up, "silu"), reference.gated(gate_up, "silu"))


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_bfloat16_is_refused_as_the_interpreter_computes_it_wrongly() -> None:
    with pytest.raises(TypeError, match="interpreter cannot compute in bfloat16; use float32"):
        triton_layers.gated(torch.ones(2, 8, dtype=torch.bfloat16), "silu")


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch\.float64"):
        triton_layers.gated(torch.ones(2, 8, dtype=torch.float64), "silu")


def test_the_backend_loads() -> None:
    assert kernel_set.load("triton").paged_decode is triton_attention.paged_decode
