"""Old module names lead to the new ones."""

from __future__ import annotations

import importlib

import pytest

import millrace.deploy
import millrace.stages  # noqa: F401  these register what moved

MOVED = [
    ("millrace.stages.policy", "millrace.stages.schedule.policy"),
    ("millrace.stages.processors", "millrace.stages.sample.logits_processor"),
    ("millrace.stages.pytest_plugin", "millrace.stages.testing.pytest_plugin"),
    ("millrace.stages.conformance", "millrace.stages.testing.conformance_kit"),
    ("millrace.stages.split.engine", "millrace.stages.split.split_engine"),
    ("millrace.deploy.parsers", "millrace.deploy.api.parsers"),
]


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_the_commands_that_made_the_bundled_model_say_where_they_are(name: str) -> None:
    with pytest.raises(ImportError, match=f"has moved: run millrace.model.demo.making.{name}$"):
        importlib.import_module(f"millrace.model.demo.{name}")


@pytest.mark.parametrize(("old", "new"), MOVED)
def test_an_old_module_name_raises_an_import_error_that_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=f"{old} has moved: import {new}$"):
        importlib.import_module(old)
    assert importlib.util.find_spec(new) is not None


def test_importing_an_old_name_from_its_package_says_the_new_one_too() -> None:
    with pytest.raises(ImportError, match=r"import millrace\.stages\.schedule\.policy"):
        from millrace.stages import policy  # type: ignore[attr-defined]  # noqa: F401


def test_a_name_that_never_existed_is_not_found_as_always() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'millrace\.stages\.nothing'"):
        importlib.import_module("millrace.stages.nothing")
