"""Block tables as changes: the other end of the line has the tables of each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.stages.executor import orders
from millrace.stages.executor.orders import CODEC, SentTables, TableChanges


def sent(changes: TableChanges) -> Any:
    """What the other end gets."""
    header, body = CODEC.encode(changes)
    return CODEC.decode(header, b"".join(map(bytes, body)) if isinstance(body, list | tuple) else bytes(body))


def test_the_other_end_has_the_tables_of_each_step_whatever_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(7)
    monkeypatch.setattr(orders, "LEAST_COMPARED", 0)
    ours, theirs = SentTables(), SentTables()
    tables = np.zeros((0, 0), np.int32)
    num_whole = 0
    for step in range(300):
        match random.integers(8):
            case 0:
                tables = random.integers(0, 99, random.integers(0, 6, 2)).astype(np.int32)
            case 1:
                tables = tables.T  # another order in memory
            case 2:
                tables = random.permutation(tables)
            case _ if tables.size:
                tables = tables.copy()
                tables[random.integers(tables.shape[0]), random.integers(tables.shape[1])] = step + 100
        changes = ours.changes(tables)
        num_whole += changes.whole is not None
        assert np.array_equal(theirs.apply(sent(changes)), tables)
    assert 50 < num_whole < 250


def test_a_step_in_which_one_row_grows_sends_one_entry() -> None:
    ours, theirs = SentTables(), SentTables()
    tables = np.arange(256 * 256, dtype=np.int32).reshape(256, 256)
    theirs.apply(sent(ours.changes(tables)))
    tables[255, 3] = 7
    changes = ours.changes(tables)
    assert changes.whole is None and changes.places.tolist() == [255 * 256 + 3] and changes.blocks.tolist() == [7]
    before = tables.copy()
    tables[0, 0] = 9  # the runner's own array, written for the next step
    assert np.array_equal(theirs.apply(sent(changes)), before)
