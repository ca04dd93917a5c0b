"""The benchmark of a front's choices, with few steps."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from tests.bench import fleet_cost


def test_each_part_of_a_fleet_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(fleet_cost, "NUM_STEPS", 40)
    monkeypatch.setattr(sys, "argv", ["fleet_cost", "--engines", "3", "--rounds", "1", "--output", str(figures)])
    assert fleet_cost.main() == 0
    found = orjson.loads(figures.read_bytes())
    assert found.pop("engines") == 3
    assert all(found[name] > 0 for name in ("dispatch_us", "merge_us", "choose_us", "choose_by_keys_us")), found
