"""Plans of `millrace chaos`: of a file, by name, and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.deploy.cli.chaos.fleet import FleetSize
from millrace.deploy.cli.chaos.plan import KINDS, PLANS, Strike, drawn, parse_strike, read_plan
from millrace.stages.errors import ConfigError

SIZE = FleetSize(2, 3)


def test_a_strike_names_a_process_or_a_link_and_its_times():
    assert parse_strike("kill engine1@5", SIZE) == Strike("kill", None, 1, 5.0, 2.0)
    assert parse_strike("stop front0@12.5+13", SIZE) == Strike("stop", 0, None, 12.5, 13.0)
    assert parse_strike("cut front1-engine2@20+0.5", SIZE) == Strike("cut", 1, 2, 20.0, 0.5)
    assert str(parse_strike("cut front1-engine2@20+0.5", SIZE)) == "cut front1-engine2@20+0.5"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill engine1", "KIND TARGET@SECONDS"),
        ("burn engine1@5", "the kinds are kill, stop"),
        ("kill engine3@5", "in a fleet of 2x3, kill strikes one of frontN, engineN"),
        ("kill front0-engine1@5", "kill strikes one of frontN, engineN"),
        ("drain front0@5", "drain strikes one of engineN"),
        ("cut @5", "KIND TARGET@SECONDS"),
        ("cut x@5", "cut strikes one of frontN, engineN, frontN-engineN"),
    ],
)
def test_a_wrong_strike_is_refused_with_what_would_be_right(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_strike(text, SIZE)


def test_a_plan_is_read_from_yaml_or_json(tmp_path: Path):
    yaml, json = tmp_path / "plan.yaml", tmp_path / "plan.json"
    yaml.write_text("rate: 3\nrequests: 40\nin_turn: true\nstrikes:\n  - kill engine1@5\n  - half front0@6\n")
    json.write_text('{"rate": 3, "requests": 40, "in_turn": true, "strikes": ["kill engine1@5", "half front0@6"]}')
    plan = read_plan(yaml, SIZE)
    assert plan == read_plan(json, SIZE)
    assert (plan.rate, plan.num_requests, plan.in_turn) == (3, 40, True)
    assert [one.kind for one in plan.strikes] == ["kill", "half"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no YAML"),
        ("strikes: kill", "must have a list of strikes"),
        ("{strikes: [], speed: 3}", "must have a list of strikes"),
        ("{strikes: [], rate: -1}", "rate = -1: must be a positive number"),
        ("{strikes: [], requests: 2.5}", "requests = 2.5: must be a positive number"),
        ("{strikes: [kill engine9@1]}", "in a fleet of 2x3"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path: Path, text: str, said: str):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_plan(tmp_path / "plan.yaml", SIZE)
    with pytest.raises(ConfigError, match="the plans by name are upgrade, partition"):
        read_plan(tmp_path / "absent.yaml", SIZE)


def test_plans_by_name_strike_each_process_or_pair():
    assert [one.target for one in PLANS["upgrade"](SIZE).strikes] == [
        "engine0",
        "engine1",
        "engine2",
        "front0",
        "front1",
    ]
    pairs = {f"front{front}-engine{engine}" for front in range(2) for engine in range(3)}
    for kind in ("cut", "stall"):
        assert {one.target for one in PLANS["partition"](SIZE).strikes if one.kind == kind} == pairs
    assert {one.target for one in PLANS["clocks"](SIZE).strikes} == {"front0", "front1"}


def test_drawn_plans_are_those_of_their_seed_and_have_each_kind():
    assert drawn(SIZE, 3, 1.0) == drawn(SIZE, 3, 1.0) != drawn(SIZE, 4, 1.0)
    strikes = [one for seed in range(20) for one in drawn(SIZE, seed, 1.0).strikes]
    assert {one.kind for one in strikes} == set(KINDS)
    assert all(parse_strike(str(one), SIZE) == one for one in strikes)
    assert max(one.at_s for one in strikes) < 60.0


@pytest.mark.parametrize("text", ["2", "0x3", "2x9", "2x3x4", ""])
def test_a_wrong_size_is_refused(text: str):
    with pytest.raises(ConfigError, match="must be FRONTSxENGINES"):
        FleetSize.parse(text)
