"""One `Engine` for all cores: engines choose one and override nothing, and no reader asks which one it has."""

from __future__ import annotations

import ast

import pytest

from millrace.deploy.ray.ray_engine import RayEngine
from millrace.stages.engine.engine import Engine
from millrace.stages.fleet.fleet_engine import FleetEngine
from millrace.stages.split.split_engine import SplitEngine
from tests.test_layout import name_of, trees

READERS = ("stages/engine", "stages/split", "stages/fleet", "deploy")
PARTS = ("Stages", "Core", "Processes", "Engine", "Scheduler", "Pipeline", "StageRunner")  # ends of the types' names


@pytest.mark.parametrize("kind", [SplitEngine, FleetEngine, RayEngine])
def test_an_engine_of_other_processes_only_chooses_its_core(kind: type[Engine]) -> None:
    assert kind.__bases__ == (Engine,)
    made = {"__module__", "__doc__", "__abstractmethods__", "_abc_impl", "__parameters__"}  # by Python
    assert vars(kind).keys() - made == {"__init__"}


def test_no_code_asks_for_the_class_of_an_engines_parts_or_casts_them() -> None:
    wrong = []
    for path, tree in trees().items():
        if not path.as_posix().startswith(READERS):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node.func) in ("cast", "typing.cast", "isinstance"):
                kinds = ast.unparse(node.args[int(name_of(node.func) == "isinstance")])
                if kinds.strip("'\"[]").endswith(PARTS):
                    wrong.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, wrong
