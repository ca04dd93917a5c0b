"""An engine with several fronts, over links in one process: whose tokens go where, and what ends with whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.processes.transport import SocketTransport
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError
from millrace.stages.machines.engine_server import EngineServer, check
from millrace.stages.machines.likeness import check_alike
from millrace.stages.machines.route_engine import OwnPeer, RouteEngine, front_config, look_at_all
from millrace.stages.params import SamplingParams

CONFIG = EngineConfig(max_num_seqs=8, threads=1, dtype="float32")
OWN = EngineConfig()
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
PROMPTS = ["Zoe and 1", "Tom", "The sea is", "One"]


class NamedPeer(OwnPeer):
    """The engine of this process, under a name."""

    def __init__(self, server: EngineServer, name: str) -> None:
        super().__init__(server)
        self.name = name
        self.is_cut = False

    async def connect(self) -> SocketTransport:
        if self.is_cut:
            raise ConnectionRefusedError
        return await super().connect()


@asynccontextmanager
async def served(config: EngineConfig = CONFIG) -> AsyncIterator[EngineServer]:
    env = LiveEnv(0)
    server = EngineServer(config, env, prefix_key=b"k" * 16)
    try:
        await server.start()
        yield server
    finally:
        await server.aclose()
        await env.aclose()


async def front(*servers: EngineServer) -> RouteEngine:
    peers = [NamedPeer(server, f"engine {number}") for number, server in enumerate(servers)]
    return RouteEngine(front_config(OWN, await look_at_all(peers)), peers, b"k" * 16)


async def answer(engine: Engine, prompt: str, params: SamplingParams = GREEDY) -> str:
    return "".join([output.outputs[0].text async for output in engine.generate(prompt, params)])


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@on_a_loop
async def test_two_fronts_of_two_engines_answer_as_one_engine_does() -> None:
    async with Engine(CONFIG) as alone:
        due = await asyncio.gather(*(answer(alone, prompt) for prompt in PROMPTS))
    async with served() as first, served() as second:
        async with await front(first, second) as one, await front(second, first) as other:
            asked = [answer(engine, prompt) for prompt in PROMPTS for engine in (one, other)]
            found = await asyncio.gather(*asked)
            assert found[::2] == due and found[1::2] == due
            await until(lambda: first.num_live == second.num_live == 0)
            first.table.check()


@on_a_loop
async def test_the_end_of_a_front_frees_its_blocks_and_disturbs_no_other() -> None:
    async with Engine(CONFIG) as alone:
        due = await answer(alone, "Zoe and 1", LONG)
    async with served() as server, await front(server) as stays:
        peer = NamedPeer(server, "engine")
        leaves = RouteEngine(front_config(OWN, await look_at_all([peer])), [peer], b"k" * 16)
        await leaves.start()
        streams = [asyncio.ensure_future(answer(leaves, prompt, LONG)) for prompt in PROMPTS]
        going_on = asyncio.ensure_future(answer(stays, "Zoe and 1", LONG))
        await until(lambda: server.num_live == 5)
        peer.is_cut, link = True, server.fronts[max(server.fronts)]
        link.close()  # as when its process is killed: no word, and none after it
        server.lost(link, "a kill")
        assert server.num_live == 1
        await until(lambda: server.report().core.scheduler.num_running <= 1)
        assert await going_on == due
        await until(lambda: server.num_live == 0 and server.report().core.cache.pool.num_in_use == 0)
        server.table.check()
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
        await leaves.stop()


@on_a_loop
async def test_requests_of_a_lost_engine_go_on_in_another_where_they_stopped() -> None:
    async with Engine(CONFIG) as alone:
        due = await asyncio.gather(*(answer(alone, prompt, LONG) for prompt in PROMPTS))
    async with served() as first, served() as second, await front(first, second) as engine:
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: first.num_live == second.num_live == 2)
        await first.aclose()
        assert await asyncio.gather(*streams) == due
        assert engine.engines[0]["state"] != "ready" and engine.engines[1]["state"] == "ready"


@on_a_loop
async def test_a_draining_engine_ends_its_requests_and_gets_no_new_ones() -> None:
    async with served() as first, served() as second, await front(first, second) as engine:
        begun = asyncio.ensure_future(answer(engine, "Zoe and 1", LONG))
        await until(lambda: first.num_live == 1)
        draining = asyncio.ensure_future(first.drain(20.0))
        await until(lambda: engine.engines[0]["state"] == "draining")
        (link,) = first.fronts.values()
        num_seen = link.num_seen
        assert all(await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS)))
        assert await begun and await draining
        assert link.num_seen == num_seen and first.num_live == 0


@on_a_loop
async def test_a_front_that_comes_later_learns_what_is_cached_already() -> None:
    async with served() as server:
        async with await front(server) as early:
            await answer(early, "The sea is wide and the boat is small, said Tom to Zoe on a sunny day in May")
        await until(lambda: bool(server._keys))
        async with await front(server) as late:
            router = late.core.processes.router  # type: ignore[attr-defined]
            await until(lambda: router.held_by(0) == server._keys)


@on_a_loop
async def test_engines_with_other_files_or_settings_are_refused_by_name() -> None:
    async with served() as server:
        (ready,) = await look_at_all([NamedPeer(server, "a")])
    assert ready.config is not None
    other = replace(ready, config=replace(ready.config, max_num_seqs=9))
    with pytest.raises(ConfigError, match=r"engine b has max_num_seqs = 9, and engine a 8"):
        check_alike(["a", "b"], [ready, other])
    other = replace(ready, files={**ready.files, "model.safetensors": "another"})
    with pytest.raises(ConfigError, match=r"engine b has another model than engine a: model.safetensors differ"):
        check_alike(["a", "b"], [ready, other])


@pytest.mark.parametrize("name", ["enable_lora", "logits_processor", "stage", "inject"])
def test_settings_that_are_of_one_front_are_refused(name: str) -> None:
    value: Any = {
        "logits_processor": ("a.b:C",),
        "stage": ("a.b:C@after=sample",),
        "inject": ("stage=execute,delay=1ms",),
    }
    with pytest.raises(ConfigError, match=f"{name} = .*several fronts"):
        check(replace(CONFIG, **{name: value.get(name, True)}))
