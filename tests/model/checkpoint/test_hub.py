"""Finding a model: bundled, local, cached; and offline without a socket."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.model.checkpoint import hub
from millrace.model.checkpoint.hub import bundled_model_path, model_name, resolve
from millrace.model.checkpoint.hub_sizes import check_disk, has_all_weights, weights_below
from millrace.model.errors import CheckpointError, DownloadError
from millrace.model.similar_models import similar_model


@pytest.fixture
def no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread may open a socket, except threads of other tests, whose fixtures may still be alive."""
    others = set(threading.enumerate()) - {threading.current_thread()}

    def guard(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            assert threading.current_thread() in others, "a socket was opened"
            return call(*args, **kwargs)

        return guarded

    monkeypatch.setattr(socket.socket, "connect", guard(socket.socket.connect))
    monkeypatch.setattr(socket, "getaddrinfo", guard(socket.getaddrinfo))


def test_no_name_and_demo_are_the_bundled_model() -> None:
    assert resolve(None) == resolve("demo") == bundled_model_path()
    assert bundled_model_path().parts[-2:] == ("demo", "weights")


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("qwen3", "qwen3"),
        ("a/b.c/", "b.c"),
        ("models--owner--name-1/snapshots/0123abcd", "owner/name-1"),
        ("x/../y", "y"),
    ],
)
def test_a_folder_is_named_without_the_path_to_it(folder: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / folder).mkdir(parents=True)
    assert model_name(str(tmp_path / folder)) == name


def test_other_models_have_the_names_they_are_asked_for_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert [model_name(model) for model in (None, "demo", "owner/name")] == ["demo", "demo", "owner/name"]
    assert model_name(".") == tmp_path.name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("owner/name", ("owner/name", None, "")),
        ("owner/name@v1.0", ("owner/name", "v1.0", "")),
        ("hf://owner/name", ("owner/name", None, "")),
        ("hf://owner/name@refs-1", ("owner/name", "refs-1", "")),
        ("hf://owner/name@0123abc/a/b.gguf", ("owner/name", "0123abc", "a/b.gguf")),
        ("hf://owner/name/sub", ("owner/name", None, "sub")),
        ("no/such/directory", ("no/such/directory", None, "")),
    ],
)
def test_an_address_of_the_hub_has_id_revision_and_path(name: str, found: tuple[str, str | None, str]) -> None:
    assert hub._hub_address(name, None) == found
    assert hub._hub_address(name, found[1] or "main") == (found[0], found[1] or "main", found[2])


def test_two_revisions_are_refused(no_socket: None) -> None:
    with pytest.raises(DownloadError, match="owner/name@v1: the name and the setting revision = v2 differ"):
        resolve("owner/name@v1", revision="v2", offline=True)
    with pytest.raises(DownloadError, match="stream is for https://, s3://, gs:// and az://; leave it out"):
        resolve("owner/name", streams=True)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("https://example.org/a/m-1/", "m-1"),
        ("s3://bucket/x/m.Q4_0.gguf", "m.Q4_0"),
        ("hf://owner/name@v1/sub", "owner/name"),
    ],
)
def test_a_model_elsewhere_is_named_by_the_end_of_its_address(model: str, name: str) -> None:
    assert model_name(model) == name


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file; name the directory"):
        resolve(str(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("name", ["no/such/directory", "/no/such", "../x", "a b", "", "a" * 300, "x\ny"])
def test_what_can_be_neither_directory_nor_id_is_said_so(name: str, no_socket: None) -> None:
    with pytest.raises(DownloadError, match="not the form of a Hub id"):
        resolve(name)


@pytest.mark.parametrize("by_variable", [True, False])
def test_offline_says_what_to_do_and_opens_no_socket(
    by_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_socket: None
) -> None:
    if by_variable:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="owner/name at revision v1: not in the cache, and offline mode"):
        resolve("owner/name", revision="v1", download_dir=tmp_path, offline=not by_variable)


def test_offline_finds_what_the_cache_has(tmp_path: Path, no_socket: None) -> None:
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert resolve("owner/name", download_dir=tmp_path, offline=True) == snapshot


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(300_000),
    "pytorch_model.bin": b"never fetched",
    "README.md": b"never fetched",
}

DOWNLOAD = """
import sys
from pathlib import Path
from millrace.model.errors import DownloadError
from millrace.model.checkpoint.hub import resolve
seen = []
try:
    report = lambda done, total: seen.append((done, total))
    check = lambda root, num_bytes: print(sorted(file.name for file in root.iterdir()), num_bytes)
    path = resolve(sys.argv[1], download_dir=Path(sys.argv[2]), on_progress=report, check_weights=check)
    print(sorted(file.name for file in path.iterdir()), seen[-1])
except DownloadError as error:
    print("DownloadError:", error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub that a snapshot download uses: one model at one commit."""

    commit = "c" * 40

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.rsplit("/", 1)[-1]
        if not path.removeprefix("/api/models").startswith("/owner/name"):
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            self.reply(200, FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": self.commit})
        elif "/tree/" in path:
            tree = [{"type": "file", "path": name, "size": len(raw), "oid": name} for name, raw in FILES.items()]
            self.reply(200, json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": name, "size": len(raw)} for name, raw in FILES.items()]
            self.reply(200, json.dumps({"id": "owner/name", "sha": self.commit, "siblings": siblings}).encode())

    do_HEAD = do_GET

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/name", "['config.json'] 300000\n['config.json', 'model.safetensors'] (300000, 300000)"),
        ("owner/other", "DownloadError: owner/other: no such directory here and no such model on the Hub"),
    ],
)
def test_a_download_fetches_what_is_needed_and_reports_bytes(name: str, said: str, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    try:
        command = [sys.executable, "-c", DOWNLOAD, name, str(tmp_path)]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    finally:
        server.shutdown()
        server.server_close()
    assert out.stdout.startswith(said), out.stdout + out.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["owner/name", "owner/name:Q4_K_M"])
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"HF_ENDPOINT": "nonsense"}, "download failed: Request URL is missing"),
        ({"HF_ENDPOINT": "https://127.0.0.1:9", "HTTPS_PROXY": "ftp://x"}, "Unknown scheme for proxy"),
    ],
    ids=["no address", "proxy"],
)
def test_a_hub_that_cannot_be_asked_is_one_line_with_the_reason(
    variables: dict[str, str], said: str, name: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"} | variables
    command = [sys.executable, "-c", DOWNLOAD, name, str(tmp_path)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert out.stdout.startswith("DownloadError: owner/name: ") and said in out.stdout, out.stdout + out.stderr


def test_a_hub_without_an_answer_is_told_with_the_model_that_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import errors

    def unreachable(*args: Any, **options: Any) -> Any:
        raise errors.HTTPError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(DownloadError, match="demoo: download failed: Name or service not known; run again"):
        resolve("demoo", download_dir=tmp_path)


@pytest.mark.parametrize("name", ["no/such-model", "no/such-model:Q4_K_M"])
def test_a_hub_that_cannot_be_reached_is_asked_once_and_told_with_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits {seconds} s to ask again")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nothing listens
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("time.sleep", sleep)
        with pytest.raises(DownloadError, match="cannot be reached: .*refused.*local directory.*HF_HUB_OFFLINE=1"):
            resolve(name, download_dir=tmp_path, check_weights=lambda folder, num_bytes: None)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("dmeo", "demo"),
        ("Demo", "demo"),
        ("models/qwen3", "models/qwen3-a"),
        ("models/qwen3-a.ggf", "models/qwen3-a.gguf"),
        ("Owner/name-1b", "owner/Name-1B"),
        ("models/empt", None),
        ("gpt2", None),
        ("a" * 5000, None),
        ("x\0y", None),
    ],
)
def test_a_name_that_leads_nowhere_names_the_model_here_that_is_most_like_it(
    name: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("models/qwen3-a", "models/empty", "cache/models--owner--Name-1B"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models/qwen3-a/config.json").touch()
    (tmp_path / "models/qwen3-a.gguf").touch()
    assert similar_model(name, tmp_path / "cache") == ("" if meant is None else f" (did you mean {meant}?)")
    with pytest.raises(DownloadError) as caught:
        resolve(name, download_dir=tmp_path / "cache", offline=True)
    assert meant is None or f"(did you mean {meant}?)" in str(caught.value)


def test_a_download_that_the_disk_has_no_room_for_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2_500_000_000))
    (tmp_path / "there.safetensors").touch()
    sizes = {"there.safetensors": 9_000_000_000, "a.safetensors": 2_400_000_000, "b.safetensors": 100_000_000}
    check_disk("owner/name", sizes, tmp_path, tmp_path / "not" / "made")
    with pytest.raises(DownloadError, match=r"owner/name: 2\.6 GB are to be downloaded, and .*made has 2\.5 GB free"):
        check_disk("owner/name", sizes | {"c.safetensors": 100_000_000}, tmp_path, tmp_path / "not" / "made")


def test_weights_are_all_there_with_every_shard_that_the_index_needs(tmp_path: Path) -> None:
    assert not has_all_weights(tmp_path)
    shards = {"model.a": "a.safetensors", "vision_tower.b": "b.safetensors", "lm_head.c": "c.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name in ("a", "c"):
        assert not has_all_weights(tmp_path)
        (tmp_path / f"{name}.safetensors").touch()
    assert has_all_weights(tmp_path)
    sizes = {"a.safetensors": 5, "x/b.safetensors": 7, "a.bin": 9}
    assert weights_below("", sizes) == {"a.safetensors": 5, "x/b.safetensors": 7}
    assert weights_below("x", sizes) == {"x/b.safetensors": 7}
