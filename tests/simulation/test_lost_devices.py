"""The whole pipeline on a device that is lost at a random step: health says so in time, requests end once or go on.

In full: `python -m tests.simulation.lost_devices --seeds 2000`.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from tests.counts import count
from tests.simulation.lost_devices import STEPS_IN_FLIGHT, run_lost_seed

pytestmark = [pytest.mark.simulation, pytest.mark.slow]


@pytest.mark.parametrize(("is_split", "num_seeds"), [(False, count(5, 200)), (True, count(2, 40))])
def test_a_device_lost_at_a_random_step_is_told_in_time(is_split: bool, num_seeds: int) -> None:
    states: Counter[str] = Counter()
    for seed, steps_in_flight in product(range(num_seeds), STEPS_IN_FLIGHT):
        states += run_lost_seed(seed, steps_in_flight, is_split=is_split).states
    kinds = [kind for kind in ("fails", "hangs", "silent") if states[kind]]
    assert states["slow"], "a device that is slow before it is lost"
    assert states["told"] >= num_seeds and len(kinds) >= (2 if is_split else 3), states
