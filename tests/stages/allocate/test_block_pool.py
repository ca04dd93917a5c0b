"""The block pool and the block tables."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace.stages.allocate.tiers.block_pool import BlockPool, BlockState
from millrace.stages.allocate.tiers.block_tables import BlockTables


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_new_pool_is_all_free():
    pool = BlockPool(num_blocks=4, block_size=2)
    assert (pool.num_free, pool.num_in_use, pool.num_quarantined, pool.num_cached) == (4, 0, 0, 0)
    pool.check()


def test_an_untouched_pool_gives_blocks_that_follow_each_other():
    pool = BlockPool(num_blocks=8, block_size=2)
    first, second = pool.take(3), pool.take(2)
    assert [*first, *second] == [0, 1, 2, 3, 4]
    pool.give_back(second, last_step=0, completed_step=0)
    pool.give_back(first, last_step=0, completed_step=0)
    assert pool.take(5).tolist() == [0, 1, 2, 3, 4]


def test_a_table_grows_into_the_block_after_its_last_while_others_begin_elsewhere():
    pool = BlockPool(num_blocks=48, block_size=16)  # three runs
    first, second = pool.take(3).tolist(), pool.take(2).tolist()
    assert (first, second) == ([0, 1, 2], [16, 17])
    assert pool.take_behind([2, 17, -1], [1, 2, 1], 4).tolist() == [3, 18, 19, 32]
    assert pool.take_behind([3], [14], 14).tolist() == [*range(4, 16), 20, 21]  # its run is full, and no whole one left
    pool.check()


def test_no_table_takes_what_others_grow_into_while_a_run_is_free():
    pool = BlockPool(num_blocks=40, block_size=16)  # the last run is a short one
    last_blocks = [int(pool.take(1)[0]) for _ in range(3)]
    assert last_blocks == [0, 16, 32]
    assert pool.take(1).tolist() == [1]
    assert pool.take_behind(last_blocks, [1, 1, 1], 3).tolist() == [2, 17, 33]
    pool.check()


def test_two_tables_that_share_their_last_block_do_not_go_on_with_the_same_one():
    pool = BlockPool(num_blocks=32, block_size=16)
    last = pool.take(1)
    pool.keep(last)
    pool.share(last)
    assert pool.take_behind([0, 0], [1, 1], 2).tolist() == [1, 16]
    pool.check()


def cached(pool: BlockPool, count: int) -> list[int]:
    """Takes so many blocks, keeps their contents and gives them back."""
    blocks = pool.take(count)
    pool.keep(blocks)
    pool.give_back(blocks, last_step=0, completed_step=0)
    return blocks.tolist()  # type: ignore[no-any-return]


def test_without_free_blocks_a_table_reuses_those_of_one_ended_long_ago_one_by_one():
    pool = BlockPool(num_blocks=320, block_size=16)  # twenty runs
    told: list[list[int]] = []
    pool.subscribe(lambda blocks, hand: told.append(blocks))
    ended = [cached(pool, 16) for _ in range(20)]
    begun = pool.take(3).tolist()
    assert begun == ended[0][:3] and told == [begun]
    assert pool.take_behind([begun[-1]], [2], 2).tolist() == ended[0][3:5]
    assert (pool.num_cached, pool.num_evicted) == (315, 5)
    pool.check()


def test_what_was_cached_of_late_is_left_though_a_table_could_go_on_in_it():
    pool = BlockPool(num_blocks=320, block_size=16)
    table, late = pool.take(2), pool.take_behind([1], [14], 14)
    others = [cached(pool, 16) for _ in range(19)]
    pool.keep(late)
    pool.give_back(late, last_step=0, completed_step=0)
    assert pool.take_behind([int(table[-1])], [1], 1).tolist() == others[0][:1]
    pool.check()


def test_where_little_is_cached_the_end_of_what_was_cached_longest_ago_goes_first():
    pool = BlockPool(num_blocks=32, block_size=16)
    ended = [cached(pool, 16), cached(pool, 16)]
    assert sorted(pool.take(3).tolist()) == ended[0][-3:]
    pool.check()


def test_a_run_whose_blocks_all_came_back_is_whole_again():
    pool = BlockPool(num_blocks=32, block_size=16)
    blocks = pool.take(20)
    pool.give_back(blocks[::2].copy(), last_step=0, completed_step=0)
    pool.check()
    pool.give_back(blocks[1::2].copy(), last_step=0, completed_step=0)
    pool.check()
    assert sorted([*pool.take(16), *pool.take(16)]) == list(range(32))
    pool.check()


def test_random_takes_and_returns_leave_each_block_with_one_owner():
    draw = random.Random(7)
    pool, tables = BlockPool(num_blocks=430, block_size=32), dict[int, list[int]]()
    for step in range(2000):
        pool.complete_steps(step)
        if tables and (draw.random() < 0.4 or pool.num_available < 8):
            blocks = tables.pop(draw.choice(list(tables)))
            if draw.random() < 0.5:
                pool.keep(ints(*blocks))
            pool.give_back(ints(*blocks), last_step=step + draw.randint(0, 2), completed_step=step)
        elif draw.random() < 0.01:
            tables.clear()
            pool.seize_all(step + 1)
        else:
            grown = draw.sample(sorted(tables), min(len(tables), draw.randint(0, 4)))
            counts = [draw.randint(1, 2) for _ in grown] or [draw.randint(1, 24)]
            last_blocks = [tables[table][-1] for table in grown] or [-1]
            if sum(counts) > pool.num_available:
                continue
            taken = pool.take_behind(last_blocks, counts, sum(counts)).tolist()
            for table, count in zip(grown or [step], counts, strict=True):
                tables.setdefault(table, []).extend(taken[:count])
                del taken[:count]
        pool.check()
        held = [block for blocks in tables.values() for block in blocks]
        assert len(set(held)) == len(held) == pool.num_in_use


def test_blocks_taken_are_distinct_and_in_use():
    pool = BlockPool(num_blocks=4, block_size=2)
    first, second = pool.take(2), pool.take(2)
    assert sorted([*first, *second]) == [0, 1, 2, 3]
    assert pool.num_in_use == 4 and pool.num_free == 0
    pool.check()


def test_a_block_given_back_is_not_free_until_the_last_step_that_may_touch_it_ends():
    pool = BlockPool(num_blocks=2, block_size=2)
    blocks = pool.take(2)
    pool.give_back(blocks, last_step=7, completed_step=5)
    pool.complete_steps(6)
    assert (pool.num_free, pool.num_quarantined) == (0, 2)
    pool.complete_steps(7)
    assert (pool.num_free, pool.num_quarantined) == (2, 0)
    pool.check()


def test_a_block_that_no_step_in_flight_knows_is_free_at_once():
    pool = BlockPool(num_blocks=2, block_size=2)
    pool.give_back(pool.take(1), last_step=3, completed_step=3)
    assert pool.num_free == 2


def test_giving_a_block_back_twice_is_found():
    pool = BlockPool(num_blocks=2, block_size=2)
    blocks = pool.take(1)
    pool.give_back(blocks, 0, 0)
    with pytest.raises(AssertionError, match="not all in use"):
        pool.give_back(blocks, 0, 0)


def test_taking_more_than_is_free_is_found():
    with pytest.raises(AssertionError, match="3 blocks taken of 2"):
        BlockPool(num_blocks=2, block_size=2).take(3)


def test_check_finds_a_state_that_the_counters_do_not_know_of():
    pool = BlockPool(num_blocks=2, block_size=2)
    pool.state[0] = BlockState.IN_USE
    with pytest.raises(AssertionError):
        pool.check()


def test_after_seizing_all_every_block_comes_back_once_the_device_is_done():
    pool = BlockPool(num_blocks=3, block_size=2)
    pool.give_back(pool.take(2), last_step=4, completed_step=1)
    pool.take(1)
    pool.seize_all(last_step=5)
    pool.check()
    pool.complete_steps(5)
    assert pool.num_free == 3
    pool.check()


def test_a_pool_of_no_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks = 0"):
        BlockPool(num_blocks=0, block_size=2)


def test_appended_blocks_follow_those_that_a_table_has():
    tables = BlockTables(num_slots=3, blocks_per_slot=4, block_size=2)
    tables.append(ints(2), ints(1), ints(9))
    owners, places = tables.append(ints(0, 2), ints(2, 1), ints(5, 6, 7))
    assert owners.tolist() == [0, 0, 2] and places.tolist() == [0, 1, 1]
    assert tables.blocks[0, :2].tolist() == [5, 6]
    assert tables.blocks[2, :2].tolist() == [9, 7]
    assert sorted(tables.held().tolist()) == [5, 6, 7, 9]


def test_clearing_a_slot_returns_what_it_held_and_leaves_the_others():
    tables = BlockTables(num_slots=2, blocks_per_slot=2, block_size=2)
    tables.append(ints(0, 1), ints(1, 2), ints(3, 4, 5))
    assert tables.clear(1).tolist() == [4, 5]
    assert tables.held().tolist() == [3]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_a_block_is_needed_for_each_started_block_size(num_tokens: int, num_blocks: int):
    tables = BlockTables(num_slots=1, blocks_per_slot=2, block_size=16)
    assert tables.num_blocks_for(ints(num_tokens)).tolist() == [num_blocks]


def test_waste_is_the_room_of_last_blocks_that_holds_no_token():
    tables = BlockTables(num_slots=2, blocks_per_slot=4, block_size=4)
    assert tables.waste == 0.0
    tables.append(np.array([0, 1]), ints(2, 1), ints(0, 1, 2))
    tables.num_tokens[:] = 5, 4
    assert tables.waste == pytest.approx(0.25)


def test_a_block_is_alone_once_no_step_in_flight_reads_it_for_another_table() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    blocks = pool.take(2)
    pool.keep(blocks)
    pool.share(blocks[:1])
    assert pool.is_alone(blocks, 3).tolist() == [False, True]
    pool.give_back(blocks[:1], last_step=5, completed_step=3)
    assert pool.is_alone(blocks, 4).tolist() == [False, True]
    assert pool.is_alone(blocks, 5).tolist() == [True, True]
