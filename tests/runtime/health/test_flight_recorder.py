"""Flight files: what is in them, what never is, and that they stay few."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from millrace.runtime.health import flight_recorder as flight
from millrace.runtime.health.flight_recorder import MAX_FILES, FlightRecorder, stack_of
from millrace.runtime.pipeline import Pipeline
from millrace.stages import SamplingParams
from millrace.stages.messages import Prompt, Request
from millrace.stages.testing.scripted.engine import scripted_engine

SECRET = "nobody-may-read-this"


class Poison:
    """Raises when it is inspected."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was inspected")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_queued_is_told_by_kind_and_id_and_not_by_what_it_says(tmp_path: Path):
    async def run() -> Path | None:
        async with scripted_engine() as engine:
            door = engine.pipeline.channels["intake.in"]
            for i in range(100):
                request = Request(f"request {i}", (Prompt(text=SECRET),), SamplingParams(stop=(SECRET,)))
                assert door.try_send(request) == (i < door.capacity)
            path = FlightRecorder(tmp_path).write("test", engine.pipeline, why="because")
            door.recv_all()
            door.try_send(Poison())
            assert FlightRecorder(tmp_path).write("poison", engine.pipeline) is not None
            door.recv_all()
            return path

    path = asyncio.run(run())
    assert path is not None and SECRET not in path.read_text()
    lines = lines_of(path)
    assert (lines[0]["type"], lines[0]["reason"], lines[0]["why"]) == ("flight", "test", "because")
    (door,) = [line for line in lines if line.get("edge") == "intake.in"]
    assert door["depth"] == door["capacity"] == 64 and len(door["items"]) == flight.MAX_ITEMS
    assert door["items"][1] == {"kind": "Request", "request_id": "request 1", "first_sequence_id": -1}


def test_the_trace_goes_back_so_many_seconds_and_so_many_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def run(last_s: float) -> list[dict[str, Any]]:
        async with scripted_engine() as engine:
            async for _ in engine.generate([97], SamplingParams(max_tokens=20, ignore_eos=True)):
                pass
            await asyncio.sleep(0.15)
            engine.pipeline.tracer.emit(4, engine.pipeline.tracer.source("late"))
            path = FlightRecorder(tmp_path, last_s).write("test", engine.pipeline)
            assert path is not None
            return [line for line in lines_of(path) if line["type"] == "event" and line["kind"] != "EDGE_DEPTH"]

    assert [event["source"] for event in asyncio.run(run(last_s=0.1)) if event["kind"] == "STALL"] == ["late"]
    assert not [event for event in asyncio.run(run(last_s=0.1)) if event["kind"].startswith("STEP")]
    assert [event for event in asyncio.run(run(last_s=60)) if event["kind"].startswith("STEP")]
    monkeypatch.setattr(flight, "MAX_EVENTS", 5)
    assert len(asyncio.run(run(last_s=60))) <= 5


def test_files_stay_few_and_a_crash_that_goes_on_crashing_writes_one(tmp_path: Path):
    recorder = FlightRecorder(tmp_path)
    written = [recorder.write(f"reason{i}", None) for i in range(MAX_FILES + 4)]
    assert sorted(tmp_path.iterdir()) == written[4:]
    assert recorder.write("reason0", None) is None
    assert len(list(tmp_path.iterdir())) == MAX_FILES
    (other := tmp_path / "notes.txt").write_text("not ours")
    recorder.write("one more", None)
    assert other.exists()


def test_a_folder_that_cannot_be_written_raises_in_the_caller(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        FlightRecorder(tmp_path / "file").write("test", Pipeline())


def test_the_stack_of_an_error_says_where_and_nothing_else():
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        (place,) = stack_of(error)
    assert "test_flight_recorder.py" in place and SECRET not in place
