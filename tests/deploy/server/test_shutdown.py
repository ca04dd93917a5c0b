"""Start, drain and exit, as a process manager sees them."""

from __future__ import annotations

import signal
import time

import pytest

from tests.deploy.running import RunningServer, free_port, head_bytes, post_bytes, read_answer, send

TEXT = "/v1/completions"
ENDLESS = {"eos_probability": 0.0}


def begin_stream(server: RunningServer, max_tokens: int):
    """A connection on which the first bytes of a stream have arrived."""
    connection = server.connect(timeout_s=30.0)
    send(connection, post_bytes(TEXT, {"prompt": "a", "max_tokens": max_tokens, "stream": True}))
    connection.recv(1, 2)  # MSG_PEEK
    return connection


def until_draining(server: RunningServer) -> None:
    """Waits until the server has received the signal."""
    deadline = time.monotonic() + 60.0
    while (ready := server.get("/health/ready")).status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (ready.status, ready.json["status"]) == (503, "draining")


@pytest.mark.slow
def test_sigterm_lets_what_is_under_way_finish_and_takes_nothing_new():
    with RunningServer(step_s=0.01, script=ENDLESS) as server:
        with begin_stream(server, max_tokens=150) as connection:
            server.signal(signal.SIGTERM)
            until_draining(server)
            assert server.get("/health/live").status == 200
            refused = server.post(TEXT, {"prompt": "b", "max_tokens": 1})
            assert (refused.status, refused.error["code"]) == (503, "draining")
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            events = read_answer(connection).events()
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert len("".join(event["choices"][0]["text"] for event in events[:-1]).encode()) > 100
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_lame_duck_is_not_ready_and_takes_requests_until_it_drains():
    with RunningServer(step_s=0.01, script=ENDLESS, server={"lame_duck_s": 4.0}) as server:
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        until_draining(server)
        assert time.monotonic() - began < 3.0, "told at once"
        assert server.get("/health/live").status == 200
        assert server.post(TEXT, {"prompt": "b", "max_tokens": 2}).status == 200
        assert server.process.wait(60) == 0
        assert time.monotonic() - began > 4.0


@pytest.mark.slow
def test_connections_that_clients_keep_end_with_an_answer_or_idle_before_the_drain():
    kept = {"Connection": "keep-alive"}
    with RunningServer(step_s=0.01, script=ENDLESS, server={"lame_duck_s": 1.0}) as server:
        with server.connect(timeout_s=30.0) as used, server.connect(timeout_s=30.0) as idle:
            for connection in (used, idle):
                send(connection, head_bytes("GET", "/health/live", kept))
                assert "connection" not in read_answer(connection).headers
            with begin_stream(server, max_tokens=400):
                server.signal(signal.SIGTERM)
                until_draining(server)
                send(used, post_bytes(TEXT, {"prompt": "b", "max_tokens": 2}, kept))
                answer = read_answer(used)
                assert (answer.status, answer.headers["connection"]) == (200, "close") and used.recv(1) == b""
                assert idle.recv(1) == b"", "closed without a word: its client opens another one, elsewhere"
                assert server.process.poll() is None, "the stream still runs"


@pytest.mark.slow
def test_what_outlasts_the_drain_gets_its_last_event():
    with RunningServer(step_s=0.05, script=ENDLESS, server={"shutdown_timeout_s": 0.3}) as server:
        with begin_stream(server, max_tokens=500) as connection:
            server.signal(signal.SIGTERM)
            events = read_answer(connection).events()
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "abort"
        assert len("".join(event["choices"][0]["text"] for event in events[:-1])) < 200, "of 500, in 0.3 s of 25"
        assert server.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once(number):
    with RunningServer(step_s=0.01, script=ENDLESS) as server:
        with begin_stream(server, max_tokens=500):
            server.signal(signal.SIGTERM)
            until_draining(server)
            server.signal(number)
            assert server.process.wait(20) == 1  # not 0, as after the drain, which would take 30 s


@pytest.mark.slow
def test_while_the_model_loads_the_server_says_so_and_can_be_stopped():
    port = free_port()
    with RunningServer(wait=False, load_s=60.0, server={"port": port}) as server:
        server.wait_until_listening()
        assert server.get("/health/live").status == 200
        ready = server.get("/health")
        assert (ready.status, ready.json["status"]) == (503, "loading")
        refused = server.post(TEXT, {"prompt": "a"})
        assert (refused.status, refused.error["code"]) == (503, "loading")
        assert "retry-after" in refused.headers
        server.signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_the_ready_line_names_the_port_that_was_found(server: RunningServer):
    assert server.ready["event"] == "ready"
    assert server.ready["models"] == ["scripted"]
    assert server.ready["url"] == f"http://127.0.0.1:{server.address[1]}"
    assert server.ready["pid"] == server.process.pid


@pytest.mark.slow
def test_a_unix_socket_serves_as_well(tmp_path):
    import socket

    path = tmp_path / "s"
    with RunningServer(wait=False, server={"uds": str(path)}) as server:
        assert server.process.stdout is not None
        assert f'"url":"unix:{path}"' in server.process.stdout.readline()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert read_answer(connection).status == 200
        server.signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert not path.exists()
