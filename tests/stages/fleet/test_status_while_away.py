"""The joint status of several engine processes while one of them is away: nothing of it is shown or left behind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.runtime.channel import ChannelStats
from millrace.stages.config import EngineConfig
from millrace.stages.fleet.merged_status import merged, remains
from millrace.stages.schedule.adapter_slots import AdapterState
from millrace.stages.split.protocol import AdapterSlotsStatus, CoreStatus, EdgeStatus, PoolStatus
from millrace.stages.split.remote_views import SchedulerView
from millrace.stages.split.status import FIGURES

NUM_SLOTS = 3
SEQUENCE_DTYPES = (np.int64, np.int8, np.int32, np.int32, np.int32, np.int32, np.bool_)


def status(digest: str, num_running: int = 1) -> CoreStatus:
    """Of a process with one adapter in its two device slots, one sequence in slot 2, and one that drafts."""
    figures: dict[str, Any] = dict.fromkeys(FIGURES, num_running) | {"admission_blocked_reason": ""}
    drafts = {"num_tokens": 2, "num_drafting": 1, "num_drafts": 10, "num_draft_tokens": 20, "num_accepted_tokens": 5}
    adapters = AdapterSlotsStatus([("resident", digest, 1), ("empty", "", 0)], 4, {digest: 1}, 1)
    return CoreStatus(
        stages=[],
        edges=[EdgeStatus("a->b", ChannelStats(8, 1, 2, 2, 9, 0.0, 0.0), 1, 5.0)],
        figures=figures,
        preemptions={("swap", "blocks"): 2},
        drafts=drafts | {"num_accepted_at": [3, 2]},
        sequences=[
            np.array([value], dtype) for value, dtype in zip((7, 2, 2, 5, 9, 0, 0), SEQUENCE_DTYPES, strict=True)
        ],
        num_generated=np.array([0, 0, 4], np.intp),
        num_held=np.array([0, 0, 1], np.int32),
        waste=0.5,
        pool=PoolStatus(10, 9, 1, 0, 0, 0),
        host_pool=None,
        swaps_refused=(0, 0),
        prefixes=(8, 4, 0),
        step_tokens=[1, 2],
        idle_gaps=None,
        adapters=adapters,
    )


def view() -> SchedulerView:
    """What observers see of two processes."""
    config = EngineConfig(max_num_seqs=2 * NUM_SLOTS, enable_lora=True, max_loras=4)
    return SchedulerView(config, lambda sequence_id: "r", 2)


def test_adapters_keep_the_slots_of_their_process_while_another_one_is_away() -> None:
    seen = view()
    for present in ({0: "a", 1: "b"}, {1: "b"}, {0: "a"}):
        seen.update(merged({index: status(digest) for index, digest in present.items()}, [], NUM_SLOTS))
        assert seen.adapters is not None
        expected = [present.get(0, ""), "", present.get(1, ""), ""]
        assert [slot.digest for slot in seen.adapters.slots.slots] == expected
        assert seen.adapters.slots.num_resident == len(present) and len(seen.adapters) == len(present)
        states = {slot.state for slot in seen.adapters.slots.slots if not slot.digest}
        assert states == {AdapterState.EMPTY}


def test_a_dead_process_leaves_its_counts_and_nothing_that_it_held() -> None:
    left = merged({0: remains(status("a"))}, [remains(status("a"))], 0)  # of two that have died
    (edge,) = left.edges
    assert edge.stats.depth == 0 and edge.num_waiting == 0 and math.isinf(edge.waiting_since)
    found = merged({1: status("b")}, [left], NUM_SLOTS)
    assert found.drafts == status("b").drafts | {
        **{"num_drafts": 30, "num_draft_tokens": 60, "num_accepted_tokens": 15, "num_accepted_at": [9, 6]}
    }
    assert found.preemptions == {("swap", "blocks"): 6} and found.prefixes == (24, 12, 0)
    assert found.adapters is not None and found.adapters.num_loads == 12 and found.adapters.num_owed == 1
    assert found.figures["num_running"] == 1 and found.pool.num_in_use == 1 and found.pool.num_blocks == 10
    assert found.sequences[2].tolist() == [NUM_SLOTS + 2] and found.num_held.tolist() == [0, 0, 0, 0, 0, 1]
    alone = merged({0: replace(status("a"), adapters=None)}, [], NUM_SLOTS)
    assert alone.adapters is None
