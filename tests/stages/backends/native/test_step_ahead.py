"""Steps that are handed over to the library, without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from millrace.stages.backends.native.step_ahead import StepAhead
from millrace.stages.messages import TableEntries
from tests.stages.grants import decode, grant, ints, started


class Chain:
    """Takes every link."""

    def follow(self, step: int, slots: Any, starts: Any) -> bool:
        return True


def test_a_step_handed_over_has_blocks_of_a_window_that_come_alone():
    tables = np.zeros((2, 2, 4), np.int32)
    ahead, chain = StepAhead(2, tables, lambda grant: None), Chain()
    ahead.use(chain, chooses=True)  # type: ignore[arg-type]
    ahead.offer(grant([(1, 0, 3, True)], step=0, started=[started(1)]))
    ahead.offer(decode(1, step=1))
    entries = TableEntries(1, np.array([1]), np.array([3]), ints(7))
    ahead.offer(replace(decode(1, step=2), is_decode=True, more_tables=(entries,)))
    assert not ahead.take(2).is_handed_over  # it follows no link
    ahead.offer(replace(decode(1, step=3), is_decode=True, more_tables=(entries,)))
    assert ahead.take(3).is_handed_over and tables[1].tolist() == [[0] * 4, [0, 0, 0, 7]]
