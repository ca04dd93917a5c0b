"""Decode that does its own prologue against the two kernels apart, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_prologue_decode.py`. Caches are poisoned: NaN where no token is, the new one's place included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels.kernel_set import HeadNorms
from millrace.kernels.layout.work_lists import AttentionShape
from millrace.kernels.reference.prologue_decode import prologue_decode as twin
from millrace.kernels.triton import attention as folded
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.attention_plan import plan_attention
from tests.counts import FULL
from tests.kernels.paged import PagedCase, make_case

TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3}
FP8 = torch.float8_e4m3fn
LENGTHS = (1, 2, 16, 17, 32, 33, 0, 100) if FULL else (1, 17, 0)  # a tile has 16 or 32 tokens, a block 4


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


class Step:
    """One step of decode, whose new keys and values are in the projection alone."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, half: int = 8, seed: int = 3, **sizes: Any) -> None:
        sizes = {"num_groups": 2, "group": 2, "head_dim": 16} | sizes
        self.case: PagedCase = make_case([1] * len(lengths), list(lengths), seed=seed, **sizes)
        draw, self.block_size = torch.Generator().manual_seed(seed), self.case.k_cache.shape[2]
        heads, groups, dim = sizes["group"] * sizes["num_groups"], sizes["num_groups"], sizes["head_dim"]
        self.dtype = self.case.q.dtype
        self.qkv = torch.randn(len(lengths), heads + 2 * groups, dim, generator=draw).to(self.dtype)
        angles = torch.rand(200, half, generator=draw) * 6
        self.tables = (angles.cos(), angles.sin()) if half else (None, None)
        self.positions = torch.tensor([max(0, length - 1) for length in lengths])
        places = [
            int(self.case.block_tables[row, (length - 1) // 4]) * 4 + (length - 1) % 4 if length else -1
            for row, length in enumerate(lengths)
        ]
        self.slots = torch.tensor(places)
        for place in places:
            if place >= 0:
                for cache in (self.case.k_cache, self.case.v_cache):
                    cache[place // 4, :, place % 4] = torch.nan
        self.weights = [torch.randn(dim, generator=draw).to(self.dtype) for _ in range(2)]
        self.scales: dict[str, Tensor] = {}

    def as_fp8(self) -> Step:
        caches = (cache.nan_to_num(0.0).to(FP8) for cache in (self.case.k_cache, self.case.v_cache))
        self.case = replace(self.case, **dict(zip(("k_cache", "v_cache"), caches, strict=True)))
        self.scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0, 0.25])}
        return self

    def run(
        self,
        kernel: Any,
        norms: HeadNorms | None,
        window: int | None = None,
        query_factors: Tensor | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """The result, and the caches after it."""
        case = self.case
        caches = (case.k_cache.clone(), case.v_cache.clone())
        out = kernel(
            self.qkv.clone(), norms, *self.tables, self.positions, *caches, self.slots, query_factors,
            case.block_tables, case.lengths, 0.25, window, **self.scales, **options,
        )  # fmt: skip
        return [out, *caches]

    def check(
        self, norms: HeadNorms | None = None, window: int | None = None, processors: int = 1, **others: Any
    ) -> None:
        """Compares with the twin."""
        case, heads = self.case, self.case.q.shape[1]
        shape = AttentionShape(heads, case.k_cache.shape[1], case.q.shape[2], self.dtype, case.k_cache.dtype, (window,))
        plan = plan_attention(shape, case.lengths, None, len(self.qkv), processors)
        got = self.run(folded.prologue_decode, norms, window, plan=plan, **others)
        for mine, want in zip(got, self.run(twin, norms, window, **others), strict=True):
            tolerance = TOLERANCE[self.dtype]
            mine, want = mine.float(), want.float()
            torch.testing.assert_close(mine, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prologues that had a launch of their own."""
    found: list[str] = []
    apart = folded.attention_prologue

    def noted(*args: Any) -> Tensor:
        found.append("prologue")
        return apart(*args)

    monkeypatch.setattr(folded, "attention_prologue", noted)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("processors", [1, 40] if FULL else [3])
def test_a_decode_with_its_prologue_is_the_two_kernels_apart(
    dtype: torch.dtype, processors: int, launches: list[str]
) -> None:
    step = Step(dtype=dtype)
    step.check(HeadNorms(q=step.weights[0], k=step.weights[1], eps=1e-5), processors=processors)
    if FULL:
        step.check(processors=processors)
    assert not launches


@pytest.mark.parametrize(("half", "head_dim"), [(0, 16), (4, 16), (8, 24), (12, 24)] if FULL else [(0, 16), (8, 24)])
def test_a_part_of_a_head_may_be_rotated_or_nothing(half: int, head_dim: int, launches: list[str]) -> None:
    step = Step((7, 33, 0, 64) if FULL else (17,), half, head_dim=head_dim, group=3)
    exact = [weight.float() for weight in step.weights]
    each = {"q": torch.rand(6, head_dim), "k": torch.rand(2, head_dim)}
    for weights in ({"q": exact[0], "k": exact[1]}, {"q": None, "k": None}, each)[:: 1 if FULL else 2]:
        step.check(HeadNorms(**weights, eps=1e-5), processors=4)
    assert not launches


@pytest.mark.parametrize("window", [1, 5, 16, 40] if FULL else [5])
def test_a_window_holds_the_new_token_always(window: int) -> None:
    Step((33,)).check(None, window, 4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))


def test_caps_alibi_and_chunks_see_the_new_token() -> None:
    lengths = (1, 16, 17, 33, 64, 65) if FULL else (33,)
    Step(lengths).check(soft_cap=2.0, processors=4)
    Step(lengths).check(alibi=torch.tensor([0.5, 0.25, 0.1, 0.01]), processors=4)
    Step(lengths).check(chunk=16, processors=3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_8_bit_cache_gives_the_new_token_as_it_keeps_it(dtype: torch.dtype) -> None:
    """Numbers are whole, as the interpreter loses carries where it rounds to e4m3."""
    step = Step((33,), half=0, dtype=dtype).as_fp8()
    step.qkv = (step.qkv * 4).round()
    step.check(processors=3)


def test_a_row_without_a_slot_writes_nothing_and_padding_is_zero() -> None:
    step = Step((0, 5))
    got = step.run(folded.prologue_decode, None)
    assert not got[0][0].any() and got[0][1].isfinite().all()
    step.slots = torch.tensor([-1, -1])
    before = step.case.k_cache
    assert torch.equal(step.run(folded.prologue_decode, None)[1].nan_to_num(7.0), before.nan_to_num(7.0))


def test_what_does_not_fold_has_a_launch_of_its_own(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step((3,))
    after = HeadNorms(q=step.weights[0], k=step.weights[1], eps=1e-5, is_after_rope=True)
    step.check(after)
    step.check(query_factors=torch.rand(200) + 0.5)
    assert len(launches) == 2
    shape = AttentionShape(4, 2, 16, step.dtype, step.dtype, (None,), is_batch_invariant=True)
    fixed = plan_attention(shape, step.case.lengths, None, 1, 1)
    step.run(folded.prologue_decode, None, plan=fixed)
    assert len(launches) == 3, "a row in a mixed step must get the same bits"
    monkeypatch.setattr(folded, "MOST_FOLDED_ROWS", 0)
    step.check()
    assert len(launches) == 4
