"""The PyTorch twin of the attention prologue: norms of heads in all their forms, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from millrace.kernels.kernel_set import HeadNorms
from millrace.kernels.reference.attention_prologue import attention_prologue
from tests.kernels.paged import empty_caches

H, G, D, HALF = 4, 2, 8, 3
POSITIONS = torch.tensor([0, 9, 4, 4])
ANGLES = torch.arange(10)[:, None] / 100 ** (torch.arange(HALF) / HALF)
FACTORS = 1 + 0.1 * torch.log(1 + torch.arange(10) // 4)


def prologue(qkv: Tensor, norms: HeadNorms | None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [T, heads, D]."""
    tables = {"cos": ANGLES.cos(), "sin": ANGLES.sin()} | options
    k_cache, v_cache = empty_caches(2, G, 4, D, qkv.dtype, "layer-major")
    slots = torch.arange(len(qkv)) + 2
    q = attention_prologue(
        qkv.clone(), norms, positions=POSITIONS, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, **tables
    )
    return q, *(cache[slots // 4, :, slots % 4] for cache in (k_cache, v_cache))


def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Both [T, heads, D], by transformers."""
    cos, sin = (torch.cat([table[POSITIONS]] * 2, -1)[None].to(q.dtype) for table in (ANGLES.cos(), ANGLES.sin()))
    heads = [x[..., : 2 * HALF].transpose(0, 1)[None] for x in (q, k)]
    both = apply_rotary_pos_emb(*heads, cos, sin)
    return tuple(torch.cat((y[0].transpose(0, 1), x[..., 2 * HALF :]), -1) for x, y in zip((q, k), both, strict=True))  # type: ignore[return-value]


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A projection, and its queries, keys and values."""
    qkv = torch.randn(4, H + 2 * G, D, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return qkv, *qkv.split([H, G, G], 1)


def module_of(kind: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """With a drawn weight, if it has one."""
    module = kind(*args, **kwargs)
    for weight in module.parameters():
        nn.init.normal_(weight)
    return module.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_tables_and_no_norms_leave_heads_as_they_are(dtype: torch.dtype) -> None:
    qkv, *heads = drawn(dtype=dtype)
    for got, want in zip(prologue(qkv, None, cos=None, sin=None), heads, strict=True):
        assert torch.equal(got, want)


def test_an_rms_norm_of_heads_without_rotation_is_that_of_llama() -> None:
    qkv, q, k, v = drawn()
    q_norm, k_norm = (module_of(LlamaRMSNorm, D, eps=1e-5) for _ in range(2))
    norms = HeadNorms(q=q_norm.weight, k=k_norm.weight, eps=1e-5)
    for got, want in zip(prologue(qkv, norms, cos=None, sin=None), (q_norm(q), k_norm(k), v), strict=True):
        assert torch.equal(got, want)


def test_a_layer_norm_with_a_weight_for_each_head_is_that_of_cohere() -> None:
    qkv, q, k, v = drawn()
    q_norm, k_norm = (module_of(CohereLayerNorm, hidden_size=(n, D), eps=1e-5) for n in (H, G))
    norms = HeadNorms(q=q_norm.weight, k=k_norm.weight, eps=1e-5, kind="layer")
    for got, want in zip(prologue(qkv, norms), (*turned(q_norm(q), k_norm(k)), v), strict=True):
        torch.testing.assert_close(got, want)


def test_a_norm_over_the_row_is_that_of_olmo2() -> None:
    qkv, q, k, v = drawn()
    q_norm, k_norm = (module_of(Olmo2RMSNorm, n * D, 1e-5) for n in (H, G))
    weights = {"q": q_norm.weight.view(H, D), "k": k_norm.weight.view(G, D)}
    q, k = q_norm(q.flatten(1)).view(q.shape), k_norm(k.flatten(1)).view(k.shape)
    norms = HeadNorms(**weights, eps=1e-5, is_over_row=True)
    for got, want in zip(prologue(qkv, norms), (*turned(q, k), v), strict=True):
        torch.testing.assert_close(got, want)


def test_a_norm_after_the_rotation_is_that_of_hunyuan() -> None:
    qkv, q, k, v = drawn()
    q_norm, k_norm = (module_of(HunYuanDenseV1RMSNorm, D, eps=1e-5) for _ in range(2))
    norms = HeadNorms(q=q_norm.weight, k=k_norm.weight, eps=1e-5, is_after_rope=True)
    q, k = turned(q, k)
    for got, want in zip(prologue(qkv, norms), (q_norm(q), k_norm(k), v), strict=True):
        torch.testing.assert_close(got, want)


def test_a_norm_without_weights_after_the_rotation_is_that_of_llama4() -> None:
    qkv, q, k, v = drawn()
    norm = Llama4TextL2Norm(1e-5)
    norms = HeadNorms(q=None, k=None, eps=1e-5, is_after_rope=True)
    for got, want in zip(prologue(qkv, norms), (*map(norm, turned(q, k)), v), strict=True):
        torch.testing.assert_close(got, want)


def test_queries_alone_are_multiplied_by_the_factors_of_their_positions() -> None:
    qkv, q, k, v = drawn()
    q, k = turned(q, k)
    q = q * FACTORS[POSITIONS, None, None]
    for got, want in zip(prologue(qkv, None, query_factors=FACTORS), (q, k, v), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_multiply_rounded_queries_and_round_once(dtype: torch.dtype) -> None:
    qkv, q, _, _ = drawn(dtype=dtype)
    got, _, _ = prologue(qkv, None, cos=None, sin=None, query_factors=FACTORS)
    assert torch.equal(got, (q.float() * FACTORS[POSITIONS, None, None]).to(dtype))
