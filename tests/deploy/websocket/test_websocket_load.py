"""A short run of the load of `tests/bench/websocket_load.py`."""

from __future__ import annotations

import pytest

from tests.bench.websocket_load import measure
from tests.counts import FULL


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [False, True] if FULL else [True])
def test_of_many_streams_none_loses_repeats_or_reorders_anything(cuts: bool):
    found = measure(num_streams=60, num_sockets=2, seconds=6.0 if cuts else 2.0, cuts=cuts)
    assert not found["complaints"]
    assert found["cuts"] >= 2 * cuts
    assert found["chunks"] > 60 * found["tokens_per_stream"] / 4
