"""The store of responses is bounded, and each response belongs to the owner that created it."""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import orjson
import pytest

from millrace.deploy.api.responses import store as responses_store
from millrace.deploy.api.responses.store import ResponseStore, StoredResponse
from millrace.deploy.errors import ApiError


@pytest.fixture(autouse=True)
def only_parts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the objects around them, so that sizes can be checked by hand."""
    monkeypatch.setattr(responses_store, "ENTRY_BYTES", 0)
    monkeypatch.setattr(responses_store, "EVENT_BYTES", 0)


def test_a_response_counts_as_it_lies_in_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    store = ResponseStore(max_bytes=10**9)
    tracemalloc.start()
    for i in range(50):
        stored = StoredResponse(f"resp_{i}", "me", None, b"i" * (50 + i), orjson.dumps("r" * (1100 + i)))
        stored.events = []
        store.put(stored)
        store.update(stored, orjson.dumps("r" * (3700 + i)), orjson.dumps("o" * (1300 + i)))
        for size in range(100):
            store.grow(stored, [b"e" * (150 + size)])
        assert stored.num_bytes == stored.length
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * used < store.num_bytes < 1.3 * used


def entry(name: str, size: int = 10, owner: str = "me", previous: str | None = None, is_over: bool = True):
    stored = StoredResponse(name, owner, previous, b"i" * (size - 2), b"")
    stored.is_over = is_over
    assert stored.length == size
    return stored


def test_what_was_asked_for_least_recently_goes_first():
    store = ResponseStore(max_bytes=30)
    for name in "abc":
        assert store.put(entry(name))
    store.get("a", "me")
    store.put(entry("d"))
    assert [name for name in "abcd" if name in store] == ["a", "c", "d"] and store.num_bytes == 30


def test_there_are_no_more_entries_than_allowed():
    store = ResponseStore(max_bytes=1000, max_entries=2)
    for name in "abc":
        store.put(entry(name))
    assert len(store) == 2 and "a" not in store


def test_what_does_not_fit_alone_is_not_kept_and_takes_nothing_with_it():
    store = ResponseStore(max_bytes=30)
    store.put(entry("running", is_over=False))
    assert not store.put(entry("b", size=31))
    assert "running" in store and store.num_bytes == 10


def test_a_store_of_no_bytes_keeps_nothing():
    store = ResponseStore(max_bytes=0)
    assert not store.put(entry("a")) and len(store) == store.num_bytes == 0


def test_another_keys_response_is_as_unknown_as_none():
    store = ResponseStore(max_bytes=100)
    store.put(entry("a", owner="you"))
    for ask in (store.get, store.chain, store.delete):
        told = []
        for name in ("a", "nil"):
            with pytest.raises(ApiError) as refused:
                ask(name, "me")
            told.append((refused.value.status, refused.value.code, refused.value.message.replace(repr(name), "")))
        assert told[0] == told[1] and told[0][:2] == (404, "response_not_found")
    assert "a" in store


def test_a_chain_comes_in_order_and_its_beginning_stays_longest():
    store = ResponseStore(max_bytes=40)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(entry(name, previous=previous))
    assert [stored.id for stored in store.chain("c", "me")] == ["a", "b", "c"]
    store.put(entry("x", size=20))
    assert [name for name in "abcx" if name in store] == ["a", "b", "x"]


def test_a_chain_with_a_link_missing_says_which():
    store = ResponseStore(max_bytes=100)
    store.put(entry("a"))
    store.put(entry("b", previous="a"))
    store.delete("a", "me")
    with pytest.raises(ApiError, match="'a'") as refused:
        store.chain("b", "me")
    assert (refused.value.status, refused.value.param) == (404, "previous_response_id")


def test_what_is_being_made_is_not_forgotten_for_something_new():
    store = ResponseStore(max_bytes=30)
    store.put(entry("running", is_over=False))
    for name in "abcdef":
        store.put(entry(name))
    assert "running" in store and len(store) == 3


def test_events_beyond_the_limit_are_given_up_and_the_response_is_not():
    store = ResponseStore(max_bytes=30)
    running = entry("running", is_over=False)
    running.events = []
    store.put(running)
    store.put(entry("old"))
    store.grow(running, [b"12345"] * 3)
    assert "old" not in store and running.events == [b"12345"] * 3 and store.num_bytes == 25
    store.grow(running, [b"123456"])
    assert running.events is None and "running" in store and store.num_bytes == 10
    store.grow(running, [b"more"])
    assert running.events is None and store.num_bytes == 10


@pytest.mark.slow
def test_the_books_are_right_after_anything():
    for seed in range(20):
        rng = random.Random(seed)
        store = ResponseStore(max_bytes=200, max_entries=8)
        made: list[StoredResponse] = []
        for i in range(200):
            which = rng.choice(made) if made else None
            match rng.randrange(5):
                case 0 | 1:
                    stored = entry(str(i), size=rng.randrange(2, 80), is_over=rng.random() < 0.7)
                    stored.events = rng.choice([None, []])
                    store.put(stored)
                    made.append(stored)
                case 2 if which is not None and not which.is_over:
                    store.grow(which, [b"e" * rng.randrange(50)])
                case 3 if which is not None:
                    which.is_over = True
                    store.update(which, b"r" * rng.randrange(100), b"o" * rng.randrange(100))
                case 4 if which is not None and which.id in store:
                    store.delete(which.id, "me")
            kept = [stored for stored in made if stored.id in store]
            assert store.num_bytes == sum(stored.length for stored in kept) <= 200, seed
            assert len(store) == len(kept) <= 8, seed


def test_readers_get_what_was_and_what_comes_and_then_the_end():
    async def read() -> tuple[list[bytes], list[bytes]]:
        store = ResponseStore(max_bytes=1000)
        running = entry("running", is_over=False)
        running.events = []
        store.put(running)
        store.grow(running, [b"0", b"1"])

        async def collect(first: int) -> list[bytes]:
            return [event async for events in running.events_from(first) for event in events]

        readers = [asyncio.create_task(collect(first)) for first in (0, 1)]
        await asyncio.sleep(0)
        store.grow(running, [b"2"])
        await asyncio.sleep(0)
        running.is_over = True
        store.grow(running, [b"3"])
        running.wake_readers()
        first, second = await asyncio.gather(*readers)
        return first, second

    assert asyncio.run(read()) == ([b"0", b"1", b"2", b"3"], [b"1", b"2", b"3"])
