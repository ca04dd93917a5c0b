"""The prefix cache where layers have several kinds of memory: what every kind must have for a hit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from millrace.kernels.layout.kv_layout import KVKind
from millrace.stages.allocate.kind_index import KindIndex, num_usable
from millrace.stages.allocate.prefix_cache import BlockChain, PrefixCache, PrefixMatch
from millrace.stages.allocate.tiers.block_pool import BlockPool

SIZE = 2  # tokens a block
ALL = None  # a kind without a window


def kind_of(window: int | None) -> KVKind:
    return KVKind("full" if window is None else "window", (0,), window, 1, 8, 8, 64)


def cache_of(*windows: int | None, min_fork: int = 1) -> PrefixCache:
    """A cache with these kinds after kind 0. The blocks of their pools are all in use."""
    cache = PrefixCache(SIZE)
    cache.min_tokens_to_fork = min_fork
    pools = [BlockPool(64, SIZE) for _ in windows]
    for pool in pools:
        pool.take(64)
    cache.kinds = [KindIndex(kind_of(window), SIZE, pool) for window, pool in zip(windows, pools, strict=True)]
    return cache


def chain_of(cache: PrefixCache, tokens: Sequence[int], sequence_id: int = 0) -> BlockChain:
    return cache.chain(sequence_id, np.array(tokens, np.int32))


def put_of_kind(index: KindIndex, number: int, block: int) -> None:
    """As the publisher does."""
    if index.put(number, block):
        index._pool.keep(np.array([block], np.int32))


def put(cache: PrefixCache, tokens: Sequence[int], blocks: Sequence[int], *more: Sequence[int | None]) -> BlockChain:
    """Publishes whole blocks of `tokens`; `more` are those of the other kinds, None for one that is not there."""
    chain = chain_of(cache, tokens)
    for place, block in enumerate(blocks):
        cache.put(chain, block)
        for index, own in zip(cache.kinds, more, strict=True):
            if own[place] is not None:
                assert isinstance(chain.last, int)
                put_of_kind(index, chain.last, own[place])
    return chain


def find(cache: PrefixCache, tokens: Sequence[int]) -> PrefixMatch:
    return cache.find(chain_of(cache, tokens, 99))


def evict(cache: PrefixCache, block: int) -> int | None:
    """As the pool of kind 1 does."""
    cache.kinds[0]._pool.forget(block)
    return cache.kinds[0].evict(block)


TOKENS = list(range(11))  # five whole blocks, and one token to compute


@pytest.mark.parametrize(("window", "seen"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (64, 5), (ALL, 5)])
def test_a_hit_has_the_whole_window_before_it_and_no_more(window: int | None, seen: int):
    cache = cache_of(window)
    put(cache, TOKENS, [10, 11, 12, 13, 14], [20, 21, 22, 23, 24])
    match = find(cache, TOKENS)
    assert match.shared.tolist() == [10, 11, 12, 13, 14]
    (more,) = match.more
    assert more.first == 5 - seen and more.shared.tolist() == [20, 21, 22, 23, 24][5 - seen :]
    cache.check()


def test_a_chunk_needs_its_own_blocks_only():
    kind = KVKind("chunk", (0,), 6, 1, 8, 8, 64)
    assert KindIndex(kind, SIZE, BlockPool(1, SIZE)).firsts_seen(7) == [0, 0, 0, 3, 3, 3, 6, 6]


def test_a_hole_in_the_window_cuts_the_hit_to_the_last_place_that_has_one():
    cache = cache_of(4)
    put(cache, TOKENS, [10, 11, 12, 13, 14], [20, 21, 22, None, 24])
    match = find(cache, TOKENS)
    assert match.shared.tolist() == [10, 11, 12] and match.more[0].shared.tolist() == [21, 22]
    assert find(cache, TOKENS[:7]).shared.tolist() == [10, 11, 12]


def test_blocks_that_the_window_has_passed_are_not_needed():
    cache = cache_of(4)
    put(cache, TOKENS, [10, 11, 12, 13, 14], [None, None, None, 23, 24])
    assert find(cache, TOKENS).more[0].shared.tolist() == [23, 24]
    assert len(find(cache, TOKENS[:9]).shared) == 0, "before the fourth block, the window is not there"


def test_hits_of_kinds_that_differ_are_cut_to_one_that_all_have():
    """A per-kind hit that the others lack would read keys of another sequence."""
    cache = cache_of(4, 6)
    put(cache, TOKENS, [10, 11, 12, 13, 14], [20, 21, 22, None, 24], [None, 31, 32, 33, 34])
    assert len(find(cache, TOKENS).shared) == 0
    put_of_kind(cache.kinds[1], cache.known_blocks()[0][2], 30)
    match = find(cache, TOKENS)
    assert [each.shared.tolist() for each in match.more] == [[21, 22], [30, 31, 32]]


def test_no_kind_finds_more_than_kind_0():
    cache = cache_of(2)
    put(cache, TOKENS, [10, 11, 12, 13, 14], [20, 21, 22, 23, 24])
    cache.forget(12)
    match = find(cache, TOKENS)
    assert match.shared.tolist() == [10, 11] and match.more[0].shared.tolist() == [21]


def test_an_evicted_window_block_leaves_its_entry_and_comes_back_with_the_next_sequence():
    cache = cache_of(4)
    put(cache, TOKENS, [10, 11, 12, 13, 14], [20, 21, 22, 23, 24])
    assert evict(cache, 24) is None
    assert find(cache, TOKENS).shared.tolist() == [10, 11, 12, 13]
    again = chain_of(cache, TOKENS, 2)
    cache.find(again)
    assert not cache.put(again, 40), "kind 0 has the block"
    assert isinstance(again.last, int)
    put_of_kind(cache.kinds[0], again.last, 34)
    assert find(cache, TOKENS).more[0].shared.tolist() == [23, 34]
    cache.check()


def test_the_end_of_an_entry_frees_its_blocks_of_all_kinds():
    cache = cache_of(4)
    put(cache, TOKENS, [10, 11, 12, 13, 14], [20, 21, 22, 23, 24])
    cache.forget(13)
    assert cache.kinds[0]._pool.kept() == {20, 21, 22, 24}
    assert cache.move_out(14, 7) is None
    assert cache.kinds[0]._pool.kept() == {20, 21, 22, 24}, "on the host, the entry is still known"
    cache.forget_on_host(7)
    assert cache.kinds[0]._pool.kept() == {20, 21, 22}
    cache.check()


def test_a_block_in_part_is_copied_only_where_every_kind_has_it():
    cache = cache_of(4)
    put(cache, TOKENS, [10, 11, 12, 13, 14], [20, 21, 22, 23, 24])
    other = [0, 1, 2, 3, 4, 99, 100]  # differs in the second token of the third block
    match = find(cache, other)
    assert (match.source, match.num_forked, match.more[0].source) == (12, 1, 22)
    evict(cache, 22)
    match = find(cache, other)
    assert (match.source, match.num_forked, match.more[0].source) == (None, 0, None)
    assert match.shared.tolist() == [10, 11]


def test_a_tail_is_copied_with_the_blocks_of_all_kinds_and_ends_with_any_of_them():
    cache = cache_of(4)
    chain = put(cache, TOKENS, [10, 11], [20, 21])
    tokens = np.array([4], np.int32).tobytes()
    assert cache.put_tail(chain, 12, tokens) == []
    cache.kinds[0].put_tail(12, 22)
    match = find(cache, [0, 1, 2, 3, 4, 98])
    assert (match.source, match.more[0].source) == (12, 22)
    cache.check()
    assert evict(cache, 22) == 12 and cache.drop_tail(12)
    assert find(cache, [0, 1, 2, 3, 4, 98]).source is None
    cache.check()


def test_after_a_reset_no_kind_has_anything():
    cache = cache_of(4, ALL)
    put(cache, TOKENS, [10, 11], [20, 21], [30, 31])
    cache.clear()
    for index in cache.kinds:
        index._pool.forget_kept()
    assert not len(find(cache, TOKENS).shared)
    cache.check()


@pytest.mark.parametrize("seed", range(20))
def test_one_pass_finds_the_longest_usable_start_at_random(seed: int):
    """Against the definition: every place from the end on, all blocks of each kind's window looked at."""
    dice = Random(seed)
    for _ in range(40):
        windows = [dice.choice([1, 2, 3, 5, 8, ALL]) for _ in range(dice.randint(1, 3))]
        count = dice.randint(0, 12)
        kinds = []
        for window in windows:
            index = KindIndex(kind_of(window), SIZE, BlockPool(1, SIZE))
            for number in range(count):
                where = dice.choices(("device", "host", "nowhere"), (6, 2, 1))[0]
                if where == "device":
                    index.blocks[number] = number
                elif where == "host":
                    index.places[number] = number
            kinds.append(index)
        assert num_usable(kinds, range(count)) == _longest(kinds, windows, count), f"seed {seed}"


def _longest(kinds: list[KindIndex], windows: list[int | None], count: int) -> int:
    for n in range(count, 0, -1):
        if all(_has_all(index, window, n) for index, window in zip(kinds, windows, strict=True)):
            return n
    return 0


def _has_all(index: KindIndex, window: int | None, n: int) -> bool:
    """Whether each token that the query at position n * SIZE sees is there: device blocks first, then the host's."""
    first_token = 0 if window is None else max(0, n * SIZE - window + 1)
    places = sorted({token // SIZE for token in range(first_token, n * SIZE)})
    states = ["device" if each in index.blocks else "host" if each in index.places else "" for each in places]
    return "" not in states and states == sorted(states)
