"""CI leaves out cases of functions that have many, and no value of a parameter with them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.thinned import MOST, MOST_INTERPRETED, dropped


def cases(file: str, *sizes: int) -> list[Any]:
    """Those of a function with so many values of each parameter."""
    return [
        SimpleNamespace(
            nodeid=f"{file}::test[{'-'.join(map(str, indices))}]",
            path=Path(file),
            callspec=SimpleNamespace(indices={str(place): index for place, index in enumerate(indices)}),
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
            assert {item.callspec.indices[str(place)] for item in left} == set(range(size))
        assert max(MOST, max(sizes)) <= len(left) or len(left) == MOST


def test_few_cases_and_those_elsewhere_all_run():
    for file, size in (("tests/kernels/test_a.py", MOST), ("tests/stages/test_a.py", 99)):
        assert len(kept(cases(file, size))) == size


def test_interpreted_cases_are_fewer_and_always_the_same():
    left = kept(cases("tests/kernels/interpreted_a.py", 2, 5, 5))
    assert MOST_INTERPRETED <= len(left) <= 9 and left == kept(cases("tests/kernels/interpreted_a.py", 2, 5, 5))
