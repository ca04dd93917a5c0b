"""`millrace engine` and `millrace route` as processes on loopback: the fleet's key, and ends of either side."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.cli.machines.strangers import listening_ports, received
from tests.deploy.running import ROOT, RunningServer, free_port
from tests.deploy.test_split import until

IS_FULL = bool(os.environ.get("MILLRACE_FULL"))
MILLRACE = [sys.executable, "-m", "millrace.deploy"]
SETTINGS = ["--max-num-seqs", "16", "--threads", "1", "--dtype", "float32"]
LABEL = ["--label", "version=v2"]
TEXT = "/v1/completions"
WORDS = ("Once upon a time", "The dog", "Hello there, ", "A ship", "My cat is", "One day", "Zoe and Tom", "In a wood")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class EngineCommand:
    """One `millrace engine` process. A context manager that kills it."""

    def __init__(self, key: Path, port: int = 0, more: Sequence[str] = ()) -> None:
        fleet = ["--listen", f"127.0.0.1:{port}", "--fleet-key-file", str(key), "--metrics-port", "0", *LABEL]
        self.process = subprocess.Popen(
            [*MILLRACE, "engine", *fleet, *SETTINGS, *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self.pages = ""

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = json.loads(self.process.stdout.readline())
        self.address, self.pages = line["listen"], line["metrics"]

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def page(self, path: str) -> tuple[int, str]:
        """Status and body of one of its pages."""
        host, _, port = self.pages.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), 10.0) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: a\r\n\r\n".encode())
            data = b""
            while part := connection.recv(1 << 16):
                data += part
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()

    def __enter__(self) -> EngineCommand:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet") / "fleet.key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def engine(key: Path) -> Iterator[EngineCommand]:
    with EngineCommand(key) as one:
        one.wait_until_ready()
        yield one


def route(key: Path, *engines: EngineCommand, wait: bool = True, num_fronts: int = 1) -> RunningServer:
    named = [word for one in engines for word in ("--engine", one.address)]
    flags = ["--port", "0", "--fleet-key-file", str(key), "--front-processes", str(num_fronts)]
    return RunningServer(wait=wait, command=[*MILLRACE, "route", *flags, *named])


def asked(number: int, max_tokens: int) -> dict[str, Any]:
    return {"prompt": WORDS[number % len(WORDS)], "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}


def text_of(server: RunningServer, number: int, max_tokens: int = 40) -> str:
    answer = server.post(TEXT, asked(number, max_tokens))
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["text"])


def test_a_route_answers_through_an_engine_and_both_end_on_sigterm(key: Path, engine: EngineCommand) -> None:

    def refused(data: bytes) -> bool:
        with socket.create_connection(engine.host_and_port, 10.0) as stranger:
            stranger.sendall(data)
            return len(received(stranger)) <= 32  # a nonce at most

    with ThreadPoolExecutor(3) as pool:  # each is waited for until its time is up
        assert all(pool.map(refused, (b"GET / HTTP/1.1\r\n\r\n", bytes(64), os.urandom(1000))))
    assert listening_ports(engine.process.pid) == {engine.host_and_port[1], int(engine.pages.rpartition(":")[2])}
    with route(key, engine) as server:
        assert listening_ports(server.process.pid) == {server.address[1]}
        first = text_of(server, 0)
        assert first and text_of(server, 0) == first
        assert server.post(TEXT, asked(0, 4)).headers["x-millrace-attempts"] == "1"
        at_rest = {"status": "ready", "fronts": 1, "requests": 0, "labels": {"version": "v2"}}
        until(lambda: json.loads(engine.page("/health")[1]) == at_rest)
        assert engine.page("/health")[0] == 200
        pages = engine.page("/metrics")[1], server.get("/metrics").body.decode()
        assert (
            "\nmillrace:fronts 1.0\n" in pages[0] and '\nmillrace:engine_labels{label_version="v2"} 1.0\n' in pages[0]
        )
        assert f'address="{engine.address}",engine="0",label_version="v2"' in pages[1]
        server.signal()
        assert server.process.wait(20.0) == 0
    until(lambda: json.loads(engine.page("/health")[1])["fronts"] == 0)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(20.0) == 0


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_a_wrong_key_is_refused_with_the_flag_that_sets_it(key: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.key"
    other.write_bytes(b"x" * 32)
    other.chmod(0o600)
    with EngineCommand(key) as one:
        one.wait_until_ready()
        with route(other, one, wait=False) as server:
            assert server.process.wait(60.0) == 3
            assert "--fleet-key-file" in server.errors()


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_engines_and_fronts_may_be_killed_in_turns_and_streams_lose_nothing(key: Path) -> None:
    ports = [free_port(), free_port()]
    with EngineCommand(key, ports[0]) as a, EngineCommand(key, ports[1]) as b:
        a.wait_until_ready()
        b.wait_until_ready()
        with route(key, a, b) as stays, route(key, b, a) as dies, ThreadPoolExecutor(16) as pool:
            due = list(pool.map(lambda number: text_of(stays, number, 400), range(8)))
            ours = [pool.submit(text_of, stays, number, 400) for number in range(8)]
            dying = [pool.submit(text_of, dies, number, 400) for number in range(8)]
            until(lambda: json.loads(a.page("/health")[1])["requests"] > 0)
            dies.process.kill()
            until(lambda: json.loads(a.page("/health")[1])["fronts"] == 1)
            assert [one.result() for one in ours] == due
            for one in dying:
                one.exception()
            ours = [pool.submit(text_of, stays, number, 400) for number in range(8)]
            until(lambda: json.loads(a.page("/health")[1])["requests"] > 0)
            a.process.kill()
            assert [one.result() for one in ours] == due
            with EngineCommand(key, ports[0]) as again:
                again.wait_until_ready()
                until(lambda: json.loads(again.page("/health")[1])["fronts"] == 1)
                assert [text_of(stays, number, 400) for number in range(8)] == due


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_an_engine_in_a_file_is_drained_by_its_address_and_its_streams_go_on(key: Path, tmp_path: Path) -> None:
    named, admin = tmp_path / "engines", {"Authorization": "Bearer admin"}
    with EngineCommand(key) as a, EngineCommand(key) as b, ThreadPoolExecutor(8) as pool:
        a.wait_until_ready()
        b.wait_until_ready()
        named.write_text(f"{a.address}\n")
        flags = ["--port", "0", "--admin-key", "admin", "--engine", f"file:{named}", "--fleet-key-file", str(key)]
        with RunningServer(command=[*MILLRACE, "route", *flags]) as server:
            due = list(pool.map(lambda number: text_of(server, number, 200), range(4)))
            ours = [pool.submit(text_of, server, number, 200) for number in range(4)]
            until(lambda: json.loads(a.page("/health")[1])["requests"] == 4)
            answer = server.get(f"/admin/engines/{a.address}/drain?by=migrate", admin, "POST")
            assert (answer.status, answer.json["state"], answer.json["address"]) == (200, "draining", a.address)
            until(lambda: server.get("/health/ready").status == 503)
            (tmp_path / "new").write_text(f"{b.address}\n")
            (tmp_path / "new").rename(named)
            assert a.process.wait(60.0) == 0
            assert [one.result() for one in ours] == due
            assert server.get("/health/ready").json == {"status": "ready"}


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
@pytest.mark.parametrize("num_fronts", [1, 2])
def test_the_openai_client_talks_to_a_route_unchanged(key: Path, num_fronts: int) -> None:
    openai = pytest.importorskip("openai")
    with EngineCommand(key) as a, EngineCommand(key) as b:
        a.wait_until_ready()
        b.wait_until_ready()
        with route(key, a, b, num_fronts=num_fronts) as server:
            texts, messages = set(), [{"role": "user", "content": "Hello"}]
            for _ in range(12):  # each over a connection of its own, to any front
                with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                    (model,) = client.models.list().data
                    asked = {"model": model.id, "messages": messages, "max_tokens": 8, "temperature": 0.0}
                    parts = [one.choices[0] for one in client.chat.completions.create(stream=True, **asked)]
                    whole = client.chat.completions.create(**asked).choices[0].message.content
                    assert "".join(part.delta.content or "" for part in parts) == whole and len(parts) > 1
                    made = client.responses.create(model=model.id, input="Hello", max_output_tokens=8)
                    assert client.responses.retrieve(made.id).output_text == made.output_text
                    texts.add(whole)
            assert len(texts) == 1
            if num_fronts > 1:
                assert {server.get("/health").json["front"] for _ in range(40)} == {0, 1}
            for one in (a, b):
                assert json.loads(one.page("/health")[1])["fronts"] == num_fronts


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_streams_of_two_fronts_on_one_port_go_on_when_an_engine_is_killed(key: Path) -> None:
    with EngineCommand(key) as a, EngineCommand(key) as b:
        a.wait_until_ready()
        b.wait_until_ready()
        with route(key, a, b, num_fronts=2) as server, ThreadPoolExecutor(16) as pool:
            due = list(pool.map(lambda number: text_of(server, number, 400), range(8)))
            asked = [pool.submit(text_of, server, number, 400) for number in range(16)]
            until(lambda: json.loads(a.page("/health")[1])["requests"] > 0)
            a.process.kill()
            assert [one.result() for one in asked] == due * 2


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_two_models_behind_one_port_are_answered_by_their_own_engines(key: Path) -> None:
    with EngineCommand(key, more=["--served-model-name", "small"]) as a, EngineCommand(key) as b:
        for one in (a, b):
            one.wait_until_ready()
        flags = [*MILLRACE, "route", "--port", "0", "--fleet-key-file", str(key)]
        named = ["--engine", f"small={a.address}", "--engine", f"large={b.address}"]
        with RunningServer(command=[*flags, *named]) as server:
            assert {row["id"] for row in server.get("/v1/models").json["data"]} == {"small", "large"}
            for _ in range(4):  # each over a connection of its own, to either front
                for name in ("small", "large"):
                    answer = server.post(TEXT, asked(0, 4) | {"model": name})
                    assert (answer.status, answer.json["model"]) == (200, name)
            unknown = server.post(TEXT, asked(0, 4) | {"model": "other"})
            assert unknown.status == 404 and "the models are small, large" in unknown.json["error"]["message"]
            assert all(json.loads(one.page("/health")[1])["fronts"] == 1 for one in (a, b))
        wrong = ["--engine", f"large={a.address}", "--engine", f"small={b.address}"]
        with RunningServer(wait=False, command=[*flags, *wrong]) as server:
            assert server.process.wait(60.0) == 3
            assert "an engine there serves small, and not large" in server.errors()
