"""What `millrace simulate --fleet` predicts is what the fleet does, with steps of known length."""

from __future__ import annotations

import pytest

from tests.counts import FULL, count
from tests.simulation.timed_fleet import FIGURES, drawn, live, simulated

WITHIN = 0.10
OF_MANY = ("ttft_p99_ms",)  # of few requests it is that of one


@pytest.mark.slow
def test_a_fleet_does_what_its_simulation_predicts():
    trace = drawn(count(60, 400), 14.0, 24)
    found, predicted = live(trace), simulated(trace)
    for name in FIGURES:
        if FULL or name not in OF_MANY:
            assert predicted[name] == pytest.approx(found[name], rel=WITHIN), (name, found, predicted)
    assert found["cached_tokens"] > 0
