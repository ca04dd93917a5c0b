"""Candidates for launch options, dry: the sweeps' parts in Triton's interpreter.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_sweeps.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.kernels.layout.work_lists import AttentionShape, decode_tiling
from millrace.kernels.layout.work_lists import Tiling as AttentionTiling
from millrace.kernels.tilings.attention import StepTiling
from millrace.kernels.tilings.products import LIBRARY, ProductForm
from millrace.kernels.tilings.tables import load_tilings
from millrace.kernels.triton import launch as triton_launch
from tests.bench.gpu.place import Place
from tests.bench.gpu.sweeps import attention, product_candidates, products
from tests.bench.gpu.sweeps.product_candidates import Product, ProductCase


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


class Found:
    """What a part says."""

    def __init__(self, *only: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.left_out: list[dict[str, str]] = []
        note = lambda kind, value: self.left_out.append(value)  # noqa: E731
        self.place = Place(torch.device("cpu"), 0, self.rows.append, self.wrong.append, note=note, only=only)


def test_attention_is_timed_by_each_tiling_but_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    works, raises = (attention.Choice(AttentionTiling(16, block_n, 4, 2, 2), 1) for block_n in (16, 24))
    monkeypatch.setitem(attention.DRY_CHOICES, "decode", (raises, works))
    found = Found()
    attention.run(found.place)
    assert not found.wrong and all(row["us"] > 0 and row["floor_us"] > 0 for row in found.rows)
    best = {row["name"]: row for row in found.rows if "shipped_us" in row}
    assert list(best) == ["tiny decode", "tiny decode fp8", "tiny extend"]
    assert all(row["us"] <= row["shipped_us"] for row in best.values())
    assert f"tiny decode {works}" in {row["name"] for row in found.rows}
    names = [f"tiny decode{cache} {raises}" for cache in ("", " fp8")]
    assert [each["what"] for each in found.left_out] == names and "power of 2" in found.left_out[0]["why"]


def test_a_tiling_that_gives_other_numbers_is_wrong_and_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    attend = attention.AttentionLoad.attend

    def spoilt(load: attention.AttentionLoad, plan: Any) -> Any:
        launched.append(plan)
        found = attend(load, plan)
        return {"out": found["out"] + (len(launched) > 2)}  # today's tiling is launched twice: checked, and timed

    monkeypatch.setattr(attention.AttentionLoad, "attend", spoilt)
    found = Found("tiny extend")
    attention.run(found.place)
    assert len(found.wrong) == 1 and "numbers of tiny extend (32, 16, 4, 2, 1): the result are off" in found.wrong[0]
    (best,) = (row for row in found.rows if "shipped_us" in row)
    assert best["us"] == best["shipped_us"]


def test_products_are_timed_in_each_form_but_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    raises = ProductForm(form="split", block_m=16, block_n=16, block_k=16, num_splits=3, num_warps=16)
    monkeypatch.setattr(product_candidates, "DRY_FORMS", (raises, *product_candidates.DRY_FORMS))
    counters = products.Inputs.counters

    def none(inputs: products.Inputs, form: ProductForm, count: int = 1) -> Any:
        return [None] * count if form == raises else counters(inputs, form, count)

    monkeypatch.setattr(products.Inputs, "counters", none)
    found = Found("output", "gate_up")
    products.run(found.place)
    best = [row for row in found.rows if "library_us" in row]
    assert [row["name"] for row in best] == ["tiny output of 3 rows", "tiny gate_up of 3 rows"]
    assert not found.wrong and len(found.rows) == 2 * (1 + 2 + 1), "the library's, two forms, and the best"
    assert len(found.left_out) == 2 and all("too few counters" in each["why"] for each in found.left_out)


def test_the_best_forms_are_a_table_that_an_engine_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "dtype", torch.bfloat16)
    monkeypatch.setattr(Place, "name", "NVIDIA H200")
    case = ProductCase(Product("m output", 1024, 2048, "add"), 4)
    form = product_candidates.forms_of(case)[1]
    place = replace(Found().place, out=tmp_path)
    products.tabulate(place, [(case.shape, form, 3.25), (replace(case.shape, num_rows=64), LIBRARY, 5.0)])
    table = load_tilings(str(tmp_path / products.TABLE), "NVIDIA H200", 132)
    assert table.product_forms(1024, 2048, "add", "bfloat16") == (((4, form), (64, LIBRARY)), "measured")


def test_the_best_tilings_of_attention_are_in_the_table_beside_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "dtype", torch.bfloat16)
    monkeypatch.setattr(Place, "name", "NVIDIA H200")
    case = next(each for each in attention.cases_of(None) if each.is_fp8)
    place, step = replace(Found().place, out=tmp_path), attention.step_of(case)
    tiling = StepTiling(block_m=16, block_n=64, num_warps=4, num_stages=4, occupancy=2, min_tiles=2)
    attention.tabulate(place, {"decode": {step: (tiling, 120.0)}, "extend": {}})
    product = ProductCase(Product("m output", 1024, 2048, "add"), 4)
    products.tabulate(place, [(product.shape, LIBRARY, 5.0)])
    table = load_tilings(str(tmp_path / attention.TABLE), "NVIDIA H200", 132)
    assert table.attention("decode", step) == tiling and table.find("product", product.shape) == LIBRARY
    shape = AttentionShape(16, 8, 128, torch.bfloat16, torch.float8_e4m3fn, tilings=table)
    assert decode_tiling(shape, 90, 64) == (16, 64, 4, 4, 2, 2)
