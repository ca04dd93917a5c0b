"""`millrace simulate --fleet`: a table with a row for each rule of the router."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from millrace.deploy.cli.main import main
from millrace.stages.recordings.cost_model import FittedCostModel
from tests.stages.recordings.fleet.test_fleet_simulation import COSTS, ENGINE

TRACE = [  # as Mooncake's: milliseconds, and ids of blocks of 512 tokens
    {"timestamp": 40 * at, "input_length": 1100, "output_length": 9, "hash_ids": [at % 7, 100 + at % 7]}
    for at in range(50)
]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "trace.jsonl").write_bytes(b"\n".join(map(orjson.dumps, TRACE)))
    (tmp_path / "model.json").write_bytes(FittedCostModel(COSTS, ENGINE).to_json())
    return ["--trace", str(tmp_path / "trace.jsonl"), "--cost-model", str(tmp_path / "model.json")]


def test_each_rule_has_a_row_and_two_processes_give_the_figures_of_one(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fleet = ["simulate", *files, "--fleet", "4", "--kill", "1@0.9s", "--restart-s", "0.5"]
    figures = []
    for count, policy in (("1", "all"), ("2", "soonest")):
        save = tmp_path / f"result{count}.json"
        assert main([*fleet, "--policy", policy, "--processes", count, "--save-result", str(save)]) == 0
        figures.append(orjson.loads(save.read_bytes()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-5:] == ["cached", "max/mean", "engines", "hours", "resumed"]
    rules = [line.split()[0] for line in lines[1:5]]
    assert rules == ["policy=soonest", "policy=least-work", "policy=round-robin", "policy=prefix-only"]
    assert figures[0][:1] == figures[1]
    assert all(row["finished"] == 50 and row["engines"] == 4 for row in figures[0])
    assert figures[0][0]["cached_tokens"] > figures[0][2]["cached_tokens"] and figures[0][2]["resumed"] > 0


def test_each_rule_for_the_number_of_engines_has_a_row(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fleet = ["--fleet", "3", "--processes", "1", "--target-work-s", "0.1", "--start-s", "0.2"]
    save = tmp_path / "result.json"
    assert main(["simulate", *files, *fleet, "--autoscale", "all", "--save-result", str(save)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines[1:]] == [f"autoscale={name}" for name in ("fixed", "queued-work", "hpa")]
    rows = orjson.loads(save.read_bytes())
    assert [row["engines"] for row in rows] == [3, 3, 1], "the other rule is asked each 15 s, and all is over by then"
    assert all(row["engine_hours"] > 0 and row["finished"] == 50 for row in rows)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--fleet", "0"], "--fleet 0: must be 1 to 4096"),
        (["--fleet", "2", "--processes", "0"], "--processes 0: must be 1 to 4096"),
        (["--fleet", "2", "--policy", "best"], "'best' is no rule; must be of soonest, least-work,"),
        (["--fleet", "2", "--autoscale", "more"], "'more' is no rule; must be of fixed, queued-work, hpa, or all"),
        (["--fleet", "2", "--least-engines", "3"], "--least-engines 3: must be 1 to the 2 of --fleet"),
        (["--fleet", "2", "--start-s", "-1"], "--start-s -1: must be a number at least 0"),
        (["--fleet", "2", "--restart-s", "nan"], "--restart-s nan: must be a number at least 0"),
        (["--fleet", "2", "--kill", "2@1"], "--kill 2@1: must be of the engines 0 to 1, at 0 seconds or later"),
        (["--fleet", "2", "--kill", "0"], "--kill 0: must be ENGINE@SECONDS"),
        (["--fleet", "2", "--set", "scheduler=fifo"], "leave out scheduler"),
    ],
)
def test_options_that_make_no_fleet_are_named(
    files: list[str], options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", *files, *options]) == 3
    assert reason in capsys.readouterr().err
