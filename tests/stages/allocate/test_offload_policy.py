"""What the prefix cache evicts is copied to the host while enough of it is found there again."""

from __future__ import annotations

import numpy as np

from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.allocate.slot_blocks import SlotBlocks
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.allocate.tiers.offload_policy import FREE_MOVES, MOST_CREDIT, SAMPLED, OffloadPolicy, is_sampled
from millrace.stages.allocate.tiers.plan_in_hand import PlanInHand
from millrace.stages.messages import Rates
from tests.stages.schedule.plans import plan

BLOCK = 16
TEN_TO_ONE = Rates(copy_s=16e-6, compute_s=11e-6)  # a block found saves as much as ten copies cost, and took one


def test_without_rates_it_always_pays():
    offload_policy = OffloadPolicy(BLOCK)
    offload_policy.charge(10**6)
    assert offload_policy.is_worthwhile(0, None)


def test_what_is_never_found_stops_paying_after_the_free_moves():
    offload_policy = OffloadPolicy(BLOCK)
    offload_policy.charge(FREE_MOVES - 1)
    assert offload_policy.is_worthwhile(0, TEN_TO_ONE)
    offload_policy.charge(1)
    assert not offload_policy.is_worthwhile(0, TEN_TO_ONE)


def test_each_block_found_pays_for_as_many_moves_as_it_saves_in_time():
    offload_policy = OffloadPolicy(BLOCK)
    offload_policy.charge(FREE_MOVES)
    assert offload_policy.is_worthwhile(2 * BLOCK, TEN_TO_ONE)
    offload_policy.charge(19)
    assert offload_policy.is_worthwhile(2 * BLOCK, TEN_TO_ONE)
    offload_policy.charge(1)
    assert not offload_policy.is_worthwhile(2 * BLOCK, TEN_TO_ONE), "the same hits count once"


def test_where_copying_is_dearer_than_computing_hits_earn_nothing():
    offload_policy = OffloadPolicy(BLOCK)
    offload_policy.charge(FREE_MOVES)
    assert not offload_policy.is_worthwhile(100 * BLOCK, Rates(copy_s=1.0, compute_s=1e-6))


def test_a_long_good_time_does_not_pay_for_ever():
    offload_policy = OffloadPolicy(BLOCK)
    offload_policy.is_worthwhile(10**6 * BLOCK, TEN_TO_ONE)
    offload_policy.charge(MOST_CREDIT)
    assert not offload_policy.is_worthwhile(10**6 * BLOCK, TEN_TO_ONE)


def test_without_credit_all_blocks_of_a_sampled_sequence_are_moved_and_no_others():
    host = HostTier(64, BLOCK, TEN_TO_ONE)
    cache = PrefixCache(BLOCK)
    pool = SlotBlocks(16, BLOCK, 4, 16, cache, host).device.pool
    host.offload_policy.charge(FREE_MOVES)
    moved = {}
    for sequence_id in (SAMPLED, SAMPLED + 1):
        blocks = pool.take(3)
        tokens = np.arange(3 * BLOCK, dtype=np.int32) + 1000 * sequence_id
        chain = cache.chain(sequence_id, tokens)
        assert all(cache.put(chain, block) for block in blocks.tolist())
        pool.keep(blocks)
        pool.give_back(blocks, -1, -1)
        before = host.pool.num_cached + host.pool.num_quarantined
        hand = PlanInHand.of(plan(0, {}))
        everything = pool.take(pool.num_available, hand)  # evicts them
        pool.give_back(everything, -1, -1)
        moved[sequence_id] = host.pool.num_cached + host.pool.num_quarantined - before
        assert sum(len(copy.sources) for copy in hand.copies) == moved[sequence_id]
    assert is_sampled(SAMPLED) and not is_sampled(SAMPLED + 1)
    assert moved == {SAMPLED: 3, SAMPLED + 1: 0}
