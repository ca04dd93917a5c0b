"""The timed run: whatever becomes of a part or of the run, its rows are there, and the other parts have their time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.bench.gpu.parts import adapters, steps
from tests.bench.gpu.place import DRY
from tests.bench.gpu.sweeps.attention import cases_of
from tests.bench.gpu.timed_run import __main__ as command
from tests.bench.gpu.timed_run.conductor import LOG
from tests.bench.gpu.timed_run.parts import BUDGET_S, DRY_PARTS, PARTS, Part
from tests.bench.gpu.timed_run.rows import KINDS, NAME, RowFile, read_rows
from tests.bench.gpu.timed_run.summary import predictions, table, told
from tests.bench.planted_parts import planted
from tests.counts import count

ROOT = Path(__file__).parents[2]


def ran(folder: Path, parts: list[Part], budget_s: float = 60.0) -> tuple[int, dict[str, Any]]:
    options = Namespace(out=folder, seed=0, dry=True, only=[], budget_s=budget_s, json=None)
    status = command.run(parts, options, ())
    return status, told(read_rows(folder))["parts"]


@pytest.mark.slow
def test_whatever_becomes_of_a_part_the_next_one_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["out_of_memory", "raises", "dies", "hangs", "works"]
    parts = [planted(name, "one", 4.0 if name == "hangs" else 20.0) for name in names]
    status, found = ran(tmp_path, parts)
    assert status == 1 and list(found) == names
    assert all(part["rows"] == [{"name": "it", "us": 2.0, "floor_us": 1.0}] for part in found.values())
    assert found["out_of_memory"]["failed"] == "OutOfMemoryError: tried to allocate 68 GiB"
    assert [kind for row in read_rows(tmp_path) for kind in row if kind == "oom"] == ["oom"]
    assert found["raises"]["failed"] == "ArithmeticError: lost"
    assert found["dies"]["failed"] == "its process ended with status 7"
    assert found["hangs"]["stopped"].startswith("after ") and "seconds" in found["works"]
    shown = capsys.readouterr().out
    assert "it  2 us  floor 1, share 0.50" in shown and "FAILED: ArithmeticError: lost" in shown


@pytest.mark.slow
def test_a_slow_part_takes_no_time_that_is_promised_to_others(tmp_path: Path) -> None:
    parts = [planted("hangs", "a", 1.0), planted("works", "b", 5.0), planted("raises", "c", 9.0, least_s=99.0)]
    began_s = time.monotonic()
    _, found = ran(tmp_path, parts, 15.5)
    assert time.monotonic() - began_s < 15.5
    assert found["hangs"]["began"] == pytest.approx(1.5, abs=0.4), "its limit, and what no later part was promised"
    assert "seconds" in found["works"] and found["works"]["began"] >= 5.0
    assert found["raises"]["skipped"].endswith("s are left of 15.5, it takes 99")


@pytest.mark.slow
def test_a_part_beside_others_is_waited_for_by_those_that_need_it(tmp_path: Path) -> None:
    beside = planted("hangs", "host", 2.0, is_beside=True)
    _, found = ran(tmp_path, [beside, planted("works", "a"), planted("raises", "a", after=("hangs",))])
    kinds = [(row["part"], next(reversed(row))) for row in read_rows(tmp_path)]
    assert kinds.index(("works", "ended")) < kinds.index(("hangs", "stopped")) < kinds.index(("raises", "began"))
    assert found["hangs"]["rows"], "what it had found is told"


def started(folder: Path) -> subprocess.Popen[str]:
    program = (
        "from argparse import Namespace; from pathlib import Path; from tests.bench.gpu.timed_run import __main__ as c;"
        "from tests.bench.planted_parts import planted; import sys;"
        f"o = Namespace(out=Path({str(folder)!r}), seed=0, dry=True, only=[], budget_s=60.0, json=None);"
        "sys.exit(c.run([planted('works'), planted('writes_for_ever')], o, ()))"
    )
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)


KILLS = [  # at which size of the file, by what; the full count has all six
    *((60_000, signal.SIGTERM), (2_000, signal.SIGKILL), (1, signal.SIGTERM)),
    *((60_000, signal.SIGKILL), (2_000, signal.SIGTERM), (1, signal.SIGKILL)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("num_bytes", "number"), KILLS[: count(3, full=6)])
def test_a_run_that_is_killed_leaves_whole_rows_and_no_process(
    tmp_path: Path, num_bytes: int, number: signal.Signals
) -> None:
    file = tmp_path / NAME
    with started(tmp_path) as run:
        deadline_s = time.monotonic() + 60
        while not file.exists() or file.stat().st_size < num_bytes:
            assert time.monotonic() < deadline_s and run.poll() is None
            time.sleep(0.01)
        time.sleep(Random(os.getpid()).uniform(0.02, 0.1))
        run.send_signal(number)
        shown, _ = run.communicate(timeout=120)
    size, same = -1, 0
    while same < 3:  # its workers end with it
        assert time.monotonic() < deadline_s
        same = same + 1 if size == (size := file.stat().st_size) else 0
        time.sleep(0.1)
    rows = read_rows(tmp_path)
    assert len(rows) >= len(file.read_bytes().splitlines()) - 1 and rows[0]["run"]["budget_s"] == 60.0
    numbers = [row["row"]["number"] for row in rows if row["part"] == "writes_for_ever" and "row" in row]
    assert numbers == list(range(1, len(numbers) + 1)), "none is lost"
    assert run.returncode == (command.STOPPED if number is signal.SIGTERM else -number)
    found = told(rows)["parts"]
    if num_bytes > 2_000:
        assert found["works"]["rows"] and found["writes_for_ever"]["stopped"] == "with the run"
    if number is signal.SIGTERM:
        assert "STOPPED: with the run" in shown or not found


# ---- the file, and what is made of it -------------------------------------------------------------------------------


def test_a_file_cut_at_any_byte_has_all_rows_before_and_takes_more(tmp_path: Path) -> None:
    rows = RowFile(tmp_path, time.monotonic())
    for number in range(5):
        rows.write("part", "row", {"name": "it", "us": float(number)})
    whole = (tmp_path / NAME).read_bytes()
    dice = Random(3)
    for cut in (0, 1, len(whole) - 1, len(whole), *(dice.randrange(len(whole)) for _ in range(20))):
        (tmp_path / NAME).write_bytes(whole[:cut])
        num_whole = whole[:cut].count(b"\n") + (whole[cut : cut + 1] == b"\n")
        assert len(read_rows(tmp_path)) == num_whole
        RowFile(tmp_path, 0.0).write("part", "ended", 1.5)
        assert len(read_rows(tmp_path)) == num_whole + 1
        assert any("ended" in line or "1.5 s" in line for line in table(told(read_rows(tmp_path)), {}))


def test_what_json_has_no_number_for_is_written_as_text(tmp_path: Path) -> None:
    RowFile(tmp_path, 0.0).write("part", "row", {"us": float("inf"), "all": [float("nan"), (1, 2)], "path": tmp_path})
    (row,) = read_rows(tmp_path)
    assert row["row"] == {"us": "inf", "all": ["nan", [1, 2]], "path": str(tmp_path)}
    assert "NaN" not in (tmp_path / NAME).read_text()


def test_a_part_that_was_run_again_has_the_rows_of_its_last_time() -> None:
    rows = [
        {"part": "a", "began": 5},
        {"part": "a", "row": {"name": "x"}},
        {"part": "a", "stopped": "after 5 s"},
        {"part": "a", "began": 9},
        {"part": "a", "row": {"name": "y"}},
        {"part": "a", "ended": 3.0},
    ]
    assert told(rows)["parts"] == {"a": {"rows": [{"name": "y"}], "wrong": [], "began": 9, "seconds": 3.0}}


def test_a_prediction_stands_beside_its_row_as_the_same_share_of_the_cards_floor() -> None:
    rows = [{"part": "ab", "began": 1}, {"part": "ab", "row": {"name": "x", "us": 500.0, "floor_us": 200.0}}]
    predicted = {("ab", "x"): {"between": [200.0, 300.0], "before": 400.0, "floor_us": 100.0}}
    (line,) = [line for line in table(told(rows), predicted) if "x" in line.split()]
    assert line.split("  ")[-1] == "predicted 400 to 600, before 400"


def test_predictions_are_of_rows_that_a_run_has() -> None:
    names = {"attention": {case.name for case in cases_of(None)}}
    names["steps"] = {f"qwen3-0.6b {load.name}" for load in steps.SMALL}
    names["steps-8b"] = {f"llama-3.1-8b {load.name}" for load in steps.LARGE}
    names["steps-lora"] = {f"{adapters.SHAPE} {load.name}" for load in adapters.LOADS}
    names["workload"] = {"workload", "workload, fp8 cache", "one stream", "a grammar among the rows, over none"}
    assert predictions() and all(name in names[part] for part, name in predictions())
    assert all(entry["between"][0] <= entry["between"][1] and entry["because"] for entry in predictions().values())


# ---- the table of parts ---------------------------------------------------------------------------------------------


def test_the_parts_fit_the_budget_and_each_begins_with_what_it_takes() -> None:
    ahead = [part for part in PARTS if not part.is_beside]
    assert sum(part.limit_s for part in ahead) <= BUDGET_S == 540
    assert all(0 < part.least_s <= part.limit_s for part in PARTS)
    assert [part.name for part in DRY_PARTS] == [part.name for part in PARTS]
    assert len({part.name for part in PARTS}) == len(PARTS) and "run" in KINDS


def test_a_dry_run_does_not_write_where_results_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RowFile(tmp_path, 0.0).write("run", "run", {"is_dry": True, "budget_s": 1})
    result = command.RESULTS / "gpu-dry.json"
    assert command.main(["--summary", str(tmp_path), "--json", str(result)]) == 2 and not result.exists()
    assert "a dry run measures nothing" in capsys.readouterr().err
    assert command.main(["--summary", str(tmp_path), "--json", str(tmp_path / "it.json")]) == 0
    assert json.loads((tmp_path / "it.json").read_text())["parts"] == {}


def test_without_a_gpu_it_says_so_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_has_gpu", lambda: False)
    assert command.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "no CUDA device" in said.err and not said.out and not list(tmp_path.iterdir())


# ---- dry ------------------------------------------------------------------------------------------------------------

# the full dry run has them; of `checks`, test_gpu_trials.py of kernels/triton runs the trials with twins for kernels;
# nothing in CI runs `checks:run_others`, which takes 8 s of processor time
NOT_IN_CI = {"checks", "experts", "gates", "steps-8b", "steps-fp8", "steps-lora", "transformers"}


@pytest.mark.slow
def test_a_dry_run_runs_the_parts_and_says_that_its_figures_are_no_gpus(tmp_path: Path) -> None:
    names = [part.name for part in PARTS if part.name not in NOT_IN_CI]
    chosen = [argument for name in names for argument in ("--part", name)]
    run = [sys.executable, "-m", "tests.bench.gpu.timed_run", "--dry", "--seed", "3", "--out", str(tmp_path), *chosen]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    log = (tmp_path / LOG).read_text()
    assert done.returncode == 0, done.stdout + log[-5000:]
    found = told(read_rows(tmp_path))
    parts, device = found["parts"], found["device"]
    assert device == DRY and done.stdout.startswith(f"# {DRY}") and found["versions"]["torch"]
    assert list(parts) == names and all(part["rows"] and "seconds" in part for part in parts.values())
    (left_out, *others) = (each for part in parts.values() for each in part.get("left_out", ()))
    assert not others and left_out["what"] == "(16, 24, 4, 2, 2)" and "power of 2" in left_out["why"]
    kernels = {path.stem for path in (tmp_path / "triton").glob("*/*.cubin")}
    assert kernels >= {"list_kernel", "attention_kernel"}, "compiled for a card that is not here"
    rows = {name: {row.get("name") for row in part["rows"]} for name, part in parts.items()}
    assert {"ceilings", "launches"} <= rows["card"]
    assert {"tiny 3 x 1 of 40", "tiny 3 x 1 of 40, top_p: best over library"} <= rows["steps"]
    assert {"workload", "one stream", "3 rows with a grammar", "decode steps, graph"} <= rows["workload"]
    steps = [row for row in parts["workload"]["rows"] if "gap_us" in row]
    assert steps and all(row["done_us"] >= row["began_us"] and row["rows"] <= row["tokens"] for row in steps)
    for name in ("card", "correct", "attention", "steps", "where"):
        assert not {"anyio", "aiohttp", "pydantic", "orjson", "llguidance", "pytest"} & set(parts[name]["packages"])
