"""A failing run is cut down to few clients, and repeats from one command."""

from __future__ import annotations

import pytest

from tests.simulation.background import FOUND_BY
from tests.simulation.bugs import BUGS
from tests.simulation.minimise import Part, failure, minimise, reduced
from tests.simulation.setups import draw_setup

pytestmark = [pytest.mark.simulation]


def as_drawn(setup):  # type: ignore[no-untyped-def]
    return setup


@pytest.mark.parametrize(
    ("items", "needed"), [(range(1), {0}), (range(17), {3}), (range(30), {0, 13, 29}), (range(8), set(range(8)))]
)
def test_what_is_left_is_what_the_failure_needs(items, needed):
    assert set(reduced(list(items), lambda left: needed <= set(left))) == needed


@pytest.mark.slow
def test_a_planted_bug_is_shown_by_at_most_ten_clients():
    name = next(name for name in sorted(FOUND_BY) if name in BUGS)
    seed = FOUND_BY[name][0]
    with BUGS[name]():
        part = minimise(draw_setup(seed), as_drawn)
        assert len(part.clients) <= 10
        assert failure(seed, part, as_drawn) is not None
        assert f"--clients {' '.join(map(str, part.clients))} --faults " in part.flags
    assert failure(seed, part, as_drawn) is None


def test_a_run_that_passes_is_not_minimised():
    with pytest.raises(ValueError, match="seed 0 does not fail"):
        minimise(draw_setup(0), as_drawn)


def test_a_part_of_a_run_has_its_clients_and_faults_only():
    setup = draw_setup(3)
    part = Part(clients=(1,), faults=tuple(setup.faults)[:1]).of(setup)
    assert part.clients == (setup.clients[1],) and len(part.faults) == min(1, len(setup.faults))
