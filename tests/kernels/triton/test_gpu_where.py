"""The time of a step by kernel: the reported parts add up to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.bench.gpu.parts import where
from tests.bench.gpu.place import Place


def test_the_kernels_that_take_longest_are_named_and_the_others_summed_up() -> None:
    launches = [(f"kernel {us}", float(us)) for us in range(1, 16) for _ in range(4)]
    rows = where.rows_of(launches, 2)
    assert [row["kernel"] for row in rows] == [*(f"kernel {us}" for us in range(15, 3, -1)), "3 others"]
    assert rows[0] == {"kernel": "kernel 15", "count": 2.0, "us": 30.0, "share": 15 / 120}
    assert rows[-1] == {"kernel": "3 others", "count": 6.0, "us": 12.0, "share": 6 / 120}
    assert sum(row["us"] for row in rows) == 240.0 and sum(row["share"] for row in rows) == pytest.approx(1)


def test_kernels_whose_names_begin_alike_stay_apart() -> None:
    rows = where.rows_of([(200 * "k" + end, 1.0) for end in "ab"], 1)
    assert [row["us"] for row in rows] == [1.0, 1.0] and rows[0]["kernel"] == rows[1]["kernel"] == 120 * "k"


@pytest.mark.slow
def test_rows_of_a_step_add_up_to_its_kernels() -> None:
    told: list[dict[str, Any]] = []
    wrong: list[str] = []
    where.run(Place(torch.device("cpu"), 0, told.append, wrong.append))
    whole, *rows = told
    assert not wrong and whole["name"] == "tiny 3 x 1 of 40" and whole["us"] > 0
    assert 2 < len(rows) <= where.NUM_NAMED + 1 and all(row["name"] == whole["name"] for row in rows)
    assert sum(row["us"] for row in rows) == pytest.approx(whole["kernels_us"])
    assert sum(row["count"] for row in rows) == pytest.approx(whole["num_kernels"])
    assert sum(row["share"] for row in rows) == pytest.approx(1)


@pytest.mark.slow
def test_a_profiler_that_sees_no_kernel_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, "profiled", lambda *_: iter(()))
    wrong: list[str] = []
    where.run(Place(torch.device("cpu"), 0, lambda row: None, wrong.append))
    assert wrong == ["the profiler saw no kernel of 3 x 1 of 40"]
