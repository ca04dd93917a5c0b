"""The PyTorch twins of the small kernels: against their definitions and against transformers' Llama."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from transformers.activations import ACT2FN, XIELUActivation
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from millrace.kernels.kernel_set import Activation
from millrace.kernels.reference import layers
from millrace.kernels.reference.attention_prologue import rope, write_kv
from millrace.model import spec
from tests.kernels.paged import LAYOUTS, empty_caches

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, 576), (3, 17), (2, 3, 64)])
def test_rms_norm_is_that_of_llama_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(dtype)
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1]))
        assert torch.equal(layers.rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_leaves_the_sum_in_the_residual(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 20).to(dtype), torch.randn(3, 20).to(dtype), torch.randn(20).to(dtype)
    total, untouched = x + residual, x.clone()
    got = layers.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(x, untouched)
    assert torch.equal(got, layers.rms_norm(total, weight, 1e-6))


def tables(num_positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(num_positions)[:, None] / 100 ** (torch.arange(half) / half)
    return angles.cos(), angles.sin()


def test_rope_is_that_of_llama_to_the_bit() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    cos, sin = tables(40, 8)
    positions = torch.tensor([0, 39, 7, 7, 1])
    full_cos, full_sin = (torch.cat([t[positions]] * 2, dim=-1)[None] for t in (cos, sin))
    want_q, want_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], full_cos, full_sin)
    rope(q, k, cos, sin, positions)
    assert torch.equal(q, want_q[0].transpose(0, 1))
    assert torch.equal(k, want_k[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 1, 8).to(dtype)
    cos, sin = tables(10, 4)
    positions = torch.tensor([1, 4, 9])
    first, second = q.double()[..., :4], q.double()[..., 4:]
    c, s = cos[positions, None].double(), sin[positions, None].double()
    want = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    rope(q, k, cos, sin, positions)
    torch.testing.assert_close(q.double(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 4)


@pytest.mark.parametrize("gap", [0, 1])
def test_rope_of_adjoining_heads_is_that_of_separate_ones(gap: int) -> None:
    torch.manual_seed(0)
    fused = torch.randn(4, 7, 8)
    q, k = fused[:, :3], fused[:, 3 + gap : 5 + gap]
    apart_q, apart_k, rest = q.clone(), k.clone(), fused[:, 5 + gap :].clone()
    cos, sin = tables(10, 4)
    positions = torch.tensor([2, 0, 9, 5])
    rope(apart_q, apart_k, cos, sin, positions)
    rope(q, k, cos, sin, positions)
    assert torch.equal(q, apart_q)
    assert torch.equal(k, apart_k)
    assert torch.equal(fused[:, 5 + gap :], rest)


def test_rope_turns_views_in_place_and_leaves_the_rest_of_a_head() -> None:
    torch.manual_seed(0)
    fused = torch.randn(4, 6, 10)
    before = fused.clone()
    q, k = fused[:, :3], fused[:, 3:5]
    cos, sin = tables(10, 3)  # 6 of 10 dimensions turn
    positions = torch.tensor([2, 0, 9, 5])
    rope(q, k, cos, sin, positions)
    assert torch.equal(fused[..., 6:], before[..., 6:])
    assert torch.equal(fused[:, 5], before[:, 5])
    turned = torch.complex(before[:, :5, :3], before[:, :5, 3:6]) * torch.complex(cos, sin)[positions, None]
    torch.testing.assert_close(torch.complex(fused[:, :5, :3], fused[:, :5, 3:6]), turned)


def test_rope_follows_positions_and_tables_that_change_between_calls() -> None:
    cos, sin = tables(10, 2)
    positions = torch.tensor([3])
    turned = []
    for position, sign in ((3, 1), (3, 1), (5, 1), (5, -1)):
        positions[0] = position
        q, k = torch.ones(1, 1, 4), torch.ones(1, 1, 4)
        rope(q, k, cos, sin if sign == 1 else -sin, positions)
        turned.append(q)
    assert torch.equal(turned[0], turned[1])
    assert not torch.equal(turned[1], turned[2])
    assert not torch.equal(turned[2], turned[3])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_kv_fills_its_slots_and_no_other(layout: str) -> None:
    k_cache, v_cache = empty_caches(4, 2, 4, 8, torch.float32, layout)
    torch.manual_seed(0)
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    slots = [6, -1, 15, 0, -1]
    write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(k_cache[slot // 4, :, slot % 4], k[token])
            assert torch.equal(v_cache[slot // 4, :, slot % 4], v[token])
    for cache in (k_cache, v_cache):
        assert int(cache.isnan().sum()) == cache.numel() - 3 * 2 * 8


def test_write_kv_of_padding_alone_writes_nothing() -> None:
    k_cache, v_cache = empty_caches(2, 1, 4, 8, torch.float32, "layer-major")
    write_kv(torch.ones(2, 1, 8), torch.ones(2, 1, 8), k_cache, v_cache, torch.tensor([-1, -1]))
    assert bool(k_cache.isnan().all()) and bool(v_cache.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_first_and_silu_rounds_before_the_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 14).to(dtype)
    gate, up = gate_up[:, :7], gate_up[:, 7:]
    got = layers.gated(gate_up, "silu")
    assert torch.equal(got, torch.nn.functional.silu(gate) * up)
    assert got.is_contiguous()


# ---- other norms and activations ------------------------------------------------------------------------------------

HALVES = [torch.float16, torch.bfloat16]
ONE_ROUNDING = {torch.float32: 1e-6, torch.float16: 0.502 * 2**-10, torch.bfloat16: 0.502 * 2**-7}  # relative


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 17), (2, 3, 64)])
def test_an_rms_norm_with_a_weight_in_f32_rounds_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, norm = (torch.randn(shape) * 3).to(dtype), Gemma2RMSNorm(shape[-1], eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1]))
        got, want = layers.rms_norm(x, 1 + norm.weight, 1e-5), norm(x)
    assert got.dtype == dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 17), (2, 3, 64)])
def test_norms_without_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    wide = x.double()
    for got, want in (
        (layers.rms_norm(x, None, 1e-5), wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()),
        (layers.layer_norm(x, None, None, 1e-5), torch.nn.functional.layer_norm(wide, shape[-1:], eps=1e-5)),
    ):
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=ONE_ROUNDING[dtype], atol=2e-7)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_norm_rounds_once(has_bias: bool, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 40) * 3 + 1).to(dtype)
    weight, bias = (torch.randn(40).to(weight_dtype or dtype) for _ in range(2))
    wide = torch.nn.functional.layer_norm(x.double(), (40,), weight.double(), bias.double() * has_bias, 1e-5)
    got = layers.layer_norm(x, weight, bias if has_bias else None, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wide, rtol=ONE_ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_those_of_transformers_rounded_once(kind: Activation, dtype: torch.dtype) -> None:
    function = ACT2FN[{"gelu_tanh": "gelu_pytorch_tanh"}.get(kind, kind)]
    x = torch.linspace(-6, 6, 98).view(7, 14).to(dtype)
    gate, up = x.float().chunk(2, -1)
    bounds = {"rtol": ONE_ROUNDING[dtype], "atol": 1e-6}
    torch.testing.assert_close(layers.activated(x, kind).double(), function(x.double()), **bounds)
    got = layers.gated(x, kind)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), function(gate.double()) * up.double(), **bounds)


def test_xielu_is_that_of_apertus() -> None:
    module = XIELUActivation(alpha_p_init=1.3, alpha_n_init=0.9, dtype=torch.float32).requires_grad_(False)
    softplus = torch.nn.functional.softplus
    params = torch.cat((softplus(module.alpha_p), 0.5 + softplus(module.alpha_n)))
    x = torch.cat((torch.linspace(-8, 8, 33), torch.tensor([0.0, -1e-7, 1e-7, -1e-5])))[None]
    torch.testing.assert_close(layers.activated(x, "xielu", params), module._xielu_python(x), rtol=1e-6, atol=0)
    half = layers.activated(x.half(), "xielu", params)
    torch.testing.assert_close(half.float(), module._xielu_python(x.half().float()), rtol=1e-3, atol=1e-7)


def test_the_clamped_swiglu_is_that_of_gpt_oss() -> None:
    experts = SimpleNamespace(limit=2.0, alpha=1.5)
    gate, up = torch.linspace(-5, 5, 21)[None], torch.linspace(4, -4, 21)[None]
    want = GptOssExperts._apply_gate(experts, torch.stack((gate, up), -1).flatten(1))
    got = layers.gated(torch.cat((gate, up), -1), "swiglu_clamped", 1.5, 2.0)
    torch.testing.assert_close(got, want)


def test_activations_of_the_other_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="activation = 'xielu': gated takes silu, .* and swiglu_clamped"):
        layers.gated(torch.ones(1, 2), "xielu")
    with pytest.raises(ValueError, match="activation = 'swiglu_clamped': activated takes silu, .* and xielu"):
        layers.activated(torch.ones(1, 2), "swiglu_clamped")


def test_kernels_and_specs_name_the_same_activations() -> None:
    assert get_args(spec.Activation) == get_args(Activation)
