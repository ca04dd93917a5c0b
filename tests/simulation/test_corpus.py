"""Seeds that have found bugs of the pipeline, run again for each change. Add the seed of each bug that you mend."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulation.setups import on_streams
from tests.simulation.world import run_seed

pytestmark = [pytest.mark.simulation, pytest.mark.slow]

AS_DRAWN = (1494, 1631)  # a plan that waited for room that nothing would make
# the same on an asynchronous device, an alarm that rang at once for ever, a start that failed and left a task;
# seed, steps in flight
LATE = ((93, 1), (93, 2), (93, 4), (94, 4), (925, 1))


@pytest.mark.parametrize("seed", AS_DRAWN)
def test_a_seed_that_found_a_bug_passes(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize(("seed", "steps"), LATE)
def test_a_seed_that_found_a_bug_on_a_late_device_passes(seed: int, steps: int) -> None:
    run_seed(seed, change=partial(on_streams, steps_in_flight=steps))
