"""The status of several engine processes as that of one: sums, with slots and blocks side by side."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from millrace.stages.fleet.front import joint_config
from millrace.stages.fleet.merged_status import merged, remains
from millrace.stages.params import SamplingParams
from millrace.stages.split.front import CORE
from millrace.stages.split.protocol import CoreStatus
from millrace.stages.split.remote_views import RemoteCoreView
from millrace.stages.split.status import read_status
from millrace.stages.testing.scripted.engine import SMALL, scripted_engine

NUM_SLOTS = SMALL.max_num_seqs


def status_of_a_running_engine() -> CoreStatus:
    async def main() -> CoreStatus:
        async with scripted_engine(SMALL, num_cpu_blocks=7) as engine:
            stream = engine.generate("abc", SamplingParams(max_tokens=400, ignore_eos=True))
            await anext(stream)
            core, pipeline = engine.parts.core, engine.pipeline
            status = read_status(core, pipeline, list(pipeline.channels), with_blocks=True)
            await stream.aclose()  # type: ignore[attr-defined]
        return replace(status, stages=[stage for stage in status.stages if stage.name in CORE])

    return asyncio.run(main())


def test_two_processes_are_shown_as_one_with_twice_the_slots_and_blocks() -> None:
    one = status_of_a_running_engine()
    early = [replace(stage, last_progress_s=stage.last_progress_s - 5.0, is_busy=True) for stage in one.stages]
    both = merged({0: one, 2: replace(one, stages=early)}, [], NUM_SLOTS)

    assert both.pool.num_blocks == 2 * one.pool.num_blocks and both.pool.num_in_use == 2 * one.pool.num_in_use > 0
    assert both.host_pool is not None and both.host_pool.num_blocks == 14
    assert both.figures["num_running"] == 2 and both.figures["completed_step"] == one.figures["completed_step"]
    assert both.sequences[2].tolist() == [0, 2 * NUM_SLOTS] and len(both.num_held) == 3 * NUM_SLOTS
    assert both.num_held[2 * NUM_SLOTS] == one.num_held[0] and not both.num_held[NUM_SLOTS : 2 * NUM_SLOTS].any()
    assert list(both.step_tokens) == [2 * number for number in one.step_tokens] and both.waste == one.waste
    assert both.blocks is not None and one.blocks is not None
    assert both.blocks.table_blocks.tolist() == [
        *one.blocks.table_blocks.tolist(),
        *(one.blocks.table_blocks + one.pool.num_blocks).tolist(),
    ]
    for stage, alone in zip(both.stages, one.stages, strict=True):
        assert stage.last_progress_s == alone.last_progress_s and stage.is_busy == alone.is_busy
        assert stage.busy == 2 * alone.busy and list(stage.wait_us) == [2 * number for number in alone.wait_us]

    config = joint_config(replace(SMALL, data_parallel_size=3))
    view = RemoteCoreView(config, _Info, {}, {}, lambda _: "r")  # type: ignore[arg-type]
    view.update(replace(both, stages=[], edges=[]))
    assert view.scheduler.slots.running().tolist() == [2 * NUM_SLOTS], "both are the same sequence in this test"
    assert view.pool.num_free == both.pool.num_free and view.tables.blocks.shape[0] == 3 * NUM_SLOTS


class _Info:
    num_blocks, block_size, num_host_blocks = 256, 16, 7


def test_no_counter_falls_when_a_process_dies_and_what_it_held_is_gone() -> None:
    one = status_of_a_running_engine()
    twice = merged({0: remains(one)}, [remains(one)], 0)  # two have died
    after = merged({1: one}, [twice], NUM_SLOTS)
    assert list(after.step_tokens) == [3 * number for number in one.step_tokens]
    assert one.prefixes is not None and after.prefixes == tuple(3 * number for number in one.prefixes)
    for name in ("num_preemptions", "num_recomputed_tokens"):
        assert after.figures[name] == 3 * one.figures[name]
    assert str(after.pool) == str(one.pool) and str(after.host_pool) == str(one.host_pool)
    assert after.figures["num_running"] == 1 and len(after.sequences[0]) == 1
    assert after.stages[0].busy == 3 * one.stages[0].busy
    for edge, alone in zip(after.edges, one.edges, strict=True):
        assert edge.stats.depth == alone.stats.depth and edge.stats.num_sent == 3 * alone.stats.num_sent
