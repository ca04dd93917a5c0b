"""A short run of the load of `tests/bench/websocket_load.py`."""

from __future__ import annotations

import pytest

from tests.bench.websocket_load import measure
from tests.counts import FULL


@pytest.mark.slow
@pytest.mark.parametrize("cut_every_s", [None, 5.0] if FULL else [1.0])
def test_of_many_streams_none_loses_repeats_or_reorders_anything(cut_every_s: float | None):
    seconds = 2.0 if cut_every_s is None else cut_every_s + 1.5
    found = measure(num_streams=60, num_sockets=2, seconds=seconds, cut_every_s=cut_every_s)
    assert not found["complaints"]
    assert cut_every_s is None or found["cuts"] >= 2
    assert found["chunks"] > 60 * found["tokens_per_stream"] / 4
