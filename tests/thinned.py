"""Which cases of a parametrized test run in CI, where a function has many: all of them run with MILLRACE_FULL=1.

A case is kept if it is the first with some value of some parameter, then more up to `MOST`, always the same ones: they
are in the order of a digest of their names, so that no product of two parameters is cut along one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from zlib import crc32

import pytest

MOST = 6  # cases of a function, more if they are needed to have each value once
MOST_INTERPRETED = 3
FOLDERS = (
    *("tests/kernels/", "tests/stages/sample/test_greedy.py", "tests/deploy/api/openai/test_tool_calls.py"),
    *("tests/model/variants/", "tests/model/text/test_tokenizer_variants.py", "tests/stages/device/"),
    "tests/stages/backends/",
)


def dropped(items: Iterable[pytest.Item], most: int = MOST) -> list[pytest.Item]:
    """The cases that do not run in CI."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        path, interpreted = item.nodeid.partition("::")[0], item.path.name.startswith("interpreted")
        if hasattr(item, "callspec") and (interpreted or path.startswith(FOLDERS)):
            functions[item.nodeid.partition("[")[0]].append(item)
    gone = []
    for cases in functions.values():
        gone += _without(cases, MOST_INTERPRETED if cases[0].path.name.startswith("interpreted") else most)
    return gone


def values_of(item: pytest.Item) -> set[tuple[str, int]]:
    """Each parameter of a case with which of its values it has. Values are the same objects in all cases; pytest's own
    `indices` count the cases where decorators are stacked."""
    return {(name, id(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]


def _without(cases: Sequence[pytest.Item], most: int) -> list[pytest.Item]:
    drawn = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
    seen: set[tuple[str, int]] = set()
    new, others = [], []
    for item in drawn:
        values = values_of(item)
        (others if values <= seen else new).append(item)
        seen |= values
    return others[max(0, most - len(new)) :]
