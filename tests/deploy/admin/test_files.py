"""`/admin/files`: what the server has written, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from millrace.deploy.admin.files import written_files
from millrace.stages.config import EngineConfig
from tests.deploy.sockets import SMALL, on_loop, serving

ADMIN = {"Authorization": "Bearer boss"}


def test_only_regular_files_with_the_names_of_the_server_are_found(tmp_path: Path):
    for name in (
        "run.rec",
        "run.rec.1",
        "run.rec.old",
        "flight-20260101T1.2Z-asked.jsonl",
        "profile-1-2.json",
        "secret",
    ):
        (tmp_path / name).write_text(name)
    (tmp_path / "flight-link.jsonl").symlink_to(tmp_path / "secret")
    (tmp_path / "profile-folder.json").mkdir()
    found = written_files(EngineConfig(record=str(tmp_path / "run.rec")), str(tmp_path), str(tmp_path))
    assert sorted((file.path.name, file.kind, file.num_bytes) for file in found) == [
        ("flight-20260101T1.2Z-asked.jsonl", "flight", 32),
        ("profile-1-2.json", "profile", 16),
        ("run.rec", "recording", 7),
        ("run.rec.1", "recording", 9),
    ]
    assert [*written_files(None, str(tmp_path / "none"), None)] == []


@on_loop
async def test_files_are_listed_and_fetched_with_the_admin_key_only(tmp_path: Path):
    (tmp_path / "flights").mkdir()
    (tmp_path / "flights" / "flight-1.jsonl").write_text('{"type":"flight"}\n')
    (tmp_path / "secret").write_text("secret")
    options: dict[str, Any] = {"admin_key": ("boss",), "flight_recorder_dir": str(tmp_path / "flights")}
    async with serving(engine=SMALL, **options) as running:
        url = f"{running.server.url}/admin/files"
        async with running.http.get(url) as answer:
            assert answer.status == 401
        async with running.http.get(url, headers=ADMIN) as answer:
            (file,) = (await answer.json())["data"]
            assert (file["name"], file["kind"], file["num_bytes"]) == ("flight-1.jsonl", "flight", 18)
        async with running.http.get(f"{url}/flight-1.jsonl", headers=ADMIN) as answer:
            assert await answer.read() == b'{"type":"flight"}\n'
            assert answer.headers["Content-Disposition"] == 'attachment; filename="flight-1.jsonl"'
        for name in ("secret", "../secret", "..%2fsecret", "flight-2.jsonl"):
            async with running.http.get(f"{url}/{quote(name, safe='%')}", headers=ADMIN) as answer:
                assert answer.status == 404 and "secret" not in (await answer.text()).replace(name, "").split("'")[0]


@pytest.mark.parametrize("server", [{}, {"api_key": ("k",)}])
@on_loop
async def test_without_an_admin_key_there_are_no_files(server: dict[str, Any]):
    async with serving(**server) as running:
        headers = {"Authorization": "Bearer k"}
        async with running.http.get(f"{running.server.url}/admin/files", headers=headers) as answer:
            assert answer.status == 404
