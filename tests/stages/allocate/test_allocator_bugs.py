"""The random plans of test_allocator_machine.py find what they are there to find."""

from __future__ import annotations

import pytest

from tests.stages.allocate.allocator_bugs import BUGS
from tests.stages.allocate.allocator_machine import walk
from tests.stages.allocate.test_allocator_machine import NUM_WALKS


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """By walks that find nothing otherwise: see `test_random_walks_come_by_all_that_is_rare`."""
    with BUGS[name]():
        for seed in range(NUM_WALKS):
            try:
                walk(seed, 50)
            except Exception as error:
                assert not isinstance(error, (AttributeError, TypeError, NameError)), "the bug itself is broken"
                return
    pytest.fail(f"{name} stayed hidden for {NUM_WALKS} walks")
