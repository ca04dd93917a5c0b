"""Keys that a prefix cache tells a router of are those that it holds."""

from __future__ import annotations

import random

import numpy as np

from millrace.stages.allocate.key_changes import KeyChanges
from millrace.stages.allocate.prefix_cache import PrefixCache

BLOCK = 4


def test_the_news_of_any_history_add_up_to_the_keys_that_are_cached():
    drawn = random.Random(3)
    cache = PrefixCache(BLOCK)
    changes, told, used = cache.watch_keys(), set[bytes](), set[int]()
    for turn in range(800):
        what = drawn.random()
        if what < 0.6 and len(used) < 200:
            tokens = np.array([drawn.randrange(2) for _ in range(BLOCK * drawn.randint(1, 3))], np.int32)
            chain = cache.chain(turn, tokens)
            cache.find(chain, may_fork=False)
            while chain.num_blocks < chain.num_known:
                block = next(number for number in range(300) if number not in used)
                if cache.put(chain, block):
                    used.add(block)
        elif what < 0.8 and used:
            block = drawn.choice(sorted(used))
            used.remove(block)
            cache.forget(block)
        elif what < 0.95 and used:
            block = drawn.choice(sorted(used))
            used.remove(block)
            cache.move_out(block, turn)
        elif what < 0.99:
            cache.forget_on_host(drawn.randrange(turn + 1))
        else:
            cache.clear()
            used.clear()
        if drawn.random() < 0.3:
            news = changes.take()
            assert not told & set(news.added) and set(news.removed) <= told, "told twice"
            told = (told | set(news.added)) - set(news.removed)
            assert told == set(cache._device.blocks) | set(cache._host.blocks) == set(changes.held())
    assert told


def test_a_key_that_came_and_went_between_two_news_is_not_told():
    changes = KeyChanges()
    changes.add(b"a")
    changes.remove((b"a",))
    assert changes.take() == ([], [])


def test_the_keys_of_a_prompt_are_those_of_its_full_blocks_in_the_cache():
    cache = PrefixCache(BLOCK, b"secret")
    changes, tokens = cache.watch_keys(), np.arange(11, dtype=np.int32)
    chain = cache.chain(0, tokens, "salt")
    for block in (5, 6):
        cache.put(chain, block)
    assert changes.take().added == cache.keys_of(tokens, "salt") and len(cache.keys_of(tokens)) == 2
    assert cache.keys_of(tokens[:3]) == []
    assert cache.keys_of(tokens) != cache.keys_of(tokens, "salt") != cache.keys_of(tokens, adapter="a")
