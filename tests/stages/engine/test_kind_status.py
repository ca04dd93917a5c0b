"""What observers see of a cache of several kinds of memory."""

from __future__ import annotations

import numpy as np

from millrace.deploy.dashboard.block_map import FIRST_SLOT, BlockMap, BlockOwners, block_cells
from millrace.deploy.metrics.metrics import _blocks_of_kinds, _slabs
from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.engine.read_status import read_blocks, read_cache
from millrace.stages.engine.slab_cells import NO_KIND
from millrace.stages.split.protocol import CODEC
from tests.stages.schedule.plans import plan

# blocks of 2 tokens; a slab holds 4 of the full kind, or 2 of the window
LAYOUT = KVLayout(
    (KVKind("full", (1,), None, 1, 8, 8, 64), KVKind("window", (0, 2), 4, 1, 8, 8, 128)),
    *(2, 256, 6, (4, 2), (24, 12), ((1, 0), (0, 0), (1, 1))),
)


def served() -> Allocator:
    """Slot 0 has 10 tokens, 6 of which the window has passed; slot 1 has 3."""
    allocator = Allocator(24, 2, 2, 16, layout=LAYOUT)
    allocator.serve(plan(0, {0: 10, 1: 3}))
    allocator.serve(plan(1, {}, completed=0))
    return allocator


def test_kinds_are_counted_each_and_together_as_shares_of_all_slabs():
    allocator = served()
    cache = read_cache(allocator)
    assert [(kind.name, kind.pool.num_in_use) for kind in cache.kinds] == [("full", 7), ("window", 4)]
    assert cache.num_slabs == 6 and sum(kind.num_slabs for kind in cache.kinds) <= 6
    assert cache.used_share == 7 / 24 + 4 / 12
    assert cache.memory.num_in_use == 7 + 2 * 4 and cache.memory.num_blocks == 24
    assert sum((cache.memory.num_free, cache.memory.num_in_use, cache.memory.num_cached)) == 24


def test_one_kind_is_told_as_before():
    cache = read_cache(Allocator(20, 2, 2, 16))
    assert cache.kinds == () and cache.num_slabs == 0 and cache.memory is cache.pool
    assert (cache.memory.num_blocks, cache.memory.num_free, cache.used_share) == (20, 20, 0.0)


def test_the_map_draws_each_slab_with_the_blocks_of_its_kind():
    allocator = served()
    blocks = read_blocks(allocator)
    assert blocks.slabs is not None and blocks.slabs.cells_per_slab == 4
    cells = block_cells(blocks).reshape(6, 4)
    for slab, kind in enumerate(blocks.slabs.kind_of.tolist()):
        expected = np.zeros(4)
        if kind != NO_KIND:
            size = LAYOUT.blocks_per_slab[kind]
            for slot in (0, 1):
                for block in allocator.kinds[kind].tables.held_by(slot).tolist():
                    if block // size == slab:
                        first = block % size * (4 // size)
                        expected[first : first + 4 // size] = FIRST_SLOT + slot
        assert cells[slab].tolist() == expected.tolist(), f"slab {slab} of kind {kind}"


def test_the_kinds_of_slabs_are_sent_when_they_change():
    blocks = read_blocks(served())
    map_of_viewer = BlockMap()
    first = map_of_viewer.next(BlockOwners(blocks, {}, 2))
    assert first["slabs"]["kinds"] == ["full", "window"] and first["num_blocks"] == 24
    assert "slabs" not in map_of_viewer.next(BlockOwners(blocks, {}, 2))


def test_metrics_of_several_kinds_have_a_label_for_the_kind():
    cache = read_cache(served())
    blocks = {(s.labels["kind"], s.labels["state"]): s.value for s in _blocks_of_kinds("text", cache, {}).samples}
    assert blocks["full", "used"] == 7 and blocks["window", "used"] == 4
    slabs = {sample.labels["kind"]: sample.value for sample in _slabs(cache, {}).samples}
    assert sum(slabs.values()) == 6 and slabs["full"] == cache.kinds[0].num_slabs


def test_the_status_of_kinds_travels_between_processes():
    cache = read_cache(served(), with_blocks=True)
    assert cache.blocks is not None and cache.blocks.slabs is not None
    header, body = CODEC.encode(cache)
    back = CODEC.decode(header, b"".join(body))
    assert [(kind.name, kind.pool.num_in_use, kind.num_slabs) for kind in back.kinds] == [
        (kind.name, kind.pool.num_in_use, kind.num_slabs) for kind in cache.kinds
    ]
    assert back.num_slabs == 6
    assert back.blocks.slabs.kind_of.tolist() == cache.blocks.slabs.kind_of.tolist()
