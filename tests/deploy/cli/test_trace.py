"""The trace over HTTP, and `millrace trace`, which fetches it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from millrace.deploy.cli.main import main
from tests.deploy.server.test_health import ADMIN, served
from tests.runtime.trace_events import check_trace_events

CONFIG = {"admin_key": ("admin-key",)}
PAGE = Path(__file__).resolve().parents[3] / "deploy/docs/observability.md"


def test_the_trace_is_fetched_by_the_admin_and_holds_the_last_requests(tmp_path: Path):
    file = tmp_path / "trace.json"

    async def run() -> None:
        async with served(CONFIG) as client:
            await client.post({"prompt": "a", "max_tokens": 9}, "seen")
            command = ["trace", "--url", client.server.url, "--admin-key", "admin-key", "-o", str(file)]
            assert await asyncio.to_thread(main, command) == 0
            status, document = await client.get("/admin/trace?seconds=0.000001", ADMIN)
            assert status == 200 and not [event for event in document["traceEvents"] if event["ph"] == "b"]
            assert (await client.get("/admin/trace"))[0] == 401
            for seconds in ("0", "-1", "nan", "3601", "x"):
                status, answer = await client.get(f"/admin/trace?seconds={seconds}", ADMIN)
                assert (status, answer["error"]["param"]) == (400, "seconds")

    asyncio.run(run())
    document = json.loads(file.read_text())
    check_trace_events(document)
    assert "cmpl-seen" in {event["name"] for event in document["traceEvents"]}


def test_the_commands_of_the_page_fetch_a_trace(tmp_path: Path):
    (block,) = re.findall(r"```sh\n(millrace serve .*?)```", PAGE.read_text(), re.DOTALL)
    serve, trace = (line.split()[1:] for line in block.splitlines())
    file = tmp_path / trace[-1]

    async def run() -> None:
        async with served({"admin_key": (serve[serve.index("--admin-key") + 1],)}) as client:
            assert await asyncio.to_thread(main, [*trace[:-1], str(file), "--url", client.server.url]) == 0

    asyncio.run(run())
    assert json.loads(file.read_text())["traceEvents"]


def test_a_server_without_the_key_of_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async def run(config: dict[str, Any]) -> None:
        async with served(config) as client:
            command = ["trace", "--url", client.server.url, "--admin-key", "mine", "-o", str(tmp_path / "none")]
            assert await asyncio.to_thread(main, command) == 1

    asyncio.run(run({}))
    assert "has no admin key; start it with --admin-key" in capsys.readouterr().err
    asyncio.run(run(CONFIG))
    assert "has another admin key" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_one_line_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "trace.json"
    assert main(["trace", "--url", "http://127.0.0.1:9", "--admin-key", "k", "-o", str(file)]) == 1
    assert "returned no trace" in capsys.readouterr().err and not file.exists()
    assert main(["trace", "-o", str(file)]) == 3
    assert "--admin-key" in capsys.readouterr().err
