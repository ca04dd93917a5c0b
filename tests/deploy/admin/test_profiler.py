"""Profiles of torch's profiler: access, files and duration."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from tests.deploy.server.test_health import ADMIN, eventually, served

START, STOP = "/admin/profiler/start", "/admin/profiler/stop"


def test_there_is_none_unless_there_is_a_folder_for_it():
    async def run() -> None:
        async with served({"admin_key": ("admin-key",)}) as client:
            for path in (START, STOP):
                status, answer = await client.get(path, ADMIN, "POST")
                assert (status, answer["error"]["code"]) == (409, "no_profiler")
                assert "--profiler-dir" in answer["error"]["message"]
                assert (await client.get(path, method="POST"))[0] == 401

    asyncio.run(run())


def test_an_engine_whose_steps_run_without_torch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        async with served({"admin_key": ("admin-key",), "profiler_dir": str(tmp_path / "profiles")}) as client:
            monkeypatch.setattr("millrace.deploy.admin.profiler.WITH_TORCH", frozenset())
            status, answer = await client.get(START, ADMIN, "POST")
            assert (status, answer["error"]["code"]) == (409, "no_profiler")
            assert "runs steps without torch" in answer["error"]["message"]
            assert not list((tmp_path / "profiles").iterdir())

    asyncio.run(run())


class Instant:
    """A profiler that sees one thing."""

    def start(self) -> None: ...

    def stop(self, path: Path) -> None:
        path.write_text('{"traceEvents": []}')


@pytest.mark.slow  # it imports torch
def test_one_profile_at_a_time_is_written_to_the_folder_and_stops_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("millrace.model.profiler.TorchProfiler", Instant)
    folder = tmp_path / "profiles"

    async def run() -> None:
        async with served({"admin_key": ("admin-key",), "profiler_dir": str(folder)}) as client:
            assert (await client.get(STOP, ADMIN, "POST"))[1]["error"]["code"] == "profiler_idle"
            for seconds in ("0", "61", "x", "-1", "1.5"):
                status, answer = await client.get(f"{START}?seconds={seconds}", ADMIN, "POST")
                error = answer["error"]
                assert (status, error["code"], error["param"]) == (400, "invalid_value", "seconds")
            assert not list(folder.iterdir())
            status, started = await client.get(f"{START}?seconds=30&file=../../x", ADMIN, "POST")
            assert status == 200 and Path(started["file"]).parent == folder and started["seconds"] == 30
            status, busy = await client.get(START, ADMIN, "POST")
            assert (status, busy["error"]["code"]) == (409, "profiler_busy")
            _, written = await client.get(STOP, ADMIN, "POST")
            path = Path(written["file"])
            assert path == Path(started["file"]) and path.stat().st_size == written["num_bytes"] == 19
            assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
            _, second = await client.get(f"{START}?seconds=1", ADMIN, "POST")
            assert second["file"] != started["file"]
            is_free = lambda answer: answer[0] == 200  # noqa: E731
            await eventually(lambda: client.get(f"{START}?seconds=60", ADMIN, "POST"), is_free)  # without a stop
            assert Path(second["file"]).stat().st_size == 19
        assert [path.stat().st_size for path in folder.iterdir()] == [19] * 3  # the server's end writes what is open

    asyncio.run(run())
