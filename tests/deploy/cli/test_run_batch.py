"""A file of requests and the file of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from millrace.deploy.cli import run_batch
from millrace.deploy.cli.batch_file import READ_AHEAD, BadBatchLine, BatchLine, LineReader, parse
from millrace.deploy.cli.main import main
from tests.counts import FULL
from tests.deploy.running import ROOT, RunningServer, heeds_interrupts

MIB = 1024 * 1024
CACHED = ("prompt_tokens_details", "input_tokens_details")  # the second request finds the first one's prefix
COMPLETION = {"prompt": "Once", "max_tokens": 6, "temperature": 0}


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or COMPLETION})


def run_file(folder: Path, lines: list[str], *arguments: str) -> tuple[int, dict[str | None, Any]]:
    """Exit code, and the answers by custom_id."""
    source, sink = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(lines) + "\n")
    code = main(["run-batch", "-i", str(source), "-o", str(sink), *arguments])
    answers = [json.loads(text) for text in sink.read_text().splitlines()]
    assert all(set(answer) == {"id", "custom_id", "response", "error"} for answer in answers)
    assert len({answer["id"] for answer in answers}) == len(answers)
    return code, {answer["custom_id"]: answer for answer in answers}


# -- what is answered


@pytest.mark.slow
def test_each_kind_of_request_is_answered_as_the_server_answers_it(server: RunningServer, tmp_path, capfd):
    bodies = {
        "/v1/completions": COMPLETION,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0},
        "/v1/embeddings": {"input": ["x", "y"]},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 16, "temperature": 0},
        "/score": {"text_1": "Hi", "text_2": ["a", "b"]},
        "/rerank": {"query": "Hi", "documents": ["a", "b"]},
    }
    code, answers = run_file(tmp_path, [line(url, url, **body) for url, body in bodies.items()], "--url", server.url)
    assert code == 0 and set(answers) == set(bodies)
    for url, body in bodies.items():
        response = answers[url]["response"]
        assert (response["status_code"], answers[url]["error"]) == (200, None) and response["request_id"]
        assert without_ids(response["body"]) == without_ids(server.post(url, body).json)
    assert capfd.readouterr().err.endswith("6 answered, 0 failed\n")


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(part) for part in value]
    if isinstance(value, dict):
        left = value.keys() - {"id", "created", "created_at", "completed_at", *CACHED}
        return {name: without_ids(value[name]) for name in left}
    return value


@pytest.mark.slow
def test_what_is_wrong_with_one_line_stays_with_it(server: RunningServer, tmp_path, capfd):
    lines = [line("good"), "no json", "", line("refused", prompt="x", max_tokens=-1), line("elsewhere", "/admin/x")]
    code, answers = run_file(tmp_path, [*lines, line("last")], "--url", server.url + "/v1/")
    assert code == 1
    assert {name for name, answer in answers.items() if answer["response"] is None} == {None, "elsewhere"}
    assert answers[None]["error"]["code"] == "invalid_json_line" and "line 2 " in answers[None]["error"]["message"]
    assert answers["elsewhere"]["error"]["code"] == "invalid_url"
    refused = answers["refused"]["response"]
    assert refused["status_code"] == 400 and "max_tokens" in refused["body"]["error"]["message"]
    assert answers["good"]["response"]["body"]["choices"] == answers["last"]["response"]["body"]["choices"]
    assert capfd.readouterr().err.endswith("2 answered, 3 failed\n")


@pytest.mark.parametrize(
    ("data", "code", "custom_id"),
    [
        (None, "line_too_long", None),
        (b"\xff", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"{}", "invalid_request_line", None),
        (b'{"custom_id": 3}', "invalid_request_line", None),
        (b'{"custom_id": "a", "method": "GET"}', "invalid_method", "a"),
        (b'{"custom_id": "a", "url": "/v1/files"}', "invalid_url", "a"),
        (b'{"custom_id": "a", "url": ["/score"]}', "invalid_url", "a"),
        (b'{"custom_id": "a", "url": "/score"}', "invalid_request_line", "a"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "invalid_request_line", "a"),
        (b'{"custom_id": "a", "url": "/v1/responses", "body": {"background": true}}', "invalid_request_line", "a"),
    ],
)
def test_a_line_that_asks_nothing_is_told_what_is_wrong(data, code, custom_id):
    with pytest.raises(BadBatchLine) as caught:
        parse(BatchLine(7, data), 100)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    assert "line 7" in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_first_line():
    assert parse(BatchLine(1, b"\xef\xbb\xbf" + line("a").encode()), 1000).custom_id == "a"


# -- reading


def read(data: bytes, max_bytes: int) -> list[BatchLine]:
    async def collect() -> list[BatchLine]:
        return [each async for each in LineReader(io.BytesIO(data), max_bytes)]

    return asyncio.run(collect())


def test_a_line_that_is_too_long_is_passed_over_and_the_next_is_whole():
    long = b"x" * 200_000
    lines = read(b"1234\n" + long + b"\n\n \r\n12345\nend", 5)
    assert [(each.number, each.data) for each in lines] == [(1, b"1234\n"), (2, None), (5, None), (6, b"end")]
    assert [each.data for each in read(long, 5)] == [None] and read(b"", 5) == []


def test_several_who_read_get_each_line_once():
    async def collect() -> list[int]:
        reader = LineReader(io.BytesIO(b"x\n" * 500), 10)
        found: list[int] = []

        async def one() -> None:
            async for each in reader:
                found.append(each.number)
                await asyncio.sleep(0)

        await asyncio.gather(*(one() for _ in range(7)))
        return found

    assert sorted(asyncio.run(collect())) == list(range(1, 501))


def test_the_file_is_read_no_further_than_the_window_needs():
    taken = 0

    class Endless(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            nonlocal taken
            taken += 1
            return line(str(taken)).encode() + b"\n"

    async def hold(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def check(session: aiohttp.ClientSession, url: str) -> None:
        batch = run_batch.BatchRun(session, url, io.BytesIO(), MIB)
        running = asyncio.create_task(batch.run(LineReader(Endless(), MIB), 5))
        async with asyncio.timeout(60.0):
            while taken < 5:  # noqa: ASYNC110 - by a thread
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert taken <= 5 + READ_AHEAD + 1
        (reading,) = [thread for thread in threading.enumerate() if thread.name == "millrace-batch-lines"]
        running.cancel()
        await asyncio.wait([running])
        reading.join(60.0)
        assert not reading.is_alive() and taken <= 5 + READ_AHEAD + 2

    with_fake_server(hold, check)


def test_an_unreadable_file_is_reported_and_keeps_the_written_answers(server: RunningServer, tmp_path, capfd):
    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            if data := super().readline(size):
                return data
            raise OSError("the disk is gone")

    sink = tmp_path / "out"
    target = run_batch.at_server(server.url, ())
    source = Broken(line("a").encode() + b"\n")
    assert asyncio.run(run_batch.answer_lines(target, source, sink.open("wb"), 1, MIB)) == 1
    assert json.loads(sink.read_text())["custom_id"] == "a"
    assert "the disk is gone" in capfd.readouterr().err


# -- a server that is busy, or away


def with_fake_server(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    check: Callable[[aiohttp.ClientSession, str], Awaitable[None]],
) -> None:
    @contextlib.asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def go() -> None:
        async with serving() as url, run_batch.at_server(url, ("key",)) as (session, base):
            await check(session, base)

    asyncio.run(go())


def answers_of(handler: Any, num_lines: int, window: int) -> list[Any]:
    sink = io.BytesIO()

    async def check(session: aiohttp.ClientSession, url: str) -> None:
        data = "\n".join(line(str(number)) for number in range(num_lines)).encode()
        await run_batch.BatchRun(session, url, sink, MIB).run(LineReader(io.BytesIO(data), MIB), window)

    with_fake_server(handler, check)
    return [json.loads(text) for text in sink.getvalue().splitlines()]


def test_never_more_than_the_window_is_under_way():
    live, most = 0, 0

    async def count(request: web.Request) -> web.Response:
        nonlocal live, most
        assert request.headers["Authorization"] == "Bearer key"
        live += 1
        most = max(most, live)
        await asyncio.sleep(0.002)
        live -= 1
        return web.json_response({})

    assert len(answers_of(count, 50, 8)) == 50 and most == 8


def test_a_full_house_is_waited_for_as_long_as_it_takes():
    num_asked = 0

    async def full(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= 20:
            return web.json_response({}, status=429, headers={"Retry-After": "0"})
        return web.json_response({"answer": 1})

    (answer,) = answers_of(full, 1, 1)
    assert num_asked == 21 and answer["response"]["status_code"] == 200


def test_an_unreachable_server_is_given_up_after_some_retries(monkeypatch):
    monkeypatch.setattr(run_batch, "PAUSES_S", (0.0, 0.0))
    num_asked = 0

    async def cut(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    first, second = answers_of(cut, 2, 1)
    assert num_asked == 6
    assert first["error"]["code"] == second["error"]["code"] == "server_unreachable"


def test_a_server_that_is_not_ready_yet_is_asked_again_and_any_answer_is_kept(monkeypatch):
    monkeypatch.setattr(run_batch, "PAUSES_S", (0.0, 0.0))
    statuses = iter((503, 503, 200, 503, 503, 503))

    async def load(request: web.Request) -> web.Response:
        return web.Response(status=next(statuses), text="no JSON", headers={"Retry-After": "0"})

    first, second = answers_of(load, 2, 1)
    assert [answer["response"]["status_code"] for answer in (first, second)] == [200, 503]
    assert first["response"]["body"] == "no JSON"


# -- at a terminal


@pytest.mark.slow
def test_unusable_files_are_reported_before_the_model_is_loaded(tmp_path, capfd):
    there = tmp_path / "in.jsonl"
    there.write_text(line("a") + "\n")
    for source, sink, told in (
        (tmp_path / "none", tmp_path / "out", "No such file"),
        (there, tmp_path, "Is a directory"),
        (there, there, "is also the input file"),
    ):
        assert main(["run-batch", "-i", str(source), "-o", str(sink)]) == 3
        assert told in capfd.readouterr().err
    assert there.read_text() == line("a") + "\n"
    assert main(["run-batch", "-i", str(there), "-o", "-", "--max-concurrency", "0"]) == 3


@pytest.mark.slow
def test_an_existing_file_stays_until_there_is_a_model_and_is_overwritten_then(
    server: RunningServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = tmp_path / "out.jsonl"
    sink.write_text("the answers of yesterday\n")
    (tmp_path / "in.jsonl").write_text(line("a") + "\n")
    command = ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(sink)]
    assert main([*command, "--model", str(tmp_path / "no-model")]) == 3
    assert "there is no such file or folder" in capfd.readouterr().err
    assert sink.read_text() == "the answers of yesterday\n"
    code, answers = run_file(tmp_path, [line("b")], "--url", server.url)
    assert code == 0 and set(answers) == {"b"}


def test_an_interrupt_keeps_what_was_answered(server: RunningServer):
    command = [sys.executable, "-m", "millrace.deploy", "run-batch", "-i", "-", "-o", "-", "--url", server.url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, preexec_fn=heeds_interrupts) as process:  # type: ignore[call-overload]
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(line("a").encode() + b"\n")
        process.stdin.flush()  # and it stays open: there may be more lines
        assert json.loads(process.stdout.readline())["custom_id"] == "a"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        told = process.stderr.read()
        assert b"1 answered, 0 failed" in told and b"Traceback" not in told


@pytest.mark.slow
def test_memory_stays_flat_however_long_the_file():
    num_lines, padding = (20_000, 8_192) if FULL else (120, 200_000)
    command = [sys.executable, "-m", "tests.deploy.batch_memory", "--lines", str(num_lines), "--padding", str(padding)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["answers"] == num_lines and figures["input_mib"] > 20
    assert figures["end_mib"] - figures["early_mib"] < 8
