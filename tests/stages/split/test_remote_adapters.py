"""Both ends of the adapters in split mode: whatever is dropped and read at once, they agree about what is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from millrace.model.lora.adapter import Adapter, AdapterSlice
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.adapters.gate import AdapterGate
from millrace.stages.adapters.registry import AdapterRegistry
from millrace.stages.adapters.store import AdapterStore
from millrace.stages.messages import AdapterRef, Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.split.core_adapters import CoreAdapters
from millrace.stages.split.protocol import AdapterCard, DropAdapter, ReadAdapter
from millrace.stages.split.remote_adapters import RemoteAdapters

LATENCY_S = 0.01


class Process:
    """An engine process: words arrive in order, after a while. Folders of one first letter hold the same adapter."""

    def __init__(self, env: SimEnv) -> None:
        self.env, self.core = env, CoreAdapters(self._read, lambda digest: False)

    def _read(self, path: Path, name: str) -> Adapter:
        matrix = np.full((1, 2), ord(path.name[0]), np.float32)
        return Adapter(name, "base", "float32", {(0, "qkv"): (AdapterSlice(0, matrix, matrix.T.copy()),)})

    async def read_adapter(self, path: str, name: str, digest: str) -> AdapterCard:
        await self.env.sleep(LATENCY_S)
        card = await self.core.read(self.env, ReadAdapter(0, path, name, digest))
        await self.env.sleep(LATENCY_S)
        return card

    def post(self, word: DropAdapter) -> None:
        asyncio.get_running_loop().call_later(LATENCY_S, self.core.drop, word)


class Ends:
    """A front process and its engine process, which `replace` replaces."""

    def __init__(self, env: SimEnv, names: Iterable[str]) -> None:
        self.env, self.process = env, Process(env)
        self.remote = RemoteAdapters(lambda: cast(Any, self.process))
        registry = AdapterRegistry({name: Path(name) for name in names})
        self.gate = AdapterGate(registry, AdapterStore(4, lambda digest: False, self.remote.drop), self.remote)

    async def admit(self, request_id: str, name: str) -> str:
        request = Request(request_id, (Prompt(text="x"),), SamplingParams(), adapter=AdapterRef(name))
        ref = (await self.gate.admit(self.env, request)).adapter
        assert ref is not None
        return ref.digest

    async def check(self) -> None:
        await self.env.sleep(1)
        digests = self.gate.store.digests()
        assert len(self.process.core) == len(digests)
        assert all(self.process.core.get(digest).digest == digest for digest in digests)


def test_an_adapter_dropped_while_it_is_read_again_stays_where_it_is_read() -> None:
    async def live(env: SimEnv) -> None:
        for wait_s in (0.0, 0.005, 0.015, 0.025):
            ends = Ends(env, ("a1", "a2"))
            digest = await ends.admit("r1", "a1")
            ends.gate.leave("r1")
            reading = asyncio.ensure_future(ends.admit("r2", "a2"))
            await env.sleep(wait_s)
            ends.gate.unload("a1")
            assert await reading == digest
            await ends.check()
            assert len(ends.process.core) == 1
            ends.gate.leave("r2")
            ends.gate.unload("a2")
            await ends.check()
            assert not len(ends.process.core)

    run(live, seed=0)


def test_adapters_may_be_dropped_while_a_new_process_reads_them() -> None:
    async def live(env: SimEnv) -> None:
        for wait_s in (0.0, 0.005, 0.015, 0.035):
            ends = Ends(env, "abc")
            for name in "abc":
                await ends.admit(f"r{name}", name)
            ends.process = Process(env)
            restoring = asyncio.ensure_future(ends.remote.restore(env, ends.gate, lambda *each: None))
            await env.sleep(wait_s)
            for name in "ab":
                ends.gate.unload(name)
                ends.gate.leave(f"r{name}")
            await restoring
            await ends.check()
            assert len(ends.process.core) == 1

    run(live, seed=0)


def test_a_new_process_reads_pinned_adapters_that_no_request_has() -> None:
    async def live(env: SimEnv) -> None:
        ends = Ends(env, "abc")
        ends.gate.store.max_adapters = 5
        await ends.gate.pin(env, "b", "host")
        for name in "ac":
            await ends.admit(f"r{name}", name)
        ends.gate.leave("rc")
        ends.process = Process(env)
        await ends.remote.restore(env, ends.gate, lambda *each: None)
        await ends.check()
        assert ends.gate.store.pinned < set(ends.gate.store.digests()) and len(ends.process.core) == 2

    run(live, seed=0)


def test_an_adapter_that_could_not_be_loaded_is_read_again() -> None:
    async def live(env: SimEnv) -> None:
        ends = Ends(env, "a")
        await ends.admit("r1", "a")
        ends.process.core = CoreAdapters(ends.process._read, lambda digest: False)  # it has lost them, for any reason
        ends.gate.lose("r1")
        ends.gate.lose("r1")
        ends.gate.leave("r1")
        await ends.admit("r2", "a")
        await ends.check()
        assert len(ends.process.core) == 1

    run(live, seed=0)
