"""Recordings: written by a loaded engine, replayed, inspected, and rejected if invalid."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.deploy.cli.main import main
from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.errors import ConfigError
from millrace.stages.params import SamplingParams
from millrace.stages.recordings import writer as recording_writer
from millrace.stages.recordings.memory_state import MemoryState, memory_state
from millrace.stages.recordings.reader import Recording, RecordingError
from millrace.stages.recordings.replay import Replay
from millrace.stages.recordings.time_machine import TimeMachine
from millrace.stages.testing.scripted.engine import ScriptedPipeline, scripted_engine, scripted_pipeline
from millrace.stages.testing.scripted.script import Script
from tests.counts import FULL
from tests.stages.recorded_runs import TIGHT, record, requests, spoil


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ScriptedPipeline, dict[float, MemoryState]]:
    """A recording of a few requests, the pipeline that made it, and its memory at each time."""
    path = tmp_path_factory.mktemp("loaded") / "run.jsonl"
    seen: dict[float, MemoryState] = {}

    def look(parts: ScriptedPipeline) -> None:
        seen[parts.pipeline.env.now()] = memory_state(parts.schedule.scheduler, parts.allocate.allocator)

    return path, record(path, 24, look=look, script=Script(short_length=24)), seen


# -- replaying it


@pytest.mark.slow
def test_a_recorded_run_with_preemptions_and_cancels_replays_decision_by_decision(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    num_requests, num_replays = (1000, 20) if FULL else (40, 2)
    scheduler = record(path, num_requests, seed=7, script=Script(short_length=24)).schedule.scheduler
    replays = [Replay(Recording(path)).run() for _ in range(num_replays)]
    assert {replay.difference for replay in replays} == {None} and replays[0].recording.end == "closed"
    assert len({replay.decision_hash for replay in replays}) == 1
    num_lengthened = scheduler.preemptions["recompute", "rope"]
    assert min(num_lengthened, scheduler.num_preemptions - num_lengthened) > num_requests / 20
    assert sum(b'"disconnect"' in line for line in path.read_bytes().splitlines()) > num_requests / 20


def test_the_first_decision_that_differs_is_named(loaded: Any, tmp_path: Path) -> None:
    lines = loaded[0].read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if i > 100 and b'"num_free"' in line)
    told = orjson.loads(lines[number])
    told["allocate"]["answers"][0]["report"]["num_free"] += 1
    path = tmp_path / "changed.jsonl"
    path.write_bytes(b"".join([*lines[:number], orjson.dumps(told) + b"\n", *lines[number + 1 :]]))
    difference = Replay(Recording(path)).run().difference
    assert difference is not None and difference.line == number + 1
    assert (difference.decision, difference.field) == ("report", "num_free")
    assert difference.recorded == difference.replayed + 1 and f"line {number + 1}" in str(difference)
    with pytest.raises(RecordingError, match=f"decide differently now.*line {number + 1},"):
        TimeMachine(Recording(path)).at(1e9)


def test_other_settings_decide_differently(loaded: Any, tmp_path: Path) -> None:
    header, _, rest = loaded[0].read_bytes().partition(b"\n")
    told = orjson.loads(header)
    told["engine"]["max_num_batched_tokens"] -= 8
    path = tmp_path / "changed.jsonl"
    path.write_bytes(orjson.dumps(told) + b"\n" + rest)
    difference = Replay(Recording(path)).run().difference
    assert difference is not None and difference.field == "token_budget"


@pytest.mark.slow
def test_the_command_prints_the_hash_and_says_by_its_code_whether_all_is_the_same(
    loaded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(loaded[0]), "--repeat", "2"]) == 0
    told = capsys.readouterr().out
    assert f"decision hash: {Replay(Recording(loaded[0])).run().decision_hash}" in told
    assert "difference: none" in told and "2 times, all with that hash" in told
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(loaded[0].read_bytes()[:-40])
    assert main(["replay", str(cut)]) == 0 and "ended early" in capsys.readouterr().out
    cut.write_bytes(b"not json\n")
    assert main(["replay", str(cut)]) == 3 and f"{cut}:1: this is not JSON" in capsys.readouterr().err


# -- what a recording holds


@pytest.mark.slow
def test_a_recording_tells_nothing_of_what_prompts_and_answers_say(tmp_path: Path) -> None:
    hidden, plain = tmp_path / "hidden.jsonl", tmp_path / "plain.jsonl"
    record(hidden, 12)
    record(plain, 12, config=replace(TIGHT, record_token_ids=True))
    prompts = [prompt.token_ids for request in requests(12) for prompt in request.prompts]
    texts = [base64.b64encode(np.asarray(prompt, "<i4").tobytes())[:24] for prompt in prompts if len(prompt) > 8]
    assert not any(text in hidden.read_bytes() for text in texts) and b"tenant" not in hidden.read_bytes()
    assert all(text in plain.read_bytes() for text in texts)
    assert Replay(Recording(hidden)).run().difference is None
    assert Replay(Recording(hidden)).run().decision_hash == Replay(Recording(plain)).run().decision_hash
    assert hidden.stat().st_mode & 0o077 == 0


async def serve(path: Path) -> None:
    """A live engine that records one answer."""
    async with scripted_engine(record=str(path)) as engine:
        async for _ in engine.generate("Once upon a time", SamplingParams(max_tokens=4)):
            pass


def test_an_engine_records_from_its_start_to_its_stop_and_spares_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("an older one\n")
    asyncio.run(serve(path))
    assert path.read_text() == "an older one\n"
    replay = Replay(Recording(tmp_path / "run.jsonl.1")).run()
    assert replay.difference is None and replay.num_decisions >= 8 and replay.recording.end == "closed"


def test_a_file_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record = .*nowhere/run.jsonl: the folder .*nowhere does not exist"):
        asyncio.run(serve(tmp_path / "nowhere" / "run.jsonl"))


# -- when it cannot go on


def serve_while(tmp_path: Path, spoil: Any) -> tuple[Recording, list[dict[str, Any]]]:
    """A recording of an engine that serves ten requests to their end, after `spoil(recorder, parts)`."""

    async def live(env: SimEnv) -> None:
        parts = scripted_pipeline(TIGHT, env=env)
        recorder = parts.core.record(tmp_path / "run.jsonl", TIGHT, env)
        spoil(recorder, parts)
        async with parts.pipeline:
            for request in requests(10):
                assert await parts.pipeline.call(request)
        await recorder.aclose()

    with captured_logs() as logs:
        run(live, seed=0)
    return Recording(tmp_path / "run.jsonl"), logs


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    def spoil(recorder: Any, parts: Any) -> None:
        recorder._file.close()
        recorder._file = Full()

    recording, logs = serve_while(tmp_path, spoil)
    assert list(recording) == []
    assert any(log["event"] == "recording.stopped" and "No space left" in log["reason"] for log in logs)


@pytest.mark.slow
def test_a_disk_that_is_too_slow_ends_the_recording_within_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_writer, "MAX_WAITING_BYTES", 200_000)
    monkeypatch.setattr(recording_writer, "FLUSH_S", 1e9)
    recording, _ = serve_while(tmp_path, lambda recorder, parts: None)
    calls = list(recording)
    assert 5 < len(calls) <= 12 and recording.end is not None and "cannot be written fast enough" in recording.end
    assert Replay(recording).run().difference is None


@pytest.mark.slow
def test_a_crash_of_a_stage_ends_the_recording_which_replays_up_to_there(tmp_path: Path) -> None:
    def spoil(recorder: Any, parts: ScriptedPipeline) -> None:
        plan, num_calls = parts.schedule.scheduler.plan, 0

        def crash_once() -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 60:
                raise RuntimeError("a bug")
            return plan()

        parts.schedule.scheduler.plan = crash_once  # type: ignore[method-assign]

    recording, _ = serve_while(tmp_path, spoil)
    replay = Replay(recording).run()
    assert replay.difference is None and replay.num_calls > 20 and recording.end == "stage schedule crashed"


# -- the time machine


@pytest.mark.slow
def test_the_memory_rebuilt_at_any_time_is_what_it_was(loaded: Any) -> None:
    path, _, seen = loaded
    machine = TimeMachine(Recording(path))
    states = {round(time_s - machine.recording.began_s, 6): state for time_s, state in seen.items()}
    times = Random(2).sample(list(states), 200 if FULL else 6)
    for time_s in [*times, *sorted(states)]:  # back and forth, then forward through all
        moment = machine.at(time_s + 1e-7)
        assert moment.time_s == time_s and moment.memory == states[time_s]
    assert len(states) > 100 and machine.at(1e9).time_s >= max(states)


@pytest.mark.slow
def test_the_time_machine_tells_why_who_was_preempted(loaded: Any) -> None:
    path, parts, _ = loaded
    preemptions = TimeMachine(Recording(path)).at(1e9).preemptions
    counted = parts.schedule.scheduler.preemptions
    told = [preemption for preemption in preemptions if preemption.cause != "parked" and preemption.request_id]
    assert len(preemptions) >= counted.total() >= len(told) > 0
    for preemption in told:
        assert preemption.how in ("swap", "recompute") and preemption.cause in ("blocks", "slot", "rope")
        assert ("longer than its rotary factors" in str(preemption)) == (preemption.cause == "rope")
        assert preemption.sequence_id not in preemption.beneficiaries and str(preemption.step) in str(preemption)


# -- files that no engine wrote


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(RecordingError) as caught:
        Replay(Recording(path)).run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ":1: this is not JSON"),
        (b"\x80\x04\x95cposix\nsystem\n", ":1: this is not JSON"),
        (b"[1]\n", ":1: this is not a recording"),
        (b'{"millrace_recording": 99}\n', ":1: a recording of format 99"),
        (
            b'{"millrace_recording": 2}\n',
            ":1: a recording of format 2: `millrace serve --record FILE` writes format 3",
        ),
        (b'{"millrace_recording": 3, "engine": []}\n', ":1: engine.num_blocks = None: must be a whole number"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_line_and_reason(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "hostile"
    assert f"{path}{reason}" in refusal(path, content)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_blocks", 10**15, "engine.num_blocks = 1000000000000000: must be a whole number from 1 to"),
        ("num_blocks", 1, "hold no sequence of max_model_len = 96"),
        ("max_num_seqs", True, "engine.max_num_seqs = True: must be a whole number"),
        ("max_model_len", 2**24, "hold no sequence"),
        ("scheduler", "os:system", "not a built-in policy"),
    ],
)
def test_a_header_with_sizes_or_names_that_would_do_harm_is_refused(
    loaded: Any, tmp_path: Path, name: str, value: Any, reason: str
) -> None:
    header, _, rest = loaded[0].read_bytes().partition(b"\n")
    told = orjson.loads(header)
    told["engine"][name] = value
    path = tmp_path / "hostile"
    path.write_bytes(orjson.dumps(told) + b"\n" + rest)
    with pytest.raises((RecordingError, ConfigError), match=reason):
        Replay(Recording(path)).run()


@pytest.mark.slow
def test_a_recording_with_one_wrong_value_is_refused_with_its_line_or_differs(loaded: Any, tmp_path: Path) -> None:
    """Puts every kind of value in every kind of place. Each gives an error, a difference or no effect."""
    lines = loaded[0].read_bytes().splitlines()[:60]
    dice, path = Random(3), tmp_path / "hostile"
    outcomes = {"refused": 0, "differs": 0, "same": 0}
    for _ in range(2000 if FULL else 100):
        number = dice.randrange(1, len(lines))
        told = orjson.loads(lines[number])
        spoil(told, dice)
        path.write_bytes(b"\n".join([*lines[:number], orjson.dumps(told), *lines[number + 1 :], b""]))
        try:
            replay = Replay(Recording(path)).run()
        except RecordingError as error:
            assert str(error).startswith(f"{path}:") and int(str(error).split(":")[1]) > number
            outcomes["refused"] += 1
        else:
            outcomes["same" if replay.difference is None else "differs"] += 1
    assert outcomes["refused"] > 5 and outcomes["differs"] > 5
