"""The Triton kernels before attention and between steps against their twins, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_layers.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels.kernel_set import HeadNorms
from millrace.kernels.reference import attention, attention_prologue
from millrace.kernels.triton import attention_prologue as triton_prologue
from millrace.kernels.triton import block_copy as triton_copy
from millrace.kernels.triton import launch as triton_launch
from tests.counts import FULL
from tests.kernels.paged import LAYOUTS, empty_caches

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
FORMS: list[dict[str, Any] | None] = [
    None,
    {},
    {"kind": "layer"},
    {"is_after_rope": True},
    {"is_after_rope": True, "kind": "layer"},
    {"is_over_row": True},
    {"is_over_row": True, "kind": "layer"},
]
HALVES = [0, 3, 5]  # of heads of 10
NORMS = list(product(["as qkv", "f32", "each head", "none"], FORMS, HALVES, DTYPES))  # each fifth has each pair in it


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


def prologues(
    qkv: Tensor,
    num_groups: int,
    half: int,
    *,
    has_norms: bool = False,
    norms: HeadNorms | None = None,
    has_factors: bool = False,
    slots: tuple[int, ...] = (6, -1, 15, 0, -7),
    layout: str = "layer-major",
    scales: tuple[Tensor, Tensor] | None = None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(queries, key cache, value cache), by Triton and by the twin, of a cache of 4 blocks of 4 tokens."""
    head_dim, dtype = qkv.shape[2], qkv.dtype
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(head_dim, generator=generator).to(dtype) for _ in range(2)]
    norms = HeadNorms(q=weights[0], k=weights[1], eps=1e-5) if has_norms else norms
    angles = torch.rand(20, half, generator=generator) * 6
    factors = torch.rand(20, generator=generator) + 1 if has_factors else None
    more = (*(scales or (None, None)), factors)
    positions = torch.tensor([19, 0, 3, 3, 7])[: len(qkv)]
    made = []
    for kernels in (triton_prologue, attention_prologue):
        caches = empty_caches(4, num_groups, 4, head_dim, dtype, layout)
        if scales is not None:
            caches = tuple(cache.nan_to_num(0.0).to(torch.float8_e4m3fn) for cache in caches)
        tables = (angles.cos(), angles.sin(), positions) if half else (None, None, positions)
        mapping = torch.tensor(slots[: len(qkv)], dtype=torch.int64)
        q = kernels.attention_prologue(qkv.clone(), norms, *tables, *caches, mapping, *more)
        made.append((q, *caches))
    return made


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_groups", "half"), [(3, 1, 4), (4, 2, 3), (18, 17, 5), (2, 2, 1)])
def test_the_prologue_turns_queries_and_writes_keys_and_values(
    num_heads: int, num_groups: int, half: int, has_norms: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, num_heads + 2 * num_groups, 10).to(dtype)
    for got, want in zip(*prologues(qkv, num_groups, half, has_norms=has_norms), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(("weights", "form", "half", "dtype"), NORMS if FULL else NORMS[::5], ids=str)
def test_the_prologue_has_every_form_of_norms(
    weights: str, form: dict[str, Any] | None, half: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv, q, k = torch.randn(5, 8, 10).to(dtype), torch.randn(4, 10), torch.randn(2, 10)
    if weights == "none":
        q = k = None
    elif form is not None and not form.get("is_over_row") and weights != "each head":
        q, k = q[0], k[0]
    if weights == "as qkv" and q is not None:
        q, k = q.to(dtype), k.to(dtype)
    norms = None if form is None else HeadNorms(q=q, k=k, eps=1e-5, **form)
    for got, want in zip(*prologues(qkv, 2, half, norms=norms, has_factors=weights != "f32"), strict=True):
        assert_close(got, want)


def test_a_norm_over_rows_after_the_rotation_is_refused_by_name() -> None:
    norms = HeadNorms(q=None, k=None, eps=1e-5, is_over_row=True, is_after_rope=True)
    with pytest.raises(NotImplementedError, match="triton: has no norms over rows of heads after the rotation; use"):
        prologues(torch.ones(1, 4, 8), 1, 4, norms=norms)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_prologue_writes_any_layout(layout: str) -> None:
    torch.manual_seed(0)
    for got, want in zip(*prologues(torch.randn(5, 8, 8), 2, 4, layout=layout), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_the_prologue_of_few_tokens(num_tokens: int) -> None:
    for got, want in zip(*prologues(torch.ones(num_tokens, 4, 6), 1, 3, has_norms=True), strict=True):
        assert_close(got, want)


def test_the_prologue_takes_a_part_of_a_wider_row() -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 100)
    fused = wide[:, 20:84].view(5, 8, 8)
    for got, want in zip(*prologues(fused, 2, 4), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_fp8_cache_keeps_numbers_over_their_heads_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scales = torch.tensor([0.001, 0.3, 2.0]), torch.tensor([1.7, 0.01, 0.4])  # some numbers lie beyond 448
    qkv = torch.randn(5, 10, 16).to(dtype) * 8
    qkv[2, 4:, 3] = torch.nan  # of a broken model
    (_, *got), (_, *want) = prologues(qkv, 3, 8, has_norms=True, scales=scales)
    for mine, his in zip(got, want, strict=True):
        is_nan = his.float().isnan()
        assert is_nan.any() and (mine.float()[is_nan] != -448).all()  # not clamped; the interpreter makes 384 of NaN
        mine, his = mine[~is_nan], his[~is_nan]
        difference = (mine.view(torch.uint8).int() - his.view(torch.uint8).int()).abs()
        # Where rounding carries into the exponent, Triton's interpreter loses the carry: one number in 30 or fewer.
        assert (difference > 0).float().mean() < 0.04
        assert his.float().abs().max() == mine.float().abs().max() == 448


def test_the_prologue_reaches_blocks_beyond_two_to_the_31_elements() -> None:
    # [N, 2, G, B, D] of 4 GiB, of which only the touched pages ever exist.
    num_blocks = (1 << 31) // (2 * 16 * 64) + 2
    kv = torch.empty(num_blocks, 2, 1, 16, 64, dtype=torch.float16)
    last = num_blocks - 1
    assert last * kv.stride(0) >= 1 << 31
    torch.manual_seed(0)
    qkv = torch.randn(3, 4, 64).half()
    nothing = torch.ones(1, 32), torch.zeros(1, 32), torch.zeros(3, dtype=torch.int64)  # no rotation
    slots = torch.arange(3) + last * 16
    triton_prologue.attention_prologue(qkv, None, *nothing, kv[:, 0], kv[:, 1], slots)
    assert torch.equal(kv[last, 0, 0, :3], qkv[:, 2])
    assert torch.equal(kv[last, 1, 0, :3], qkv[:, 3])


def test_bfloat16_is_refused_by_the_prologue() -> None:
    with pytest.raises(TypeError, match="interpreter cannot compute in bfloat16"):
        prologues(torch.ones(1, 4, 8, dtype=torch.bfloat16), 1, 4)


# ---- copies of blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize(("shape", "axis"), [((6, 3, 2, 5, 7, 9), 0), ((3, 2, 5, 6, 7, 9), 3), ((6, 70, 64), 0)])
def test_blocks_are_copied_whole_and_no_other_is_touched(
    shape: tuple[int, ...], axis: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_copy, "num_multiprocessors", lambda device: 1)  # fewer programs than tiles
    torch.manual_seed(0)
    ours = torch.randint(0, 100, shape).to(dtype)
    theirs = ours.clone()
    sources, destinations = torch.tensor([1, 1, 4]), torch.tensor([0, 5, 3])
    triton_copy.copy_blocks(ours, axis, sources, destinations)
    attention.copy_blocks(theirs, axis, sources, destinations)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.select(axis, 5), ours.select(axis, 1))


def test_no_blocks_are_copied_by_no_launch() -> None:
    nothing, data = torch.zeros(0, dtype=torch.int64), torch.arange(6.0).reshape(2, 3)
    triton_copy.copy_blocks(data, 0, nothing, nothing)
    assert torch.equal(data, torch.arange(6.0).reshape(2, 3))


def test_a_block_beyond_two_to_the_31_words_is_copied() -> None:
    data = torch.empty((1 << 33) // 4096 + 2, 4096, dtype=torch.uint8)  # 8 GiB, of which two pages ever exist
    data[1] = 7
    last = len(data) - 1
    assert last * 4096 // 4 >= 1 << 31
    triton_copy.copy_blocks(data, 0, torch.tensor([1]), torch.tensor([last]))
    assert bool((data[last] == 7).all())
