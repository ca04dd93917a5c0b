"""Adapters of the Hub in the gate: downloads beside the loads, errors that pass, the commit of the first download."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.model.errors import DownloadError, HubUnreachable
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.adapters.downloads import AdapterDownloads
from millrace.stages.adapters.gate import AdapterGate
from millrace.stages.adapters.reader import ThreadReader
from millrace.stages.adapters.registry import AdapterRegistry
from millrace.stages.adapters.store import AdapterStore
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError, Refused, Unavailable
from tests.stages.adapters.test_adapter_gate import Files, request


class Hub(AdapterDownloads):
    """Downloads take as long as the test wants, as a commit each."""

    def __init__(self, root: Path, *allowed: str) -> None:
        super().__init__(allowed, self.fetch)
        self.root, self.commit, self.error, self.asked = root, "c1", None, list[tuple[str, str]]()
        self.may_end = asyncio.Event()
        self.may_end.set()

    error: Exception | None

    def fetch(self, text: str, commit: str) -> Path:
        self.asked.append((text, commit))
        if self.error is not None:
            raise self.error
        folder = self.root / (commit or self.commit)
        folder.mkdir(exist_ok=True)
        return folder

    async def run(self, env: SimEnv, entry: object) -> None:  # type: ignore[override]
        await self.may_end.wait()
        await super().run(env, entry)  # type: ignore[arg-type]


def gate_of(hub: Hub, files: Files, most: int) -> AdapterGate:
    registry = AdapterRegistry({"a": Path("a")}, None, ("me/two@v1", "me/three"))
    return AdapterGate(registry, AdapterStore(most, lambda digest: False), ThreadReader(files.read), downloads=hub)


async def digest_of(gate: AdapterGate, env: SimEnv, number: int, name: str) -> str:
    ref = (await gate.admit(env, request(number, name))).adapter
    assert ref is not None
    return ref.digest


def test_a_download_holds_up_no_other_adapter(tmp_path: Path) -> None:
    async def live(env: SimEnv) -> None:
        hub = Hub(tmp_path, "me/two@v1", "me/three")
        gate = gate_of(hub, Files(a=1, c1=2), 1)
        hub.may_end.clear()
        waiting = [asyncio.ensure_future(gate.admit(env, request(i, name))) for i, name in enumerate(("me/two", "a"))]
        abandoned = asyncio.ensure_future(gate.admit(env, request(3, "me/three")))
        await env.sleep(0.1)
        assert waiting[1].done() and not waiting[0].done(), "it has taken the only place"
        gate.leave("r1")
        abandoned.cancel()
        hub.may_end.set()
        assert (await waiting[0]).adapter and sorted(hub.asked) == [("me/three", ""), ("me/two@v1", "")]
        assert not gate.store.num_reserved and gate.num_waiting == 0

    run(live, seed=0)


def test_an_unreachable_hub_is_a_503_that_is_not_remembered(tmp_path: Path) -> None:
    async def live(env: SimEnv) -> None:
        hub = Hub(tmp_path, "me/two@v1")
        gate = gate_of(hub, Files(c1=2), 4)
        hub.error = HubUnreachable("me/two: the Hub does not answer")
        with pytest.raises(Unavailable, match="adapter 'me/two': .*does not answer; send"):
            await gate.admit(env, request(0, "me/two"))
        hub.error = None
        assert (await gate.admit(env, request(0, "me/two"))).adapter
        gate = gate_of(hub, Files(c1=2), 4)
        hub.error = DownloadError("me/two: not on the Hub")
        for _ in range(2):
            with pytest.raises(Refused, match="not on the Hub"):
                await gate.admit(env, request(0, "me/two"))
        assert len(hub.asked) == 3, "the second request did not ask"

    run(live, seed=0)


def test_an_adapter_stays_at_its_first_commit_until_it_is_loaded_again(tmp_path: Path) -> None:
    async def live(env: SimEnv) -> None:
        hub, name = Hub(tmp_path, "me/two@v1"), "me/two"
        gate = gate_of(hub, Files(c1=1, c2=2), 4)
        first = await digest_of(gate, env, 0, name)
        gate.leave("r0")
        gate.store.lose(first)
        hub.commit = "c2"
        assert await digest_of(gate, env, 1, name) == first and len(hub.asked) == 1
        gate.leave("r1")
        gate.store.lose(first)
        (tmp_path / "c1").rmdir()  # the cache was cleaned
        assert await digest_of(gate, env, 2, name) == first and hub.asked[-1] == ("me/two@v1", "c1")
        await gate.load(env, name, gate.registry.path_of("me/two@v1", name))
        assert await digest_of(gate, env, 3, name) != first
        with pytest.raises(Refused, match="--lora-dir"):
            gate.registry.path_of("me/three", name)

    run(live, seed=0)


def test_an_unloaded_adapter_of_the_settings_is_loaded_again_by_its_id_or_path(tmp_path: Path) -> None:
    async def live(env: SimEnv) -> None:
        hub, name = Hub(tmp_path, "me/two@v1"), "me/two"
        gate = gate_of(hub, Files(a=3, c1=1, c2=2), 4)
        first = await digest_of(gate, env, 0, name)
        hub.commit = "c2"
        for number, path in enumerate(("me/two", "me/two@v1")):
            assert gate.unload(name) and name not in gate.registry
            await gate.load(env, name, gate.registry.path_of(path, name))
            assert await digest_of(gate, env, 1 + number, name) != first
            for wrong in ("me/two@v2", "me/three", "a"):
                with pytest.raises(Refused, match="--lora-dir"):
                    gate.registry.path_of(wrong, name)
        assert [text for text, _ in hub.asked] == ["me/two@v1"] * 3
        assert gate.unload("a") and gate.registry.path_of("a", "a") == Path("a")
        with pytest.raises(Refused, match="--lora-dir"):
            gate.registry.path_of("a", "another")

    run(live, seed=0)


@pytest.mark.parametrize("text", ["me/two@feature/x", "me/two@../../x", "./x", "../x", "me/two@v1/", "me/t..o", "me"])
def test_ids_that_are_paths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be OWNER/NAME"):
        EngineConfig(enable_lora=True, lora_hub_allow=(text,))


def test_two_revisions_of_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="me/two is named twice"):
        EngineConfig(enable_lora=True, lora_hub_allow=("me/two@v1", "me/two@v2"))
