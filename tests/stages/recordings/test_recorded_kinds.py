"""Recordings of caches of several kinds of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.deploy.cli.simulate.sweeps import _apply
from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.stages.allocate.tiers.block_pool import BlockState
from millrace.stages.errors import ConfigError
from millrace.stages.messages import BlockCopy, Direction, StepGrant, TableEntries
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.field_values import InvalidValue
from millrace.stages.recordings.format import grant_fields, plain
from millrace.stages.recordings.memory_state import memory_state
from millrace.stages.recordings.recorded_engine import read_engine
from millrace.stages.recordings.replay import ReplayedCore
from millrace.stages.recordings.simulation import Simulation
from millrace.stages.recordings.workloads import Workload, WorkloadRequest
from tests.stages.recorded_runs import ENGINE
from tests.stages.schedule.plans import plan

KINDS = (
    KVKind("full", (2, 5), None, 2, 8, 8, 2 * 256),
    KVKind("window", (0, 1, 3, 4), 12, 2, 8, 8, 4 * 256),
)


def engine_of(num_bytes: int = 2**20) -> Any:
    layout = KVLayout.of(KINDS, ENGINE.block_size, num_bytes)
    sizes: dict[str, Any] = {"num_blocks": layout.num_blocks[0], "max_model_len": 64}
    return replace(ENGINE, **sizes, kv_layout=layout, num_host_blocks=9, num_more_host_blocks=(4,))


def written(engine: Any) -> dict[str, Any]:
    fields: dict[str, Any] = orjson.loads(orjson.dumps(engine.to_fields()))
    return fields


def test_the_layout_of_a_recording_is_read_back_as_it_was():
    engine = engine_of()
    assert read_engine(written(engine)) == engine and engine.has_kinds


def test_the_layout_of_windows_alone_is_read_back_and_must_hold_a_sequence():
    layout = KVLayout.of(KINDS[1:], ENGINE.block_size, 7 * KINDS[1].block_bytes)
    sizes: dict[str, Any] = {"num_blocks": 7, "max_model_len": 4096, "num_host_blocks": 0}
    engine = replace(ENGINE, **sizes, kv_layout=layout)
    assert layout.num_blocks == (7,) and read_engine(written(engine)) == engine
    fields = written(engine)
    fields["kv_layout"]["num_blocks"] = fields["num_blocks"] = 1
    with pytest.raises(InvalidValue, match="holds no sequence of max_model_len = 4096"):
        read_engine(fields)


def test_recordings_of_one_kind_name_no_layout_and_read_as_before():
    assert "kv_layout" not in ENGINE.to_fields() and "num_more_host_blocks" not in ENGINE.to_fields()
    assert read_engine(written(ENGINE)) == ENGINE and not ENGINE.has_kinds


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kinds", [], "1 to 16 kinds"),
        ("kinds", None, "1 to 16 kinds"),
        ("blocks_per_slab", [1], "as many of each kind"),
        ("blocks_per_slab", [2**20, 1], "as many of each kind"),
        ("num_slabs", 0, "num_slabs"),
        ("block_size", 8192, "block_size"),
        ("num_slabs", 7, "num_blocks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(name: str, value: Any, said: str):
    fields = written(engine_of())
    fields["kv_layout"][name] = value
    with pytest.raises(InvalidValue, match=said):
        read_engine(fields)


@pytest.mark.parametrize(("name", "value"), [("name", "round"), ("layers", []), ("window", 0), ("block_bytes", -1)])
def test_a_kind_that_cannot_be_is_refused_by_name(name: str, value: Any):
    fields = written(engine_of())
    fields["kv_layout"]["kinds"][1][name] = value
    with pytest.raises(InvalidValue, match=name):
        read_engine(fields)


def test_host_blocks_of_every_kind_must_be_named():
    fields = written(engine_of())
    fields["num_more_host_blocks"] = []
    with pytest.raises(InvalidValue, match="a number for each kind after the first"):
        read_engine(fields)


def grant(**more: Any) -> StepGrant:
    some = np.array([1], np.int32)
    where = np.array([1], np.intp)
    rows = {"slots": where, "starts": some, "num_tokens": some, "is_sampled": np.array([True])}
    entries = {"table_slots": where, "table_places": where, "table_blocks": some}
    return StepGrant(step=3, generation=0, is_decode=False, **rows, **entries, **more)


def test_grants_are_written_with_the_tables_and_copies_of_every_kind():
    ids = np.array([5], np.int32)
    tables = TableEntries(1, np.array([1], np.intp), np.array([2], np.intp), ids)
    copies = (BlockCopy(Direction.OUT, ids, ids), BlockCopy(Direction.OUT, ids, ids, 1))
    fields = plain(grant_fields(grant(more_tables=(tables,), copies=copies), has_kinds=True))
    assert fields["more_tables"] == [[1, [1], [2], [5]]]
    out = int(Direction.OUT)
    assert fields["copies"] == [[out, [5], [5]], [out, [5], [5], 1]]
    assert "more_tables" not in grant_fields(grant())


def test_a_simulation_serves_all_requests_of_a_cache_of_kinds():
    engine = replace(engine_of(2**17), enable_prefix_caching=True)
    requests = [WorkloadRequest(0.001 * i, 30, 12, (1, i), 16) for i in range(12)]
    result = Simulation(engine, CostModel(step_s=0.001)).run(Workload(requests, has_prefixes=True))
    assert [outcome.how for outcome in result.outcomes] == ["finished"] * 12
    assert result.cache_hit_rate > 0.2


def test_other_sizes_in_a_simulation_make_the_layout_of_kinds_anew():
    engine, bytes_per_block = engine_of(), sum(kind.block_bytes for kind in KINDS)
    fewer, *_ = _apply(engine, {"num_gpu_blocks": 90, "num_cpu_blocks": 30})
    assert fewer.kv_layout == KVLayout.of(KINDS, engine.block_size, 90 * bytes_per_block)
    assert fewer.num_blocks == fewer.kv_layout.num_blocks[0]
    host = fewer.num_host_blocks, *fewer.num_more_host_blocks
    assert sum(count * kind.block_bytes for count, kind in zip(host, KINDS, strict=True)) <= 30 * bytes_per_block
    coarser, *_ = _apply(engine, {"block_size": 2 * engine.block_size})
    assert [kind.block_bytes for kind in coarser.kv_layout.kinds] == [2 * kind.block_bytes for kind in KINDS]
    assert coarser.kv_layout.total_bytes <= engine.kv_layout.total_bytes
    for made in (fewer, coarser):
        assert read_engine(written(made)) == made
    assert _apply(engine, {"max_num_seqs": 3})[0].kv_layout == engine.kv_layout
    with pytest.raises(ConfigError, match="num_gpu_blocks = 2 of .* max_model_len = 64: give it at least"):
        _apply(engine, {"num_gpu_blocks": 2})


def test_the_memory_of_a_moment_has_the_blocks_of_every_kind():
    core = ReplayedCore(engine_of())
    allocator = core.allocate.allocator
    allocator.serve(plan(0, {0: 30}))
    allocator.serve(plan(1, {}, completed=0))
    memory = memory_state(core.schedule.scheduler, allocator)
    (kind,) = memory.more_kinds
    (holder,) = memory.holders
    (blocks,) = holder.more_blocks
    assert kind.name == "window" and kind.device.count(BlockState.IN_USE) == len(blocks)
    assert 0 < len(blocks) < len(holder.blocks) and memory.holders_of(blocks[0], kind=1) == [holder]
    assert kind.host is not None and kind.host.count(BlockState.FREE) == 4
