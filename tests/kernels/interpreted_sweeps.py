"""The sweeps over tilings, dry: in Triton's interpreter, with a process that tries candidates first.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_sweeps.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.kernels.layout.work_lists import Tiling as AttentionTiling
from millrace.kernels.triton import launch as triton_launch
from tests.bench.gpu.few_rows import Tiling as ProductTiling
from tests.bench.gpu.place import DRY
from tests.bench.gpu.sweeps import attention as attention_sweep
from tests.bench.gpu.sweeps import product_candidates
from tests.bench.gpu.sweeps import products as product_sweep
from tests.bench.gpu.sweeps.sweeping import Sweeping, command_line, run


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


@pytest.fixture
def told(tmp_path: Path) -> Path:
    return tmp_path / "told.json"


def read(told: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told.read_text())
    assert found["device"] == DRY and found["versions"]["triton"]
    return found


def test_attention_is_timed_by_each_tiling_but_one_that_raises(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works, raises = AttentionTiling(16, 16, 4, 2, 2), AttentionTiling(16, 24, 4, 2, 2)
    monkeypatch.setitem(attention_sweep.DRY_TILINGS, "decode", (raises, works))
    assert attention_sweep.main(["--dry", "--json", str(told)]) == 0
    found = read(told)
    assert [case["case"] for case in found["cases"]] == ["tiny decode", "tiny decode fp8", "tiny extend"]
    for case in found["cases"]:
        today, other = case["rows"]
        assert today["is_today"] and not other["is_today"] and 0 < other["floor_share"] < 1 and other["plan_us"] > 0
    assert found["cases"][0]["rows"][1]["tiling"] == list(works) and not found["is_cut_short"]
    names = [f"tiny decode{cache} (16, 24, 4, 2, 2)" for cache in ("", " fp8")]
    assert list(found["left_out"]) == names and "power of 2" in found["left_out"][names[0]]


def test_products_are_timed_by_each_tiling_but_one_that_raises(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raises, *work = ProductTiling(16, 24, 16, 1, 4, 2), *product_candidates.DRY_TILINGS
    monkeypatch.setattr(product_candidates, "DRY_TILINGS", (raises, *work))
    only = ["--only", "output", "--only", "activated", "--rows", "3"]
    assert product_sweep.main(["--dry", "--json", str(told), *only]) == 0
    found = read(told)
    assert [case["case"] for case in found["cases"]] == ["tiny output of 3 rows", "tiny activated of 3 rows"]
    for case in found["cases"]:
        pytorch, *others = case["rows"]
        assert pytorch["tiling"] is None and sorted(row["tiling"][0] for row in others) == [2, 16, 16]
        assert all(row["alone_us"] > 0 and row["chained_us"] > 0 and not row["wrong"] for row in case["rows"])
    assert len(found["left_out"]) == 2 and all("(16, 24, " in name for name in found["left_out"])


# ---- what all sweeps have in common ---------------------------------------------------------------------------------


def test_a_sweep_without_time_says_that_it_is_cut_short(told: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert product_sweep.main(["--dry", "--json", str(told), "--limit-s", "0"]) == 0
    assert read(told)["is_cut_short"] and "tiny qkv of 2 rows and what follows: no time left" in capsys.readouterr().out


def test_what_was_found_is_written_when_a_sweep_is_stopped(told: Path) -> None:
    def stopped(sweeping: Sweeping) -> None:
        sweeping.tell({"case": "a"})
        assert read(told)["cases"] == [{"case": "a"}]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(command_line("sweep", ""), ["--dry", "--json", str(told)], stopped)
    assert read(told)["failed"].startswith("KeyboardInterrupt")


def test_a_candidate_that_raises_when_it_is_timed_is_left_out_and_one_that_is_wrong_fails_the_sweep(told: Path) -> None:
    def lame(sweeping: Sweeping) -> None:
        for job in ("a", "b"):
            with sweeping.trying(job):  # type: ignore[arg-type]
                raise ArithmeticError("off\nthe road")
        sweeping.complain("c gives 3")

    assert run(command_line("sweep", ""), ["--dry", "--json", str(told)], lame) == 1
    found = read(told)
    assert found["left_out"] == dict.fromkeys("ab", "ArithmeticError: off the road") and found["wrong"] == ["c gives 3"]
