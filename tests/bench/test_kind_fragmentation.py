"""The model of slabs that two kinds share, on pools small enough to check by hand."""

from tests.bench.kind_fragmentation import FULL, WINDOW, Service, Shape, Slabs, requests_of

SHAPE = Shape("one full layer in three", 1, 2, 32, 8, 4096)  # blocks of 128 and 256 bytes


def slabs(count: int, *, packs: bool = True) -> Slabs:
    return Slabs(SHAPE, count * 1024, 64, packs=packs)


def test_blocks_of_a_slab_are_its_bytes_by_those_of_the_kinds_block():
    assert slabs(3).per_slab == [8, 4] and slabs(3).num_slabs == 3


def test_a_slab_with_one_live_block_keeps_all_its_memory_from_the_other_kind():
    pool = slabs(2)
    blocks = [pool.take(WINDOW, -1) for _ in range(8)]
    assert None not in blocks and pool.take(FULL, -1) is None
    pool.give_back(WINDOW, [block for block in blocks[1:] if block is not None], is_old=True)
    assert pool.stuck_bytes(FULL) == 3 * 256  # of the slab with the one left; the other is to be had
    assert pool.take(FULL, -1) is not None


def test_packed_slabs_leave_whole_ones_to_others_where_clustered_ones_take_them():
    for packs in (True, False):
        pool = slabs(2, packs=packs)
        pool.take(WINDOW, -1)
        pool.take(WINDOW, -1)
        assert len(pool.free) == (1 if packs else 0)


def test_a_run_ends_with_all_requests_served_and_no_live_block():
    pool = Slabs(SHAPE, 80 * 1024, 64, packs=True)
    service = Service(SHAPE, pool, 8)
    service.serve(requests_of(None, 18, SHAPE.max_model_len))
    assert not service.running and not service.waiting and service.rounds
    assert not any(pool.num_live) and all(pool.stuck_bytes(kind) == 0 for kind in (FULL, WINDOW))
