"""The joint status of several engine processes while one of them is away: nothing of it is shown or left behind."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from millrace.runtime.channel import ChannelStats
from millrace.runtime.pipeline_status import ChannelStatus, HistogramStatus
from millrace.stages.engine.engine_status import (
    AdapterSlotsStatus,
    CacheStatus,
    CoreReport,
    CoreStatus,
    DraftStatus,
    PoolStatus,
    PrefixStatus,
    SchedulerStatus,
    SequencesStatus,
)
from millrace.stages.fleet.merged_status import merged, remains

NUM_SLOTS = 3
SEQUENCE_DTYPES = (np.int64, np.int8, np.int32, np.int32, np.int32, np.int32, np.bool_)


def report(digest: str) -> CoreReport:
    """Of a process with one adapter in its two device slots, one sequence in slot 2, and one that drafts."""
    columns = zip((7, 2, 2, 5, 9, 0, 0), SEQUENCE_DTYPES, strict=True)
    figures = {"num_recomputed_tokens": 1, "num_preemptions": 2, "step_token_budget": 512}
    scheduler = SchedulerStatus(
        **dict.fromkeys(("num_running", "num_waiting", "num_swapped", "num_parked"), 1),
        **figures,
        admission_blocked_reason="",
        last_granted=5,
        completed_step=4,
        max_num_seqs=NUM_SLOTS,
        preemptions={("swap", "blocks"): 2},
        drafts=DraftStatus(2, 1, 10, 20, 5, [3, 2]),
        adapters=AdapterSlotsStatus([("resident", digest, 1), ("empty", "", 0)], 4, {digest: 1}, 1),
    )
    cache = CacheStatus(
        pool=PoolStatus(10, 9, 1, 0, 0, 0),
        host=None,
        prefixes=PrefixStatus(8, 4, 0),
        num_held=np.array([0, 0, 1], np.int32),
        waste=0.5,
    )
    sequences = SequencesStatus(*(np.array([value], dtype) for value, dtype in columns))
    return CoreReport(
        CoreStatus(scheduler, cache, HistogramStatus([1], [1, 2], 9), None, sequences),
        stages=[],
        channels=[ChannelStatus("a->b", ChannelStats(8, 1, 2, 2, 9, 0.0, 0.0), 1, 5.0)],
    )


def test_adapters_keep_the_slots_of_their_process_while_another_one_is_away() -> None:
    for present in ({0: "a", 1: "b"}, {1: "b"}, {0: "a"}):
        reports = {index: report(digest) for index, digest in present.items()}
        seen = merged(reports, [], NUM_SLOTS, 2).core.scheduler.adapters
        assert seen is not None
        assert [digest for _, digest, _ in seen.slots] == [present.get(0, ""), "", present.get(1, ""), ""]
        assert seen.num_resident == len(present) and seen.num_waiting == len(present)
        assert {state for state, digest, _ in seen.slots if not digest} == {"empty"}
        assert [seen.state_of(digest) for digest in ("a", "b")] == [
            "resident" if digest in present.values() else None for digest in ("a", "b")
        ]


def test_a_dead_process_leaves_its_counts_and_nothing_that_it_held() -> None:
    left = merged({0: remains(report("a"))}, [remains(report("a"))], 0)  # of two that have died
    (channel,) = left.channels
    assert channel.stats.depth == 0 and channel.num_waiting == 0 and math.isinf(channel.waiting_since)
    core = merged({1: report("b")}, [left], NUM_SLOTS, 2).core
    scheduler, cache = core.scheduler, core.cache
    assert str(scheduler.drafts) == str(DraftStatus(2, 1, 30, 60, 15, [9, 6]))
    assert scheduler.preemptions == {("swap", "blocks"): 6} and str(cache.prefixes) == str(PrefixStatus(24, 12, 0))
    assert scheduler.adapters is not None and scheduler.adapters.num_loads == 12 and scheduler.adapters.num_owed == 1
    assert scheduler.num_running == 1 and cache.pool.num_in_use == 1 and cache.pool.num_blocks == 10
    assert core.sequences is not None and core.sequences.slots.tolist() == [NUM_SLOTS + 2]
    assert cache.num_held.tolist() == [0, 0, 0, 0, 0, 1]
    one = report("a").core
    without = CoreReport(replace(one, scheduler=replace(one.scheduler, adapters=None)), [], [])
    assert merged({0: without}, [], NUM_SLOTS).core.scheduler.adapters is None
