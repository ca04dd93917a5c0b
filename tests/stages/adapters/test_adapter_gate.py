"""The adapter gate, the registry and the host store, on adapters that cost nothing to read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from millrace.model.errors import AdapterError
from millrace.model.lora.adapter import Adapter, AdapterSlice
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.adapters.gate import AdapterGate
from millrace.stages.adapters.loader import FAILED_S
from millrace.stages.adapters.reader import ThreadReader
from millrace.stages.adapters.registry import AdapterRegistry, NoRoom, parse_modules
from millrace.stages.adapters.store import AdapterStore
from millrace.stages.errors import ConfigError, Overloaded, Refused
from millrace.stages.messages import AdapterRef, Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.schedule.adapter_slots import AdapterSlots


class Files:
    """Adapters by folder, as numbers; reads are counted."""

    def __init__(self, **contents: float) -> None:
        self.contents = contents
        self.num_reads = 0

    def read(self, path: Path, name: str) -> Adapter:
        self.num_reads += 1
        if path.name not in self.contents:
            raise AdapterError(f"adapter '{name}' has no adapter_model.safetensors")
        matrix = np.full((1, 2), self.contents[path.name], np.float32)
        return Adapter(name, "base", "float32", {(0, "qkv"): (AdapterSlice(0, matrix, matrix.T.copy()),)})


def gate_of(
    files: Files, *names: str, most: int = 4, max_waiting: int = 512, folder: Path | None = None
) -> AdapterGate:
    store = AdapterStore(most, lambda digest: False)
    return AdapterGate(
        AdapterRegistry({name: Path(name) for name in names}, folder), store, ThreadReader(files.read), max_waiting
    )


def request(number: int, name: str) -> Request:
    return Request(f"r{number}", (Prompt(text="x"),), SamplingParams(), adapter=AdapterRef(name))


def test_requests_of_one_adapter_share_a_load_and_the_digest_is_of_its_contents() -> None:
    async def live(env: SimEnv) -> None:
        files = Files(a=1, same=1, b=2)
        gate = gate_of(files, "a", "same", "b")
        admitted = await asyncio.gather(*(gate.admit(env, request(i, "a")) for i in range(5)))
        digests = {each.adapter.digest for each in admitted if each.adapter}
        assert files.num_reads == 1 and len(digests) == 1
        same, other = [(await gate.admit(env, request(9 + i, name))).adapter for i, name in enumerate(("same", "b"))]
        assert [*gate.registry.names_by_digest().values()] == [["a", "same"], ["b"]]
        assert same and other and {same.digest} == digests and other.digest not in digests
        assert gate.store.num_users(same.digest) == 6
        for i in range(5):
            gate.leave(f"r{i}")
            gate.leave(f"r{i}")
        assert gate.store.num_users(same.digest) == 1

    run(live, seed=0)


def test_bytes_bound_the_host_except_for_adapters_in_device_slots() -> None:
    class Sized:
        def __init__(self, digest: str, num_bytes: int) -> None:
            self.digest, self.num_bytes, self.parent, self.rank = digest, num_bytes, None, 8

    slotted: set[str] = set()
    store: AdapterStore[Sized] = AdapterStore(9, slotted.__contains__, max_bytes=10)

    def read(digest: str, size: int) -> bool:
        if not store.reserve(size):
            return False
        store.add(Sized(digest, size), size)
        return True

    assert read("a", 6) and read("b", 4) and store.num_bytes == 10
    assert store.use("a") and read("c", 4) and store.digests() == ["a", "c"], "b was not in use"
    assert store.use("c") and not read("d", 1) and store.num_evicted == 1, "both are in use, and will be free"
    store.release("c")
    assert read("big", 99) is False and store.digests() == ["a"], "a may be free later"
    slotted.add("a")
    assert read("big", 99) and store.num_bytes == 105, "nothing would become free"
    assert store.reserve(1) and store.num_bytes_reserved == 1 and store.digests() == ["a"]
    store.cancel_reservation(1)
    assert (store.num_reserved, store.num_bytes_reserved) == (0, 0)


def test_a_load_gets_room_when_an_adapter_loses_its_device_slot() -> None:
    async def live(env: SimEnv) -> None:
        slotted = set[str]()
        files = Files(a=1, b=2)
        registry = AdapterRegistry({name: Path(name) for name in "ab"})
        gate = AdapterGate(registry, AdapterStore(1, slotted.__contains__), ThreadReader(files.read))
        slots = AdapterSlots(1)
        slots.on_replaced = gate.loader.note_room
        ref = (await gate.admit(env, request(0, "a"))).adapter
        assert ref is not None
        slots.load(slots.slots[0], ref.digest)
        slots.note_granted(slots.loads(), 0)
        slots.note_done(0)
        slotted.add(ref.digest)
        gate.leave("r0")
        waiting = asyncio.ensure_future(gate.admit(env, request(1, "b")))
        await env.sleep(1)
        assert not waiting.done()
        slotted.clear()
        slots.load(slots.slots[0], "another")
        assert (await waiting).adapter and gate.store.num_evicted == 1

    run(live, seed=0)


def test_a_failed_load_is_remembered_for_a_while_and_then_tried_again() -> None:
    async def live(env: SimEnv) -> None:
        files = Files()
        gate = gate_of(files, "a")
        for _ in range(3):
            with pytest.raises(Refused, match="adapter 'a' has no adapter_model"):
                await gate.admit(env, request(0, "a"))
        assert files.num_reads == 1 and not gate.num_waiting
        await env.sleep(FAILED_S + 1)
        files.contents["a"] = 1
        assert (await gate.admit(env, request(0, "a"))).adapter

    run(live, seed=0)


def test_unknown_names_get_near_misses_and_too_many_waiting_requests_a_429() -> None:
    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(a=1), "sql-adapter", "a", max_waiting=0)
        with pytest.raises(Refused, match="did you mean sql-adapter") as refused:
            await gate.admit(env, request(0, "sql-adaptor"))
        assert refused.value.status == 404
        with pytest.raises(Overloaded, match="wait for their adapters"):
            await gate.admit(env, request(1, "a"))

    run(live, seed=0)


def test_a_reload_changes_new_requests_only_and_an_unload_frees_after_the_last() -> None:
    async def live(env: SimEnv) -> None:
        files = Files(a=1, a2=2)
        gate = gate_of(files, "a")
        old = (await gate.admit(env, request(0, "a"))).adapter
        await gate.load(env, "a", Path("a2"))
        new = (await gate.admit(env, request(1, "a"))).adapter
        assert old and new and old.digest != new.digest
        assert old.digest in gate.store, "request 0 goes on with it"
        gate.leave("r0")
        assert old.digest not in gate.store
        assert gate.unload("a") and not gate.unload("a") and new.digest in gate.store
        with pytest.raises(Refused):
            await gate.admit(env, request(2, "a"))
        gate.leave("r1")
        assert len(gate.store) == 0

    run(live, seed=0)


def test_a_reload_that_fails_leaves_the_name_as_it_was() -> None:
    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(a=1), "a")
        before = (await gate.admit(env, request(0, "a"))).adapter
        with pytest.raises(Refused):
            await gate.load(env, "a", Path("missing"))
        after = (await gate.admit(env, request(1, "a"))).adapter
        assert before and after and before.digest == after.digest

    run(live, seed=0)


def test_pinned_adapters_stay_on_the_host_and_leave_room_for_others() -> None:
    async def live(env: SimEnv) -> None:
        names = ("a", "b", "c", "d", "e")
        store: AdapterStore[Adapter] = AdapterStore(5, lambda digest: False)
        files = Files(**{name: number + 1 for number, name in enumerate(names)})
        registry = AdapterRegistry({name: Path(name) for name in names})
        gate = AdapterGate(registry, store, ThreadReader(files.read), num_slots=2)
        first = await gate.pin(env, "a", "host")
        assert (first.pin, store.pinned) == ("host", {first.digest}) and gate.has_room_to_pin()
        await gate.pin(env, "b", "device")
        for number in range(9):
            ref = (await gate.admit(env, request(number, names[2 + number % 3]))).adapter
            assert ref is not None and ref.pinned == (registry.require("b").digest,)
            gate.leave(f"r{number}")
            store.lose(ref.digest)  # read again each time
        assert files.num_reads == 2 + 9, "a and b were read once"
        with pytest.raises(NoRoom, match="2 adapters are pinned, and max_cpu_loras = 5 has room for no more"):
            await gate.pin(env, "c", "host")
        with pytest.raises(NoRoom, match="1 of max_loras = 2 device slots are pinned"):
            await gate.pin(env, "a", "device")
        reloaded = await gate.load(env, "b", Path("c"))
        assert reloaded.pin == "device" and store.pinned == {first.digest, reloaded.digest}
        assert gate.unpin("a").pin is None and gate.unload("b") and store.pinned == frozenset()
        with pytest.raises(Refused, match="no adapter of that name"):
            gate.unpin("b")

    run(live, seed=0)


def test_a_full_store_evicts_what_is_unused_and_else_waits_for_a_release() -> None:
    async def live(env: SimEnv) -> None:
        files = Files(a=1, b=2, c=3)
        gate = gate_of(files, "a", "b", "c", most=2)
        await gate.admit(env, request(0, "a"))
        await gate.admit(env, request(1, "b"))
        waiting = asyncio.ensure_future(gate.admit(env, request(2, "c")))
        await env.sleep(1)
        assert not waiting.done() and len(gate.store) == 2
        gate.leave("r0")
        assert (await waiting).adapter and len(gate.store) == 2 and gate.store.num_evicted == 1

    run(live, seed=0)


def test_a_client_names_folders_inside_the_adapter_folder_only(tmp_path: Path) -> None:
    (tmp_path / "in" / "one").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "one" / "adapter_config.json").write_text("{}")
    registry = AdapterRegistry({}, tmp_path / "in")
    assert registry.path_of("one") == (tmp_path / "in" / "one").resolve() and "one" in registry
    for wrong in ("../out", "link", ".", str(tmp_path / "out"), "/etc", "missing"):
        with pytest.raises(Refused, match="lora_path"):
            registry.path_of(wrong)
    with pytest.raises(Refused, match="has none"):
        AdapterRegistry({}).path_of("one")


def test_paths_that_no_system_has_are_refused_and_are_no_names(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    registry = AdapterRegistry({}, tmp_path)
    for wrong in ("a\0b", "x" * 300, "x/" * 3000, "loop", "loop/x", "\ud800"):
        with pytest.raises(Refused, match="lora_path"):
            registry.path_of(wrong)
        assert wrong not in registry


def test_a_folder_that_appears_later_is_found_and_links_to_outside_are_not(tmp_path: Path) -> None:
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    (tmp_path / "in" / "early").symlink_to(tmp_path / "out")
    registry = AdapterRegistry({}, tmp_path / "in")
    (tmp_path / "in" / "late").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "own").mkdir()
    (tmp_path / "in" / "own" / "adapter_config.json").write_text("{}")
    assert "early" not in registry and "late" not in registry and "../out" not in registry and "own" in registry
    assert [entry.name for entry in registry] == ["own"]


def test_an_unknown_name_costs_no_listing_and_few_comparisons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compared: list[int] = []

    def count(word: str, known: list[str], n: int) -> list[str]:
        compared.append(len(known))
        return known[:0]

    registry = AdapterRegistry({f"customer-{number:05d}": Path("x") for number in range(5000)}, tmp_path)
    assert "did you mean customer-04" in registry.near_misses("customer-0401x")
    monkeypatch.setattr("difflib.get_close_matches", count)
    monkeypatch.setattr(Path, "iterdir", lambda path: pytest.fail("the folder is listed"))
    with pytest.raises(Refused):
        registry.require("customer-99999")
    assert compared and max(compared) <= 100


def test_the_names_of_the_model_are_no_adapters(tmp_path: Path) -> None:
    for name in ("base", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    registry = AdapterRegistry({"sql": Path("x")}, tmp_path)
    registry.exclude(("base",))
    assert {entry.name for entry in registry} == {"own", "sql"} and "base" not in registry
    with pytest.raises(ConfigError, match="sql is the model's own name"):
        registry.exclude(("sql",))


@pytest.mark.parametrize(
    "wrong", [("a",), ("=x",), ("a=",), ("a=x", "a=y"), ("a,b=x",), ("a\nb=x",), ("..=x",), ("a" * 257 + "=x",)]
)
def test_modules_of_the_settings_are_names_with_paths(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        parse_modules(wrong)
    assert parse_modules(("a=x=1", "b=/y")) == {"a": Path("x=1"), "b": Path("/y")}


def test_a_removal_counts_and_ends_requests_that_still_wait() -> None:
    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(a=1), "a", most=1)
        assert gate.store.reserve()
        waiting = [asyncio.ensure_future(gate.admit(env, request(i, "a"))) for i in range(2)]
        await env.sleep(0.01)
        assert gate.unload("a") and await gate.wait_unused(env, "a", 0.1) == ["r0", "r1"]
        gate.abort("r0")
        gate.store.cancel_reservation()
        gate.loader.note_room()
        assert await gate.wait_unused(env, "a", 0.1) == ["r1"]
        with pytest.raises(Refused, match="was removed while"):
            await waiting[0]
        ref = (await waiting[1]).adapter
        assert ref is not None and gate.store.num_users(ref.digest) == 1

    run(live, seed=0)


def test_a_slot_whose_load_failed_tells_those_that_wait_for_room() -> None:
    slots, num_calls = AdapterSlots(1), 0

    def count() -> None:
        nonlocal num_calls
        num_calls += 1

    slots.on_replaced = count
    slots.load(slots.slots[0], "a")
    slots.note_granted(slots.loads(), 0)
    slots.note_failed(0, ["a"])
    assert num_calls == 1 and slots.of("a") is None


def test_names_are_bounded_and_unloaded_ones_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.stages.adapters.registry.MAX_NAMES", 2)

    async def live(env: SimEnv) -> None:
        gate = gate_of(Files(a=1))
        for name in "ab":
            await gate.load(env, name, Path("a"))
        with pytest.raises(Refused, match="has 2 adapters and takes at most 2; unload some"):
            await gate.load(env, "c", Path("a"))
        await gate.load(env, "b", Path("a"))
        assert gate.unload("a") and await gate.load(env, "c", Path("a")) and not gate.registry._hidden

    run(live, seed=0)


def test_as_many_adapters_as_slots_pass_the_bytes_where_slots_are_elsewhere() -> None:
    class Sized:
        parent, rank, num_bytes = None, 8, 10

        def __init__(self, digest: str) -> None:
            self.digest = digest

    store: AdapterStore[Sized] = AdapterStore(9, lambda digest: False, max_bytes=15, num_slots=2)
    for digest in "abc":
        assert store.reserve(10)
        store.add(Sized(digest), 10)
        assert store.use(digest)
    assert not store.reserve(10), "two have slots, one is beside them"
    store.release("a")
    assert store.reserve(10) and store.digests() == ["b", "c"]
