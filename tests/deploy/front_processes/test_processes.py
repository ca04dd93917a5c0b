"""`millrace serve --front-processes 2` as processes: kills of a front, of the engine and of the supervisor."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.bench.front_processes import measure
from tests.deploy.running import RunningServer, post_bytes

IS_FULL = bool(os.environ.get("MILLRACE_FULL"))
SETTINGS = ["--max-num-seqs", "64", "--threads", "1", "--dtype", "float32", "--num-gpu-blocks", "2048"]
MILLRACE = [sys.executable, "-m", "millrace.deploy"]
SERVE = [*MILLRACE, "serve", "--port", "0", "--front-processes", "2", *SETTINGS]
WORDS = ("Once upon a time", "The dog", "Hello there, ", "A ship", "My cat is", "One day", "Zoe and Tom", "In a wood")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the servers of a test have their private folders."""
    before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), str(tmp_path)
    yield tmp_path
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before


def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(one) for one in text.split()]


def others_of(pid: int, known: set[int]) -> set[int]:
    """The living children of a process besides the known ones."""
    return {one for one in children(pid) if one not in known and is_alive(one)}


def fronts(server: RunningServer) -> list[dict[str, Any]]:
    while True:
        try:
            found: list[dict[str, Any]] = server.get("/health").json["fronts"]
            return found
        except ConnectionError:  # the connection was one of a front that was killed
            continue


def text_of(server: RunningServer, number: int, max_tokens: int) -> str:
    body = {"prompt": WORDS[number % len(WORDS)], "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    request = post_bytes("/v1/completions", body | {"stream": True})
    events = server.raw(request, 120.0).events()  # a busy machine may take its time
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in event["choices"])


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_two_fronts_are_one_server_and_leave_nothing_behind(folder: Path) -> None:
    with RunningServer(command=SERVE) as server:
        assert server.ready["fronts"] == 2
        every = [*children(server.process.pid), server.process.pid]
        assert len(every) == 4 and len(list(folder.iterdir())) == 1
        assert len({text_of(server, 0, 12) for _ in range(4)}) == 1
        found = {server.get("/health").json["front"] for _ in range(40)}
        assert found == {0, 1}
        figures = [_generated(server.get("/metrics").body.decode()) for _ in range(8)]
        assert figures == [48.0] * 8  # at every front
        victim = next(one for one in fronts(server) if one["number"] == 0)
        os.kill(victim["pid"], signal.SIGKILL)
        until(lambda: [one["num_restarts"] for one in fronts(server)] == [1, 0])
        until(lambda: [one["state"] for one in fronts(server)] == ["ready", "ready"])
        assert _generated(server.get("/metrics").body.decode()) == 48.0
        every += children(server.process.pid)
        server.signal()
        assert server.process.wait(60.0) == 0
        until(lambda: not any(map(is_alive, every)))
    assert not list(folder.iterdir())


def _generated(metrics: str) -> float:
    (line,) = [one for one in metrics.splitlines() if one.startswith("vllm:generation_tokens_total")]
    return float(line.split()[-1])


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_streams_of_the_other_front_lose_nothing_when_one_is_killed(folder: Path) -> None:
    with RunningServer(command=SERVE) as server, ThreadPoolExecutor(100) as pool:
        due = [text_of(server, number, 300) for number in range(len(WORDS))]
        asked = [pool.submit(text_of, server, number, 300) for number in range(100)]
        until(lambda: server.get("/load").json["server_load"] >= 100)
        os.kill(fronts(server)[1]["pid"], signal.SIGKILL)
        kept = lost = 0
        for number, one in enumerate(asked):
            if (error := one.exception()) is None:
                assert one.result() == due[number % len(WORDS)]
                kept += 1
            else:
                assert isinstance(error, (OSError, AssertionError)), error
                lost += 1
        assert kept > 20 and lost > 20, (kept, lost)
        until(lambda: server.get("/load").json["running"] == 0)


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_requests_go_on_when_the_engine_is_killed(folder: Path) -> None:
    with RunningServer(command=SERVE) as server, ThreadPoolExecutor(16) as pool:
        due = [text_of(server, number, 300) for number in range(len(WORDS))]
        asked = [pool.submit(text_of, server, number, 300) for number in range(16)]
        until(lambda: server.get("/load").json["server_load"] >= 16)
        pids = {one["pid"] for one in fronts(server)}
        (engine,) = set(children(server.process.pid)) - pids
        os.kill(engine, signal.SIGKILL)
        assert [one.result() for one in asked] == due * 2


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_nothing_is_left_of_a_supervisor_that_is_killed_not_even_stopped_children(folder: Path) -> None:
    with RunningServer(command=SERVE) as server:
        every = children(server.process.pid)
        os.kill(every[-1], signal.SIGSTOP)
        server.process.kill()
        until(lambda: not any(map(is_alive, every)), 20.0)
    assert not list(folder.iterdir())


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_a_front_that_keeps_ending_ends_the_server_with_status_1(folder: Path) -> None:
    """Each is killed as soon as it is there: five starts may take more than the two minutes on a busy machine."""
    with RunningServer(command=SERVE) as server:
        stay = set(children(server.process.pid)) - {one["pid"] for one in fronts(server) if one["number"] == 1}
        for _ in range(5):
            until(lambda: bool(others_of(server.process.pid, stay)))
            (victim,) = others_of(server.process.pid, stay)
            os.kill(victim, signal.SIGKILL)
            until(lambda gone=victim: not is_alive(gone))  # type: ignore[misc]
        assert server.process.wait(120.0) == 1
        assert "front 1 is given up: it has ended 5 times in 2 minutes" in server.errors()


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 4, reason="needs 4 cores: two fronts, the engine and the clients")
def test_two_fronts_take_1_7_times_the_requests_of_one() -> None:
    found = measure(("split", "fronts-2"), ("completion",), rounds=5, seconds=2.0)["completion"]
    assert found["fronts-2"] >= 1.7 * found["split"], found


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_what_cannot_start_is_said_once_with_status_3(folder: Path) -> None:
    with RunningServer(command=[*SERVE, "--max-model-len", "99999999"], wait=False) as server:
        assert server.process.wait(60.0) == 3
        assert "max_model_len" in server.errors().splitlines()[-1]
    assert not list(folder.iterdir())
