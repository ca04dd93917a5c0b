"""Loads of adapters: the order in which they get room, what they share, and what a name stands for meanwhile."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from millrace.model.lora.adapter import Adapter
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.adapters.gate import AdapterGate
from millrace.stages.adapters.loader import MAX_PASSES
from millrace.stages.errors import Refused, Unavailable
from tests.stages.adapters.test_adapter_gate import Files, gate_of, request

TURNS = 4 * MAX_PASSES


async def start(env: SimEnv, *waits: asyncio.Task[object]) -> None:
    """Lets tasks run up to their waits."""
    await env.sleep(1)
    assert not any(wait.done() for wait in waits)


async def overlapping(env: SimEnv, gate: AdapterGate, name: str, first: int, ended: list[str]) -> None:
    """Requests that begin every 10 ms and take 25 ms, so that one is always in progress."""

    async def one(number: int) -> None:
        await env.sleep(0.01 * (number - first))
        await gate.admit(env, request(number, name))
        await env.sleep(0.025)
        gate.leave(f"r{number}")

    await asyncio.gather(*(one(number) for number in range(first, first + TURNS)))
    ended.append(name)


def test_an_adapter_gets_room_although_others_are_always_in_use() -> None:
    async def live(env: SimEnv) -> None:
        files, ended = Files(a=1, b=2, c=3, d=4), list[str]()
        gate = gate_of(files, "a", "b", "c", "d", most=2)
        traffic = [asyncio.ensure_future(overlapping(env, gate, *each, ended)) for each in (("a", 0), ("b", 1000))]
        await env.sleep(0.005)
        late = [asyncio.ensure_future(gate.admit(env, request(2000 + i, name))) for i, name in enumerate("ccd")]
        for load in late:
            load.add_done_callback(lambda done: ended.append("late"))
        await asyncio.gather(*late[:2])
        assert not ended[2:] and files.num_reads == 3, "well before the traffic has ended, with one read for both"
        gate.leave("r2000")
        gate.leave("r2001")
        await late[2]
        gate.leave("r2002")
        await asyncio.gather(*traffic)
        assert ended[:3] == ["late"] * 3 and len(gate.store) <= 2
        assert not gate._held and not gate.loader._loads and not gate.store.num_reserved
        assert not any(gate.store.num_users(entry.digest) for entry in gate.registry)

    run(live, seed=0)


def test_fifty_requests_pass_a_load_that_waits_for_room_and_the_next_one_waits() -> None:
    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(a=1, b=2), "a", "b", most=1)
        await gate.admit(env, request(0, "a"))
        late = asyncio.ensure_future(gate.admit(env, request(1, "b")))
        await start(env, late)
        for number in range(MAX_PASSES):
            await gate.admit(env, request(10 + number, "a"))
        behind = asyncio.ensure_future(gate.admit(env, request(100, "a")))
        await start(env, late, behind)
        gate.leave("r0")
        for number in range(MAX_PASSES):
            gate.leave(f"r{10 + number}")
        await late
        assert not behind.done()
        gate.leave("r1")
        await behind

    run(live, seed=0)


def test_a_drain_ends_with_the_load_that_it_was_for() -> None:
    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(a=1, b=2), "a", "b", most=1)
        await gate.admit(env, request(0, "a"))
        late = asyncio.ensure_future(gate.admit(env, request(1, "b")))
        await start(env, late)
        for number in range(MAX_PASSES):
            await gate.admit(env, request(10 + number, "a"))
        behind = asyncio.ensure_future(gate.admit(env, request(100, "a")))
        await start(env, late, behind)
        late.cancel()
        await behind
        assert not gate.num_waiting and not gate.loader._loads

    run(live, seed=0)


@pytest.mark.parametrize("most", [1, 2])
def test_random_loads_cancels_and_ends_leave_no_user_behind(most: int) -> None:
    async def live(env: SimEnv) -> None:
        choice = random.Random(most)
        files = Files(a=1, b=2, c=3, same=1)
        gate = gate_of(files, "a", "b", "c", "same", "missing", most=most)

        async def one(number: int) -> None:
            await env.sleep(choice.random())
            try:
                async with asyncio.timeout(choice.random()):
                    await gate.admit(env, request(number, choice.choice(["a", "b", "c", "same", "missing"])))
                    await env.sleep(choice.random() / 4)
            except (Refused, TimeoutError):
                pass
            finally:
                gate.leave(f"r{number}")
            assert len(gate.store) + gate.store.num_reserved <= most

        await asyncio.gather(*(one(number) for number in range(300)))
        await env.sleep(1)
        assert not gate.num_waiting and not gate._held and not gate.loader._loads and not gate.store.num_reserved
        assert not any(gate.store.num_users(entry.digest) for entry in gate.registry)

    run(live, seed=0)


def test_a_request_that_waits_when_the_engine_stops_is_told_so() -> None:
    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(a=1, b=2), "a", "b", most=1)
        await gate.admit(env, request(0, "a"))
        late = asyncio.ensure_future(gate.admit(env, request(1, "b")))
        await start(env, late)
        await gate.aclose()
        for wait in (late, gate.admit(env, request(2, "b"))):
            with pytest.raises(Unavailable, match="shutting down"):
                await wait

    run(live, seed=0)


class SlowFiles(Files):
    """Adapters of which a read ends when it may."""

    def __init__(self, **contents: float) -> None:
        super().__init__(**contents)
        self.during: list[object] = []

    def read(self, path: Path, name: str) -> Adapter:
        for each in self.during:
            assert callable(each)
            each()
        return super().read(path, name)


def test_a_name_serves_what_it_did_until_its_new_adapter_is_loaded() -> None:
    async def live(env: SimEnv) -> None:
        files = SlowFiles(a=1)
        gate = gate_of(files, "a")
        old = (await gate.admit(env, request(0, "a"))).adapter
        during: list[bool] = []
        files.during = [lambda: during.append(gate.loader.try_use(gate.registry.require("a")))]
        with pytest.raises(Refused, match="has no adapter_model"):
            await gate.load(env, "a", Path("missing"))
        assert during == [True] and old

    run(live, seed=0)


def test_a_name_that_is_unloaded_during_a_reload_stays_unloaded() -> None:
    for path in ("missing", "b"):

        async def live(env: SimEnv, path: str = path) -> None:
            files = SlowFiles(a=1, b=2)
            gate = gate_of(files, "a")
            files.during = [lambda: gate.unload("a")]
            with pytest.raises(Refused):
                await gate.load(env, "a", Path(path))
            assert "a" not in gate.registry and not len(gate.store)

        run(live, seed=0)


def test_a_failed_load_of_a_name_leaves_the_load_that_succeeded() -> None:
    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(good=1))
        results = await asyncio.gather(
            gate.load(env, "n", Path("missing")), gate.load(env, "n", Path("good")), return_exceptions=True
        )
        assert isinstance(results[0], Refused) and gate.registry.find("n") is results[1]

    run(live, seed=0)


def test_a_failed_load_of_an_unloaded_name_leaves_it_unloaded(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")

    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(b=1), folder=tmp_path)
        assert gate.unload("a")
        with pytest.raises(Refused):
            await gate.load(env, "a", Path("missing"))
        assert "a" not in gate.registry
        await gate.load(env, "a", Path("b"))
        assert "a" in gate.registry

    run(live, seed=0)


def test_an_evicted_adapter_with_other_files_is_refused_until_it_is_loaded_again() -> None:
    async def live(env: SimEnv) -> None:
        files = Files(a=1, b=2)
        gate = gate_of(files, "a", "b", most=1)
        for number, name in enumerate("ab"):
            await gate.admit(env, request(number, name))
            gate.leave(f"r{number}")
        files.contents["a"] = 3
        with pytest.raises(Refused, match="files are not those that it was loaded from; load it again"):
            await gate.admit(env, request(2, "a"))
        await gate.load(env, "a", Path("a"))
        assert (await gate.admit(env, request(3, "a"))).adapter

    run(live, seed=0)


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    async def live(env: SimEnv) -> None:
        files = SlowFiles(**{tmp_path.name: 1})
        gate = gate_of(files)
        files.during = [lambda: (tmp_path / "adapter_config.json").write_text("{}")]
        with pytest.raises(Refused, match="changed while they were read"):
            await gate.load(env, "a", tmp_path)
        files.during.clear()
        await gate.load(env, "a", tmp_path)

    run(live, seed=0)


def test_at_most_two_adapters_are_read_at_once() -> None:
    async def live(env: SimEnv) -> None:
        reading, most = 0, 0

        class Env:
            now = staticmethod(env.now)

            async def run_in_thread(self, read: object, *args: object) -> object:
                nonlocal reading, most
                assert callable(read)
                reading += 1
                most = max(most, reading)
                await env.sleep(1)
                reading -= 1
                return read(*args)

        gate = gate_of(Files(a=1, b=2, c=3, d=4), *"abcd")
        await asyncio.gather(*(gate.admit(Env(), request(i, name)) for i, name in enumerate("abcd")))  # type: ignore[arg-type]
        assert most == 2

    run(live, seed=0)


def test_a_load_that_failed_needs_no_room_to_fail_again() -> None:
    async def live(env: SimEnv) -> None:
        files = Files(a=1)
        gate = gate_of(files, "a", "missing", most=1)
        with pytest.raises(Refused):
            await gate.admit(env, request(0, "missing"))
        await gate.admit(env, request(1, "a"))
        with pytest.raises(Refused, match="has no adapter_model"):
            await gate.admit(env, request(2, "missing"))
        assert files.num_reads == 2

    run(live, seed=0)
