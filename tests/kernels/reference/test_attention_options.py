"""Sinks, ALiBi, chunks and soft caps of the PyTorch twins, against the definition and against transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from millrace.kernels.reference import attention as reference
from millrace.kernels.reference import attention_f32
from tests.kernels.paged import PagedCase, dense_attention, make_case

SINKS = torch.tensor([-1.5, 0.0, 2.0, 5.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.01])
MIXED = ([1, 7, 3, 1, 0, 20], [12, 9, 22, 0, 5, 20])


def attend(case: PagedCase, window: int | None = None, **options: Any) -> torch.Tensor:
    return reference.paged_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, case.query_starts, case.lengths, 0.25, window, **options
    )


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": SINKS},
        {"sinks": SINKS, "soft_cap": 2.0},
        {"alibi": SLOPES},
        {"alibi": SLOPES, "sinks": SINKS},
        {"chunk": 4},
        {"chunk": 5, "sinks": SINKS},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("window", [None, 6])
def test_options_of_a_mixed_batch(window: int | None, options: dict[str, Any]) -> None:
    case = make_case(*MIXED)
    assert_close(attend(case, window, **options), dense_attention(case, 0.25, window, **options))


@pytest.mark.parametrize("options", [{"sinks": SINKS}, {"alibi": SLOPES}, {"chunk": 8}, {"soft_cap": 1.0}])
def test_options_of_decode(options: dict[str, Any]) -> None:
    case = make_case([1] * 5, [0, 1, 8, 9, 21])
    tensors = (case.q, case.k_cache, case.v_cache, case.block_tables, case.lengths)
    got = reference.paged_decode(*tensors, 0.25, **options)
    assert_close(got, dense_attention(case, 0.25, **options))


@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0}, {"alibi": SLOPES}])
def test_an_8_bit_cache_with_sinks(options: dict[str, Any]) -> None:
    case = make_case(*MIXED)
    small = [cache.to(torch.float8_e4m3fn) for cache in (case.k_cache, case.v_cache)]
    case.keys[:], case.values[:] = (
        [tokens.to(torch.float8_e4m3fn).float() for tokens in kept] for kept in (case.keys, case.values)
    )
    got = reference.paged_attention(
        case.q, *small, case.block_tables, case.query_starts, case.lengths, 0.25, sinks=SINKS, **options
    )
    assert_close(got, dense_attention(case, 0.25, sinks=SINKS, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_in_half_precision(dtype: torch.dtype) -> None:
    case = make_case(*MIXED, dtype=dtype)
    tolerance = 2 * torch.finfo(dtype).eps
    assert_close(attend(case, sinks=SINKS), dense_attention(case, 0.25, sinks=SINKS), tolerance)


def test_sinks_where_torch_gives_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_f32, "can_see_parts", lambda device: False)
    case = make_case(*MIXED)
    assert_close(attend(case, 6, sinks=SINKS), dense_attention(case, 0.25, 6, sinks=SINKS))


@pytest.mark.parametrize("num_new", [1, 3])
def test_sinks_count_once_where_rows_share_a_prefix(num_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MIN_SHARED_ELEMENTS", 1)
    case = make_case([num_new] * 3, [21, 18, 30])
    for table, keys, values in zip(case.block_tables[1:], case.keys[1:], case.values[1:], strict=True):
        table[:3] = case.block_tables[0, :3]
        keys[:12], values[:12] = case.keys[0][:12], case.values[0][:12]
    parts = []
    see_as_well = reference.see_as_well
    monkeypatch.setattr(reference, "see_as_well", lambda *args: parts.append(args) or see_as_well(*args))
    assert_close(attend(case, sinks=SINKS), dense_attention(case, 0.25, sinks=SINKS))
    assert len(parts) == 1


@pytest.mark.parametrize("options", [{"soft_cap": 2.0, "window": 5}, {"chunk": 8}])
def test_blocks_that_left_the_window_or_chunk_are_not_read(options: dict[str, Any]) -> None:
    case = make_case([1, 3], [13, 14])
    want = dense_attention(case, 0.25, **options)
    case.block_tables[:, 0] = -7  # freed: tokens 0 to 3
    assert_close(attend(case, **options), want)


# ---- against transformers: one sequence, all tokens new -------------------------------------------------------------


def alone(case: PagedCase) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values [1, heads, L, D], and the causal mask."""
    length = len(case.q)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    return (*(x.transpose(0, 1)[None] for x in (case.q, case.keys[0], case.values[0])), mask)


def test_sinks_are_those_of_gpt_oss() -> None:
    case = make_case([9], [9])
    module = SimpleNamespace(num_key_value_groups=2, sinks=SINKS, training=False)
    want, _ = gpt_oss_attention(module, *alone(case), scaling=0.25)
    assert_close(attend(case, sinks=SINKS), want[0])


def test_soft_caps_are_those_of_gemma2() -> None:
    case = make_case([9], [9])
    module = SimpleNamespace(num_key_value_groups=2, head_dim=16, training=False)
    want, _ = gemma2_attention(module, *alone(case), scaling=0.25, softcap=1.5)
    assert_close(attend(case, soft_cap=1.5), want[0])


def test_alibi_is_that_of_bloom() -> None:
    case = make_case([9], [9], num_groups=4, group=1)
    q, k, v, mask = alone(case)
    bias = build_alibi_tensor(torch.ones(1, 9), 4, torch.float32).view(1, 4, 1, 9)
    want = (q @ k.transpose(2, 3) * 0.25 + bias + mask).softmax(-1) @ v
    assert_close(attend(case, alibi=bias[0, :, 0, 1] - bias[0, :, 0, 0]), want[0].transpose(0, 1))
