"""`millrace replay --dashboard` without a browser: access, seeking, and equality with the recording."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest

from millrace.deploy.cli.replay_dashboard import MAX_VIEWERS, ReplayDashboard
from millrace.deploy.config import ServerConfig
from millrace.deploy.dashboard.messages import Topics
from millrace.deploy.dashboard.playback.data import PlaybackData
from millrace.stages.allocate.tiers.block_pool import BlockState
from millrace.stages.recordings.film import film
from millrace.stages.recordings.reader import Recording
from millrace.stages.recordings.time_machine import TimeMachine
from tests.deploy.dashboard.test_dashboard_feed import Looking
from tests.stages.recorded_runs import record

pytestmark = pytest.mark.slow

EVERYTHING: dict[str, Any] = {name: {} for name in Topics.model_fields if name != "request"}


@pytest.fixture(scope="module")
def playback_data(tmp_path_factory: pytest.TempPathFactory) -> PlaybackData:
    path = tmp_path_factory.mktemp("reel") / "run.jsonl"
    record(path, 20, seed=3)
    return PlaybackData(film(Recording(path)))


@asynccontextmanager
async def looking(playback_data: PlaybackData) -> AsyncIterator[tuple[ReplayDashboard, Looking]]:
    async with ReplayDashboard(playback_data, ServerConfig(port=0)) as playback, aiohttp.ClientSession() as http:
        async with http.ws_connect(f"{playback.url}/dashboard/feed") as socket:
            viewer = Looking(socket)
            await viewer.say("hello")
            yield playback, viewer


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 60))

    return run


async def at(viewer: Looking, time_s: float) -> dict[str, Any]:
    """What is known once it is there."""
    await viewer.say("seek", time_s=time_s)
    while abs(viewer.data.get("position", {}).get("time_s", -1.0) - time_s) > 1e-6:
        message = await viewer.update()
        if "cells" in message["full"].get("blocks", {}):
            viewer.cells = np.frombuffer(b64decode(message["full"]["blocks"]["cells"]), "<u2").copy()  # type: ignore[attr-defined]
        elif "at" in message["patch"].get("blocks", {}):
            news = message["patch"]["blocks"]
            places, values = np.frombuffer(b64decode(news["at"]), "<u4"), np.frombuffer(b64decode(news["to"]), "<u2")
            viewer.cells[places] = values  # type: ignore[attr-defined]
    return viewer.data


@on_loop
async def test_the_figures_anywhere_are_those_of_the_time_machine(playback_data: PlaybackData):
    path, duration_s, dice = playback_data.film.recording.path, playback_data.film.duration_s, Random(5)
    machine = TimeMachine(Recording(path))
    async with looking(playback_data) as (_, viewer):
        told = (await viewer.hear())["recording"]
        assert told["name"] == path.name and told["duration_s"] == duration_s and told["trouble"] is None
        await viewer.say("subscribe", topics=EVERYTHING)
        for time_s in [duration_s, *(round(dice.uniform(0, duration_s), 6) for _ in range(8)), 0.0]:
            known = await at(viewer, time_s)
            moment = machine.at(time_s)
            memory, overview = moment.memory, known["overview"]
            blocks = {name: memory.device.count(state) for name, state in BLOCK_STATES.items()}
            assert {name: overview["blocks"][name] for name in blocks} == blocks
            states = [each.state for each in memory.sequences]
            assert overview["num_running"] == states.count("running") <= overview["max_num_seqs"]
            num_in_line = sum(state not in ("running", "parked") for state in states)
            assert overview["num_waiting"] + overview["num_swapped"] == num_in_line
            assert known["preemptions"]["num_preemptions"] == len(moment.preemptions) == overview["num_preemptions"]
            sentences = [row["sentence"] for row in known["preemptions"]["rows"]]
            assert sentences == [str(each) for each in reversed(moment.preemptions[-100:])]
            ids = {each.request_id for each in memory.sequences}
            assert {row["id"] for row in known["requests"]["rows"]} == ids and known["requests"]["num_live"] == len(ids)
            position = known["position"]
            assert (position["last_granted"], position["completed_step"]) == (
                memory.last_granted,
                memory.completed_step,
            )
            check_cells(viewer.cells, memory)  # type: ignore[attr-defined]
            assert sum(known["latency"]["time_to_first_token"]["counts"]) == sum(
                life.first_token_s is not None and life.first_token_s <= playback_data.film.began_s + time_s + 1e-9
                for life in playback_data.film.recorded.values()
            )


BLOCK_STATES = {
    "free": BlockState.FREE,
    "in_use": BlockState.IN_USE,
    "cached": BlockState.CACHED,
    "quarantined": BlockState.QUARANTINED,
}


def check_cells(cells: Any, memory: Any) -> None:
    """Compares each block with the block tables."""
    holders: dict[int, list[int]] = {}
    for holder in memory.holders:
        for block in holder.blocks:
            holders.setdefault(block, []).append(holder.slot)
    for block, cell in enumerate(cells.tolist()):
        state = BlockState(memory.device.block_states[block])
        if state is BlockState.IN_USE:
            assert cell == (4 + holders[block][0] if memory.device.num_tables[block] == 1 else 3), block
        else:
            assert cell == {BlockState.FREE: 0, BlockState.CACHED: 1, BlockState.QUARANTINED: 2}[state], block


@on_loop
async def test_one_goes_by_steps_and_it_goes_on_by_itself_to_the_end(playback_data: PlaybackData):
    async with looking(playback_data) as (_, viewer):
        await viewer.hear()
        await viewer.say("subscribe", topics={"overview": {}, "steps": {}})
        known = await at(viewer, playback_data.film.duration_s / 2)
        step = known["position"]["completed_step"]
        for by, expected in ((1, step + 1), (1, step + 2), (-1, step + 1), (-100_000, -1), (1, 0)):
            await viewer.say("seek", steps=by)
            while viewer.data["position"]["completed_step"] != expected:
                await viewer.update()  # the test's own limit of time ends this, if it never comes
        await viewer.say("play", speed=playback_data.film.duration_s * 4)
        while viewer.data["position"]["time_s"] < playback_data.film.duration_s or viewer.data["position"]["speed"]:
            await viewer.update()
        assert viewer.data["position"]["num_done"] == len(playback_data.steps)
        await viewer.say("play", speed=0.01)  # from the end it begins anew
        while viewer.data["position"]["time_s"] >= playback_data.film.duration_s:
            await viewer.update()
        assert viewer.data["position"]["time_s"] < playback_data.film.duration_s / 2


@on_loop
async def test_a_request_is_explained_as_far_as_it_had_come(playback_data: PlaybackData):
    of_one_choice = (life for life in playback_data.film.recorded.values() if life.num_sequences == 1)
    life = max(of_one_choice, key=lambda life: life.num_generated_tokens)
    assert life.ended_s is not None and life.first_token_s is not None
    began_s = playback_data.film.began_s
    async with looking(playback_data) as (_, viewer):
        await viewer.hear()
        await viewer.say("subscribe", topics={"request": {"id": life.request_id}, "recent": {}})
        for moment_s, is_over in ((life.ended_s + 1e-5, True), ((life.first_token_s + life.ended_s) / 2, False)):
            known = await at(viewer, round(moment_s - began_s, 6))
            told = known["request"]
            assert (told.get("ended_us") is not None) == is_over
            assert any(row["id"] == life.request_id for row in known["recent"]["rows"]) == is_over
            explained = told["explained"]
            assert sum(row["total_us"] for row in explained["rows"]) == pytest.approx(explained["total_us"], abs=2)
            ticks = sum(len(sequence["ticks_us"]) for sequence in told["sequences"])
            assert (ticks == life.num_generated_tokens) if is_over else (0 < ticks < life.num_generated_tokens)
        known = await at(viewer, round(max(0.0, life.arrival_s - began_s - 1e-3), 6))
        assert "sequences" not in known["request"] or life.arrival_s == began_s


@on_loop
async def test_what_makes_no_sense_is_refused_by_name_and_the_viewer_stays(playback_data: PlaybackData):
    async with looking(playback_data) as (_, viewer):
        await viewer.hear()
        for message, word in (
            ({"type": "seek"}, "time_s"),
            ({"type": "seek", "time_s": 1, "steps": 1}, "time_s"),
            ({"type": "seek", "time_s": -1}, "time_s"),
            ({"type": "seek", "time_s": "x"}, "time_s"),
            ({"type": "play", "speed": 1e9}, "speed"),
            ({"type": "cancel", "id": "r1"}, "type"),
        ):
            await viewer.socket.send_str(json.dumps(message))
            error = (await viewer.hear())["error"]
            assert error["param"] == word and error["code"] in ("invalid_value", "invalid_type"), message
        await viewer.say("subscribe", topics={"overview": {}})
        await viewer.say("seek", time_s=1e8)
        while viewer.data.get("position", {}).get("time_s") != playback_data.film.duration_s:
            await viewer.update()


@on_loop
async def test_it_is_a_page_of_this_machine_and_of_nothing_else(playback_data: PlaybackData):
    async with ReplayDashboard(playback_data, ServerConfig(port=0)) as playback, aiohttp.ClientSession() as http:
        async with http.get(f"{playback.url}/dashboard") as answer:
            assert answer.status == 200 and "default-src 'none'" in answer.headers["Content-Security-Policy"]
        for path, status in (("/v1/models", 404), ("/metrics", 404), ("/static/../playback.py", 404)):
            async with http.get(playback.url + path) as answer:
                assert answer.status == status and (await answer.json())["error"]["code"] == "not_found"
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            async with http.get(f"{playback.url}/dashboard", headers=headers) as answer:
                assert answer.status == 403
        sockets = [await http.ws_connect(f"{playback.url}/dashboard/feed") for _ in range(MAX_VIEWERS)]
        for socket in sockets:
            await socket.send_str('{"type":"hello"}')
            assert json.loads(await socket.receive_str())["type"] == "hello"
        async with http.ws_connect(f"{playback.url}/dashboard/feed") as socket:
            assert json.loads(await socket.receive_str())["error"]["code"] == "too_many_connections"


def test_a_file_that_is_no_recording_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from millrace.deploy.cli.main import main

    path = tmp_path / "nothing.jsonl"
    path.write_text("{}\n")
    assert main(["replay", str(path), "--dashboard", "--port", "0"]) == 3
    assert "this is not a recording" in capsys.readouterr().err
