"""A model of a Hub that answers late, or not at all: the first is waited for, and the second is told soon."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from millrace.model.checkpoint import hub_sizes
from millrace.model.checkpoint.hub import resolve
from millrace.model.errors import CheckpointError, DownloadError

COMMIT = "c" * 40
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = json.dumps({"weight_map": {"model.a": SHARDS[0], "lm_head.b": SHARDS[1]}}).encode()
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors.index.json": INDEX,
    SHARDS[0]: bytes(1000),
    SHARDS[1]: bytes(2000),
}


class SlowHub(http.server.BaseHTTPRequestHandler):
    """A Hub with one model. Leaves the first request without an answer until the client gives it up."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.paths.append(path)
        if len(self.paths) == 1:
            self.connection.settimeout(60.0)
            assert self.connection.recv(1) == b"", "the client gives up and closes"
            self.close_connection = True
        elif "/resolve/" in path:
            name = path.rsplit("/", 1)[-1]
            self.reply(FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        elif "/tree/" in path:
            tree = [{"type": "file", "path": name, "size": len(raw), "oid": name} for name, raw in FILES.items()]
            self.reply(json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": name, "size": len(raw)} for name, raw in FILES.items()]
            self.reply(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode())

    do_HEAD = do_GET

    def reply(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def use_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in ("constants", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def slow_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that are asked for."""
    monkeypatch.setattr(SlowHub, "paths", [])
    monkeypatch.setattr(hub_sizes, "LIMITS_S", (30.0, 0.2))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_hub(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield SlowHub.paths
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["refused", "dropped"])
def no_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Hub that refuses connections, or whose network drops the packets."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits {seconds} s to ask again")

    with ExitStack() as sockets:
        taken = sockets.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        if request.param == "dropped":  # as the queue of connections to accept is full
            taken.listen(0)
            for _ in range(2):
                client = sockets.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(taken.getsockname())
            monkeypatch.setattr(hub_sizes, "LIMITS_S", (0.2, 60.0))
        monkeypatch.setattr("time.sleep", sleep)
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        use_hub(url, monkeypatch)
        yield url


def cache(root: Path, names: Sequence[str]) -> Path:
    """The snapshot of an interrupted download, which has brought the files `names`."""
    repository = root / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs", repository / "trees"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for name in names:
        (snapshot / name).write_bytes(FILES.get(name, b"GGUF"))
    return snapshot


def check(folder: Path, num_bytes: int) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("num_cached", [0, 3])
def test_a_slow_hub_is_waited_for_and_the_download_goes_on(
    num_cached: int, slow_hub: list[str], tmp_path: Path
) -> None:
    if num_cached:
        cache(tmp_path, list(FILES)[:num_cached])
    root = resolve("owner/name", download_dir=tmp_path, check_weights=check)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == FILES
    assert len(slow_hub) > 1, "asked again after the limit of the look-up"


def test_without_a_hub_a_whole_model_is_taken_from_the_cache_at_once(no_hub: str, tmp_path: Path) -> None:
    snapshot = cache(tmp_path, list(FILES))
    assert resolve("owner/name", download_dir=tmp_path, check_weights=check) == snapshot
    (snapshot / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=r"a\.gguf"):  # an empty file, and found
        resolve("hf://owner/name/a.gguf", download_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "cached", "missing"),
    [
        ("owner/name", [*list(FILES)[:3]], SHARDS[1]),
        ("owner/name", [*list(FILES)[:2]], "its weights"),
        ("owner/name", ["config.json", SHARDS[0]], r"model\.safetensors\.index\.json"),
        ("owner/name", ["config.json"], "its weights"),
        ("owner/name:Q8_0", ["a-Q8_0-00001-of-00002.gguf"], r"a-Q8_0-00002-of-00002\.gguf"),
        ("owner/name:Q8_0", ["config.json"], "a GGUF file Q8_0"),
        ("owner/name:Q8_0", ["a-Q4_0.gguf"], "a GGUF file Q8_0"),
        ("hf://owner/name/a-00001-of-00002.gguf", ["a-00001-of-00002.gguf"], r"a-00002-of-00002\.gguf"),
    ],
)
def test_without_a_hub_a_part_of_a_model_is_told_with_what_is_missing(
    name: str, cached: list[str], missing: str, no_hub: str, tmp_path: Path
) -> None:
    cache(tmp_path, cached)
    said = f"^owner/name: the cache lacks {missing}, and the Hub .{no_hub}. cannot be reached: .*; check network.*"
    with pytest.raises(DownloadError, match=said + "run again to go on .* or give a local directory"):
        resolve(name, download_dir=tmp_path, check_weights=check)


def test_without_a_hub_a_model_that_is_not_here_is_told_with_its_address(no_hub: str, tmp_path: Path) -> None:
    for name in ("no/such-model", "no/such-model:Q4_K_M", "hf://no/such-model/a.gguf"):
        with pytest.raises(
            DownloadError, match=f"no/such-model: .*the Hub .{no_hub}. cannot be reached: .*HF_HUB_OFFLINE=1"
        ):
            resolve(name, download_dir=tmp_path, check_weights=check)


def test_a_download_that_the_hub_breaks_off_is_told_and_not_loaded(
    slow_hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cache(tmp_path, list(FILES)[:3])

    def broken_off(*args: Any, **options: Any) -> str:
        return str(snapshot)  # as the library does for a cache that it cannot complete

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken_off)
    with pytest.raises(DownloadError, match=f"the cache lacks {SHARDS[1]}, and the Hub .* has not sent it"):
        resolve("owner/name", download_dir=tmp_path)
