"""The index of cached prefixes, against a table of sets."""

from __future__ import annotations

import random

from millrace.stages.routing.prefix_index import PrefixIndex


def keys(*places: int) -> list[bytes]:
    return [bytes([place]) for place in places]


def test_a_run_ends_at_the_first_block_that_an_engine_lacks():
    index = PrefixIndex()
    index.add(0, keys(1, 2, 3))
    index.add(2, keys(1, 3))
    assert index.runs(keys(1, 2, 3, 4), [0, 1, 2], 0.0) == {0: 3, 1: 0, 2: 1}
    assert index.runs([], [0, 1], 0.0) == {0: 0, 1: 0}


def test_any_history_of_changes_gives_the_runs_of_what_each_engine_holds():
    drawn = random.Random(7)
    index, held = PrefixIndex(), [set[bytes]() for _ in range(70)]  # more engines than a machine word has bits
    for _ in range(3000):
        engine, some = drawn.randrange(70), keys(*(drawn.randrange(12) for _ in range(4)))
        what = drawn.random()
        if what < 0.6:
            index.add(engine, some)
            held[engine].update(some)
        elif what < 0.98:
            index.remove(engine, some)
            held[engine].difference_update(some)
        else:
            index.drop(engine)
            held[engine].clear()
        asked = keys(*drawn.sample(range(12), 5))
        wanted = {one: next((at for at, key in enumerate(asked) if key not in held[one]), 5) for one in range(70)}
        assert index.runs(asked, range(70), 0.0) == wanted
    assert [index.held_by(engine) for engine in range(70)] == held
    assert len(index) == len(set().union(*held))


def test_blocks_of_a_prompt_are_expected_where_it_was_sent_until_a_time():
    index = PrefixIndex()
    index.expect(1, keys(1, 2), now_s=0.0, until_s=5.0)
    index.expect(0, keys(1), now_s=3.0, until_s=8.0)
    assert index.runs(keys(1, 2), [0, 1], 4.0) == {0: 1, 1: 2}
    assert index.runs(keys(1, 2), [0, 1], 6.0)[0] == 1, "expected for longer"
    index.expect(0, keys(9), now_s=9.0, until_s=10.0)
    assert index.runs(keys(1, 2), [0, 1], 9.0) == {0: 0, 1: 0}
    assert list(index._expected) == keys(9), "what is past is forgotten"


def test_an_engine_that_is_gone_is_expected_to_hold_nothing():
    index = PrefixIndex()
    index.expect(0, keys(1), now_s=0.0, until_s=9.0)
    index.add(0, keys(1))
    index.drop(0)
    assert index.runs(keys(1), [0], 1.0) == {0: 0} and len(index) == 0
