"""CI leaves out cases of functions that have many, and no value of a parameter with them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.thinned import MOST, MOST_INTERPRETED, dropped, values_of


def cases(file: str, *sizes: int) -> list[Any]:
    """Those of a function with so many values of each parameter."""
    return [
        SimpleNamespace(
            nodeid=f"{file}::test[{'-'.join(map(str, indices))}]",
            path=Path(file),
            callspec=SimpleNamespace(params={str(place): index for place, index in enumerate(indices)}),
        )
        for indices in product(*map(range, sizes))
    ]


def kept(all_cases: list[Any]) -> list[Any]:
    gone = {item.nodeid for item in dropped(all_cases)}
    return [item for item in all_cases if item.nodeid not in gone]


def test_every_value_of_every_parameter_is_in_a_case_that_runs():
    for sizes in ((3, 4, 5), (40,), (2, 2, 2, 2, 2), (30, 2)):
        left = kept(cases("tests/kernels/native/test_a.py", *sizes))
        for place, size in enumerate(sizes):
            assert {item.callspec.params[str(place)] for item in left} == set(range(size))
        assert max(MOST, max(sizes)) <= len(left) or len(left) == MOST


def test_few_cases_and_those_elsewhere_all_run():
    for file, size in (("tests/kernels/test_a.py", MOST), ("tests/stages/test_a.py", 99)):
        assert len(kept(cases(file, size))) == size


def test_interpreted_cases_are_fewer_and_always_the_same():
    left = kept(cases("tests/kernels/interpreted_a.py", 2, 5, 5))
    assert MOST_INTERPRETED <= len(left) <= 9 and left == kept(cases("tests/kernels/interpreted_a.py", 2, 5, 5))


@pytest.mark.parametrize("size", [3, 40, 500, 7_000])
@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_values_of_stacked_decorators_are_told_apart(request: pytest.FixtureRequest, size: int, name: str):
    function = request.node.originalname
    same = [item for item in request.session.items if getattr(item, "originalname", "") == function]
    params = {tuple(item.callspec.params.values()) for item in same}  # type: ignore[attr-defined]
    assert len(set().union(*map(values_of, same))) == len({size for size, _ in params}) + len(
        {name for _, name in params}
    )
    assert values_of(request.node) == {("size", id(size)), ("name", id(name))}
