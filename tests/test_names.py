"""Names that hold in the whole product: a class name exists once, and no private word names a class or a module."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.test_layout import trees

PRIVATE_WORDS = {
    "bell", "bells", "books", "crew", "door", "entrance", "followers", "holdings", "lead", "lineup", "lives", "mirror",
    "news", "oversight", "party", "playhead", "pressure", "reel", "seat", "sharing", "tally", "told", "veil", "wish",
    "wishes",
}  # fmt: skip


def class_names(modules: Mapping[Path, ast.Module]) -> dict[str, list[Path]]:
    """The files that define each top-level class."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return found


def defined_twice(modules: Mapping[Path, ast.Module]) -> list[str]:
    """A line for each class name with more than one definition."""
    names = class_names(modules).items()
    return [f"{name}: {', '.join(map(str, paths))}" for name, paths in sorted(names) if len(paths) > 1]


def words(name: str) -> set[str]:
    """`SequenceView` and `sequence_view` are both {"sequence", "view"}."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def private(names: Iterable[str]) -> list[str]:
    """The names with a private word in them."""
    return sorted(name for name in names if words(name) & PRIVATE_WORDS)


def test_a_class_name_exists_once_in_the_product() -> None:
    assert defined_twice(trees()) == []


def test_a_second_class_of_a_name_is_noticed() -> None:
    first = next(name for name, paths in class_names(trees()).items() if paths)
    planted = {**trees(), Path("stages/planted.py"): ast.parse(f"class {first}:\n    pass\n")}
    assert [line.split(":")[0] for line in defined_twice(planted)] == [first]


def test_no_class_has_a_private_word_in_its_name() -> None:
    assert private(class_names(trees())) == []


def test_no_module_has_a_private_word_in_its_name() -> None:
    assert private({part for path in trees() for part in path.with_suffix("").parts}) == []


@pytest.mark.parametrize("name", ["BellTower", "Holdings", "_Tally", "line_bells", "playhead", "SharedBell"])
def test_a_private_word_is_noticed(name: str) -> None:
    assert private([name]) == [name]


@pytest.mark.parametrize("name", ["Leader", "WakeupBatch", "sharding", "LiveEnv"])
def test_a_word_that_only_looks_like_one_is_not(name: str) -> None:
    assert private([name]) == []
