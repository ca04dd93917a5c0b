"""`--mode split` from outside: the same answers and figures as in one process, and what a death of either end does."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.running import RunningServer, post_bytes, read_answer, send

COMMAND = [sys.executable, "-m", "millrace.deploy", "serve", "--port", "0", "--max-num-seqs", "32"]
TEXT = "/v1/completions"
SLOW = ("--inject", "stage=execute,delay=4ms")
WORDS = ("Once upon a time", "The dog", "Hello there, ", "A ship", "My cat is", "One day", "Zoe and Tom", "In a wood")

pytestmark = pytest.mark.slow


def serve(mode: str, *options: str) -> RunningServer:
    return RunningServer(command=[*COMMAND, "--mode", mode, *options])


@pytest.fixture(scope="module")
def inline() -> Iterator[RunningServer]:
    with serve("inline", "--admin-key", "key") as server:
        yield server


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("flights")
    with serve("split", "--admin-key", "key", "--flight-recorder-dir", str(folder)) as server:
        yield server


def asked(number: int, max_tokens: int = 40) -> dict[str, Any]:
    prompt = f"{WORDS[number % len(WORDS)]} {number // len(WORDS) or ''}".strip()
    return {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}


def whole(server: RunningServer, number: int, max_tokens: int = 40) -> str:
    answer = server.post(TEXT, asked(number, max_tokens))
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["text"])


def begin(server: RunningServer, body: dict[str, Any]) -> Any:
    """A connection on which the first bytes of a stream have arrived."""
    connection = server.connect(timeout_s=120.0)  # a successor on a busy machine takes its time
    send(connection, post_bytes(TEXT, body | {"stream": True}))
    connection.recv(1, 2)  # MSG_PEEK
    return connection


def text_of(events: list[Any]) -> str:
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in event["choices"])


def engine_pid(server: RunningServer) -> int:
    process = server.get("/server_info").json["process"]
    assert process["mode"] == "split"
    return int(process["engine_pid"])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(is_so: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.02)


BODIES: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"n": 3, "temperature": 0.9, "seed": 5},
    {"stop": ["the", "."]},
    {"structured_outputs": {"regex": "(yes|no), [a-z]{3,9}"}, "ignore_eos": False},
    {"structured_outputs": {"choice": ["red", "green"]}, "ignore_eos": False},
    {"use_beam_search": True, "n": 2},
    {"logit_bias": {"40": 50.0}, "presence_penalty": 1.0},
    {"prompt_logprobs": 1, "max_tokens": 3},
    {"echo": True, "max_tokens": 5},
    {"prompt": [[5, 6, 7], [9, 10]], "max_tokens": 6},
]


@pytest.mark.parametrize("more", BODIES, ids=lambda more: next(iter(more)))
def test_answers_are_the_same_in_both_modes(inline: RunningServer, split: RunningServer, more: dict[str, Any]) -> None:
    here, there = (server.post(TEXT, asked(0, 24) | more) for server in (inline, split))
    assert here.status == there.status == 200, (here.body, there.body)
    assert there.json["choices"] == here.json["choices"] and there.json["usage"] == here.json["usage"]


def test_embeddings_and_refusals_are_the_same_in_both_modes(inline: RunningServer, split: RunningServer) -> None:
    vectors = [server.post("/v1/embeddings", {"input": ["a", "b c"]}).json["data"] for server in (inline, split)]
    assert vectors[0] == vectors[1]
    for wrong in ({"max_tokens": -1}, {"structured_outputs": {"regex": "("}}, {"stop_token_ids": [10**6]}):
        here, there = (server.post(TEXT, asked(0) | wrong) for server in (inline, split))
        assert (here.status, here.error["message"]) == (there.status, there.error["message"]) and here.status == 400


def test_32_streams_at_once_of_which_every_other_is_cut_leave_nothing_behind(
    inline: RunningServer, split: RunningServer
) -> None:
    due = [whole(inline, number) for number in range(1, 32, 2)]

    def stream(number: int) -> str | None:
        with begin(split, asked(number, 40 if number % 2 else 1500)) as connection:
            return text_of(read_answer(connection).events()) if number % 2 else None

    with ThreadPoolExecutor(32) as pool:
        got = list(pool.map(stream, range(32)))
    assert [text for text in got if text is not None] == due
    until(lambda: split.get("/load").json["server_load"] == 0)

    def is_quiet() -> bool:
        load = split.get("/load").json
        blocks = split.get("/server_info").json["blocks"]
        return load["running"] == load["waiting"] == blocks["used"] == blocks["quarantined"] == 0

    until(is_quiet)
    assert re.search(r'requests_aborted_total\{cause="disconnect"\} (\d+)', split.get("/metrics").body.decode())


def series(server: RunningServer) -> set[str]:
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#") and "startup_seconds" not in line}


def test_metrics_stages_and_requests_are_told_alike_in_both_modes(inline: RunningServer, split: RunningServer) -> None:
    for server in (inline, split):
        assert whole(server, 3)
    assert series(split) == series(inline)
    values = dict(line.rsplit(" ", 1) for line in split.get("/metrics").body.decode().splitlines() if line[0] != "#")
    for stage in ("schedule", "allocate", "execute", "sample"):
        assert float(values[f'millrace:stage_seconds_total{{stage="{stage}",state="busy"}}']) > 0
    assert float(values['millrace:channel_items_total{edge="sample.out->detokenize.in"}']) > 0
    assert float(values['vllm:prefix_cache_queries_total{engine="0",model_name="demo"}']) > 0

    here, there = (server.get("/v1/stages").json for server in (inline, split))
    for part in ("stages", "edges"):
        assert [one["name"] for one in there[part]] == [one["name"] for one in here[part]]
    with begin(split, asked(5, 1500)):
        (row,) = split.get("/v1/requests").json["data"]
        assert (row["state"], row["stage"]) == ("running", "execute") and row["num_blocks"] >= 1
        explained = split.get(f"/v1/requests/{row['id']}/explain").json
        assert explained["detail"] == "trace"
    until(lambda: not split.get("/v1/requests").json["data"])


def test_the_trace_and_admin_routes_reach_the_engine_process(split: RunningServer) -> None:
    admin = {"Authorization": "Bearer key"}
    whole(split, 2)
    trace = split.get("/admin/trace?seconds=60", admin).body.decode()
    for name in ("schedule", "execute", "sample", "detokenize"):
        assert f'"{name}"' in trace
    freed = split.raw(post_bytes("/admin/cache/reset", {}, admin)).json
    assert freed["freed_blocks"] > 0
    written = split.raw(post_bytes("/admin/flight", {}, admin)).json["file"]
    lines = [json.loads(line) for line in Path(written).read_text().splitlines()]
    assert {line["stage"] for line in lines if line["type"] == "stage"} >= {"schedule", "sample", "detokenize"}
    assert {line["kind"] for line in lines if line["type"] == "event"} >= {"STEP_DONE", "STEP_PLANNED", "FIRST_TOKEN"}


def test_no_port_is_open_but_that_of_http(split: RunningServer) -> None:
    inodes = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        inodes |= {row[9] for row in rows if row[3] == "0A" or table.startswith("udp")}
    open_there = os.listdir(f"/proc/{engine_pid(split)}/fd")
    links = {os.readlink(f"/proc/{engine_pid(split)}/fd/{number}") for number in open_there}
    assert not {f"socket:[{inode}]" for inode in inodes} & links


def test_a_new_engine_process_continues_every_stream_and_sigterm_drains_both(
    inline: RunningServer, tmp_path: Path
) -> None:
    due = [whole(inline, number, 150) for number in range(8)]
    with serve("split", *SLOW, "--flight-recorder-dir", str(tmp_path)) as server:
        first = engine_pid(server)
        with ThreadPoolExecutor(8) as pool:
            streams = [begin(server, asked(number, 150)) for number in range(8)]
            answers = [pool.submit(read_answer, stream) for stream in streams]
            time.sleep(0.15)
            os.kill(first, signal.SIGKILL)
            until(lambda: server.get("/health/ready").status == 503, timeout_s=60.0)
            ready = server.get("/health/ready").json
            if ready["status"] != "ready":
                assert "signal 9 (SIGKILL)" in ready["reason"] and server.post(TEXT, asked(0)).status == 503
            until(lambda: server.get("/health/ready").status == 200)
            assert [text_of(answer.result().events()) for answer in answers] == due, "no token lost, none sent twice"
            for stream in streams:
                stream.close()
        assert engine_pid(server) != first and not is_alive(first)
        assert whole(server, 1, 150) == due[1]
        until(lambda: server.get("/server_info").json["blocks"]["used"] == 0)
        assert "engine_process.died" in server.errors() and "Traceback" not in server.errors()
        (flight,) = tmp_path.glob("flight-*-crash.jsonl")
        assert '"kind":"STEP_DONE"' in flight.read_text(), "what the dead process did can still be read"

        second = engine_pid(server)
        with begin(server, asked(0, 100)) as stream:
            os.kill(second, signal.SIGTERM)  # a supervisor may send it to the whole group
            server.signal(signal.SIGTERM)
            until(lambda: server.get("/health/ready").status == 503, timeout_s=60.0)
            events = read_answer(stream).events()
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0 and not is_alive(second) and "Traceback" not in server.errors()


def test_a_request_ends_after_two_engine_deaths_and_an_engine_ends_with_its_front(
    inline: RunningServer,
) -> None:
    with serve("split", *SLOW) as server, begin(server, asked(0, 1800)) as stream:
        for _ in range(2):
            until(lambda: server.get("/health/ready").status == 200)
            until(lambda: server.get("/load").json["running"] == 1)
            os.kill(engine_pid(server), signal.SIGKILL)
            until(lambda: server.get("/health/ready").status == 503, timeout_s=60.0)
        events = read_answer(stream).events()
        errors = [event for event in events[:-1] if "error" in event]
        assert len(errors) == 1 and errors[0]["error"]["code"] == "engine_died" and "error" in events[-2]
        until(lambda: server.get("/health/ready").status == 200)
        assert whole(server, 1) == whole(inline, 1)

        pid = engine_pid(server)
        with begin(server, asked(2, 1000)):
            server.process.kill()
            until(lambda: not is_alive(pid), timeout_s=60.0)
