"""Checkpoints of a server that answers ranges, and misbehaves: downloaded, and streamed."""

from __future__ import annotations

import fcntl
import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millrace.model.checkpoint import ranged_files
from millrace.model.checkpoint.chunked_file import ChunkedFile
from millrace.model.checkpoint.hub import model_name, resolve
from millrace.model.checkpoint.ranged_files import BucketFiles, HttpFiles, PinnedFile, open_files
from millrace.model.checkpoint.remote_folder import POINTER, fetch, opened_stream
from millrace.model.checkpoint.safetensors import Checkpoint, needed_shards
from millrace.model.checkpoint.streamed import StreamedCheckpoint
from millrace.model.checkpoint.tensor_shapes import stored_tensors
from millrace.model.errors import CheckpointError, DownloadError
from tests.model.checkpoint.range_server import RangeServer

CHUNK = 1000  # bytes
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with tensors of odd sizes, one of them empty, and one larger than many chunks."""
    path, rng = tmp_path / "m", np.random.default_rng(0)
    path.mkdir()
    sizes = [{"a": (3, 5), "b": (0,), "c": (1,)}, {"d": (77, 101), "e": (333,)}]
    weight_map = {}
    for shard, shapes in zip(SHARDS, sizes, strict=True):
        save_file({name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}, path / shard)
        weight_map |= dict.fromkeys(shapes, shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"never fetched")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "millrace"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    monkeypatch.setattr(ranged_files.time, "sleep", lambda _: None)
    with RangeServer(folder) as running:
        yield running


def streamed(server: RangeServer, download_dir: Path) -> StreamedCheckpoint:
    root = fetch(server.url, download_dir, streams=True)
    stream = opened_stream(root)
    assert stream is not None
    return StreamedCheckpoint(root, *stream, chunk_bytes=CHUNK)


def check_equal(checkpoint: Checkpoint, folder: Path) -> None:
    expected = {name: array for shard in SHARDS for name, array in load_file(folder / shard).items()}
    assert checkpoint.names == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(checkpoint.array(name), array)


def test_a_streamed_checkpoint_has_the_tensors_of_its_files_and_stores_none(server, folder, tmp_path) -> None:
    checkpoint = streamed(server, tmp_path / "to")
    assert not any(checkpoint.is_mapped(name) for name in checkpoint.names)
    check_equal(checkpoint, folder)
    check_equal(checkpoint, folder)  # again, and not only in file order
    for name in sorted(checkpoint.names, reverse=True):
        assert checkpoint.array(name).shape == checkpoint.shape(name)
    stored = {path.name for path in checkpoint.root.iterdir()}
    assert stored == {"config.json", "model.safetensors.index.json", POINTER, ".lock"}
    assert 1 < server.most_in_flight <= 8


def test_a_reader_in_file_order_reads_each_byte_once(server, folder, tmp_path) -> None:
    checkpoint = streamed(server, tmp_path / "to")
    for name in sorted(checkpoint.names):
        checkpoint.array(name)
    for shard in SHARDS:
        size = (folder / shard).stat().st_size
        assert size <= server.num_bytes[shard] < size + 300  # one byte to pin it, and the header before


def test_a_download_is_whole_and_is_not_repeated(server, folder, tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    root = fetch(server.url, tmp_path / "to", lambda done, total: seen.append((done, total)))
    check_equal(Checkpoint(root), folder)
    total = sum((folder / name).stat().st_size for name in (*SHARDS, "config.json", "model.safetensors.index.json"))
    assert seen[-1] == (total, total) and seen == sorted(seen)
    assert "pytorch_model.bin" not in server.requests
    before = server.num_bytes[SHARDS[1]]
    assert fetch(server.url, tmp_path / "to") == root
    assert server.num_bytes[SHARDS[1]] == before + 1  # only pinned


def test_a_download_that_was_broken_off_goes_on_where_it_stopped(server, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("millrace.model.checkpoint.remote_folder.CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(ChunkedFile.__init__, "__defaults__", (CHUNK,))
    server.faults[SHARDS[1]] = dict.fromkeys(range(20, 200), "500")
    with pytest.raises(DownloadError, match=r"HTTP Error 500.* \d+ times; start again once the server answers"):
        fetch(server.url, tmp_path / "to")
    (part,) = (tmp_path / "to").rglob("*.part")
    done = part.stat().st_size
    assert 0 < done < (folder / SHARDS[1]).stat().st_size
    server.faults.clear()
    server.num_bytes.clear()
    check_equal(Checkpoint(fetch(server.url, tmp_path / "to")), folder)
    assert server.num_bytes[SHARDS[1]] <= (folder / SHARDS[1]).stat().st_size - done + CHUNK


def waits_of(error: Exception, *, is_patient: bool) -> list[float]:
    """The seconds between the tries of what always fails with `error`."""
    waits: list[float] = []

    def fail() -> bytes:
        raise error

    with pytest.raises(DownloadError, match=r" \d+ times; start again once the server answers"):
        ranged_files._with_retries("m", fail, waits.append, is_patient=is_patient)
    return waits


def asks(retry_after: str) -> Exception:
    return urllib.error.HTTPError("", 429, "too many requests", {"Retry-After": retry_after}, None)  # type: ignore[arg-type]


def test_tries_of_a_file_that_was_read_go_on_for_minutes_and_wait_as_long_as_the_server_asks() -> None:
    assert waits_of(OSError("reset"), is_patient=False) == [0.1, 0.2, 0.4, 0.8], "the address may be wrong"
    waits = waits_of(OSError("reset"), is_patient=True)
    assert waits == sorted(waits) and waits[-1] == 15.0 and 165.0 < sum(waits) <= 180.0
    assert waits_of(asks("7"), is_patient=False) == [7.0] * 4
    assert waits_of(asks("100000"), is_patient=True) == [60.0] * 3, "within bounds"
    for unread in ("", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "\u0663"):
        assert waits_of(asks(unread), is_patient=False) == [0.1, 0.2, 0.4, 0.8]


def test_chunks_that_only_a_forgotten_tensor_needed_are_dropped(server, folder, tmp_path) -> None:
    pin = HttpFiles(server.url).pin(SHARDS[1])
    assert pin is not None
    file = ChunkedFile(HttpFiles(server.url), SHARDS[1], pin, ThreadPoolExecutor(1), CHUNK)
    file.read(0, 3 * CHUNK + 1)
    held = set(file._chunks)
    file.release(CHUNK + 1, 3 * CHUNK)
    assert held - set(file._chunks) == {2} & held and 3 in file._chunks
    file.release(0, pin.size)
    assert not file._chunks


def test_a_resumed_download_tells_the_bytes_that_are_there_first(server, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("millrace.model.checkpoint.remote_folder.CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(ChunkedFile.__init__, "__defaults__", (CHUNK,))
    server.faults[SHARDS[1]] = dict.fromkeys(range(20, 400), "500")
    with pytest.raises(DownloadError):
        fetch(server.url, tmp_path / "to")
    there = sum(path.stat().st_size for path in (tmp_path / "to").rglob("*") if path.is_file())
    server.faults.clear()
    seen: list[int] = []
    fetch(server.url, tmp_path / "to", lambda done, _: seen.append(done))
    assert 0 <= there - seen[0] < CHUNK and seen[0] > 0


def test_a_download_that_another_process_makes_is_waited_for_with_a_line(server, tmp_path, caplog) -> None:
    root = fetch(server.url, tmp_path / "to")
    (root / "config.json").unlink()
    with (root / ".lock").open("w") as file, ThreadPoolExecutor(1) as threads:
        fcntl.flock(file, fcntl.LOCK_EX)
        again = threads.submit(fetch, server.url, tmp_path / "to")
        while "another process downloads this model" not in caplog.text:
            assert not again.done()
        fcntl.flock(file, fcntl.LOCK_UN)
        assert again.result() == root


@pytest.mark.parametrize("fault", ["500", "short", "reset"])
def test_a_fault_that_passes_is_tried_again(fault: str, server, folder, tmp_path) -> None:
    server.faults = {name: dict.fromkeys((0, 1, 3, 4), fault) for name in server.files}
    check_equal(streamed(server, tmp_path / "to"), folder)


@pytest.mark.parametrize("fault", ["500", "short", "reset"])
def test_a_fault_that_stays_ends_with_an_error_and_a_second_try_is_clean(fault, server, folder, tmp_path) -> None:
    for begin in (0, 6):
        server.requests.clear()
        server.faults = {name: dict.fromkeys(range(begin, 1000), fault) for name in server.files}
        with pytest.raises(DownloadError, match=r"http://127.0.0.1:\d+/models/m/.*, \d+ times; start again"):
            check_equal(streamed(server, tmp_path / f"to{begin}"), folder)
    server.faults = {}
    check_equal(streamed(server, tmp_path / "to0"), folder)


def test_a_file_that_changes_ends_the_load(server, folder, tmp_path) -> None:
    checkpoint = streamed(server, tmp_path / "to")
    server.etags[SHARDS[1]] = '"another"'
    with pytest.raises(
        DownloadError, match=r'00002.safetensors: changed while it was read: it was version ".*1", and is'
    ):
        check_equal(checkpoint, folder)
    checkpoint = streamed(server, tmp_path / "to")
    server.files[SHARDS[1]] += b"\0"
    with pytest.raises(DownloadError, match=r"changed while it was read: it was \d+ bytes, and is \d+; start again"):
        check_equal(checkpoint, folder)
    with pytest.raises(CheckpointError, match="the file is cut or has grown"):
        streamed(server, tmp_path / "to")


def test_a_shard_of_a_vision_tower_alone_is_neither_fetched_nor_opened(server, folder, tmp_path) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"model.vision_tower.a.weight": "vision.safetensors"}
    server.files[index.name] = json.dumps({"weight_map": weight_map}).encode()
    index.write_text(json.dumps({"weight_map": weight_map}))
    check_equal(Checkpoint(folder), folder)
    check_equal(Checkpoint(fetch(server.url, tmp_path / "to")), folder)
    assert needed_shards({"visual.a": "1.safetensors"}) == ["1.safetensors"]  # of a model that is nothing else


def test_two_downloads_at_once_are_one(server, folder, tmp_path) -> None:
    with ThreadPoolExecutor(2) as threads:
        roots = list(threads.map(lambda _: fetch(server.url, tmp_path / "to"), range(2)))
    assert roots[0] == roots[1]
    check_equal(Checkpoint(roots[0]), folder)
    size = (folder / SHARDS[1]).stat().st_size
    assert server.num_bytes[SHARDS[1]] == size + 2  # one to pin it, twice


def test_two_versions_of_a_checkpoint_are_two_folders(server, tmp_path) -> None:
    first = fetch(server.url, tmp_path / "to")
    server.etags["config.json"] = '"another"'
    assert fetch(server.url, tmp_path / "to") != first


def test_what_cannot_be_read_is_said_with_what_can(server, folder, tmp_path, monkeypatch) -> None:
    def refused(url: str, words: str, **options: bool) -> None:
        with pytest.raises((DownloadError, CheckpointError), match=words):
            resolve(url, download_dir=tmp_path / "to", **options)  # type: ignore[arg-type]

    refused("ftp://a/b", "ftp:// is not read; read are a folder, a .gguf file, owner/name of the Hub, hf://, https://")
    refused("http://example.org/m", "could be changed on their way; use https://")
    refused("s3://bucket/m", "s3:// needs a package: pip install s3fs")
    refused(server.url, "offline mode forbids reading it", offline=True)
    refused(f"{server.url}/m.gguf", "mapped, not streamed; leave out load_format = stream", streams=True)
    server.refuses_ranges = True
    refused(server.url, "answers 200 to a range of bytes, and must answer 206")
    server.refuses_ranges = False
    del server.files[SHARDS[0]]
    refused(server.url, f"{SHARDS[0]}: .*index.json names this shard, but there is no such file")
    del server.files["model.safetensors.index.json"]
    refused(server.url, "unsupported weight format: pytorch_model.bin; only safetensors and GGUF are loaded")
    del server.files["config.json"]
    refused(server.url, "has no config.json; name the folder of a checkpoint, or a .gguf file")


def test_a_local_folder_is_not_streamed(folder) -> None:
    with pytest.raises(
        CheckpointError, match="load_format = stream: .* holds safetensors weights; stream is for https"
    ):
        stored_tensors(folder, "stream")
    with pytest.raises(CheckpointError, match="load_format = gguf: .*; use auto or safetensors"):
        stored_tensors(folder, "gguf")


def test_pointers_of_a_checkpoint_itself_do_not_move_its_weights(server, folder, tmp_path) -> None:
    for name, content in (
        ("stream.json", {"url": server.url, "files": {SHARDS[0]: [100, ""]}}),
        ("gguf.json", {"files": [{"path": "/etc/passwd", "size": 1}]}),
        ("stream.json", {"x": 1}),
    ):
        (folder / name).write_text(json.dumps(content))
        server.files[name] = (folder / name).read_bytes()
        server.etags[name] = "x"
        check_equal(stored_tensors(folder, "auto"), folder)  # type: ignore[arg-type]
    root = fetch(server.url, tmp_path / "to")
    assert not {"stream.json", "gguf.json"} & {path.name for path in root.iterdir()}
    assert not {"stream.json", "gguf.json"} & server.requests.keys()


@pytest.mark.parametrize("pointer", [{"x": 1}, {"url": "https://h/m", "files": {"../a.safetensors": [1, ""]}}])
def test_a_damaged_pointer_is_said(pointer, cache) -> None:
    root = cache / "streams" / "m-0"
    root.mkdir(parents=True)
    (root / POINTER).write_text(json.dumps(pointer))
    with pytest.raises(CheckpointError, match=r"stream.json \(.*: must hold url and files; remove the folder"):
        opened_stream(root)


@pytest.mark.parametrize(
    ("first", "last", "target", "words"),
    [
        ("https://8.8.8.8/m", "https://8.8.8.8/m", "http://8.8.4.4/m", "only https:// is followed"),
        ("https://8.8.8.8/m", "https://8.8.8.8/m", "ftp://8.8.4.4/m", "only https:// is followed"),
        ("https://8.8.8.8/m", "https://8.8.8.8/m", "http://127.0.0.1/m", "only https:// is followed"),
        ("https://8.8.8.8/m", "https://8.8.4.4/m", "https://169.254.169.254/m", "a private address"),
        ("https://8.8.8.8/m", "https://8.8.8.8/m", "https://[::1]/m", "a private address"),
        ("http://127.0.0.1/m", "http://127.0.0.1/m", "http://10.0.0.1/m", "only https:// is followed"),
        ("https://8.8.8.8/m", "https://8.8.8.8/m", "https://8.8.4.4/m", None),
        ("https://10.0.0.1/m", "https://10.0.0.1/m", "https://10.0.0.2/m", None),
        ("http://127.0.0.1/m", "http://127.0.0.1/m", "http://127.0.0.1:81/m", None),
    ],
)
def test_a_redirect_leads_to_no_weaker_and_to_no_inner_address(first, last, target, words) -> None:
    if words is None:
        return ranged_files.check_redirect(first, last, target)
    with pytest.raises(DownloadError, match=words):
        ranged_files.check_redirect(first, last, target)


def test_a_redirect_of_a_server_is_checked(server, tmp_path) -> None:
    server.redirects["config.json"] = "http://10.0.0.1/config.json"
    with pytest.raises(DownloadError, match="config.json: redirects to http://10.0.0.1; only https:// is followed"):
        fetch(server.url, tmp_path / "to")


def test_a_wrong_index_and_a_huge_small_file_are_said(server, tmp_path) -> None:
    name = "model.safetensors.index.json"
    server.files[name] = b"<html>"
    with pytest.raises(CheckpointError, match=f"{name}: not valid JSON"):
        fetch(server.url, tmp_path / "to")
    weight_map = {"a": "caf\u00e9 1.safetensors"}
    server.files[name] = json.dumps({"weight_map": weight_map}).encode()
    with pytest.raises(CheckpointError, match="names this shard, but there is no such file"):
        fetch(server.url, tmp_path / "to")
    server.sizes["config.json"] = str(1 << 50)
    with pytest.raises(CheckpointError, match="config.json: 1125899906842624 bytes; at most 268435456 are read"):
        fetch(server.url, tmp_path / "to")


def test_files_without_a_version_are_fetched_again(server, tmp_path) -> None:
    server.etags = dict.fromkeys(server.etags, "")
    path = fetch(server.url, tmp_path / "to") / SHARDS[1]
    before = path.stat()
    assert (fetch(server.url, tmp_path / "to") / SHARDS[1]).stat().st_mtime_ns == before.st_mtime_ns  # the same bytes
    server.files[SHARDS[1]] = server.files[SHARDS[1]][:-4] + b"new!"
    assert (fetch(server.url, tmp_path / "to") / SHARDS[1]).read_bytes()[-4:] == b"new!"


def test_a_store_that_forbids_what_is_missing_is_read(server, folder, tmp_path) -> None:
    server.missing_status = 403
    check_equal(Checkpoint(fetch(server.url, tmp_path / "to")), folder)
    del server.files["config.json"]
    with pytest.raises(DownloadError, match=r"config.json: not allowed \(status 403\); use a signed URL"):
        fetch(server.url, tmp_path / "to")


def test_a_signed_gguf_address_fetches_all_parts_and_its_query_stays_out_of_names(server, tmp_path) -> None:
    names = [f"q-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in names:
        server.files[name], server.etags[name] = name.encode(), "x"
    path = fetch(f"{server.url}/{names[1]}?X-Sig=abc", tmp_path / "to")
    assert [(path.parent / name).read_bytes() for name in names] == [name.encode() for name in names]
    assert server.queries == {"X-Sig=abc"} and model_name(f"{server.url}/q.gguf?X-Sig=abc") == "q"
    assert fetch(f"{server.url}/{names[0]}?X-Sig=def", tmp_path / "to").parent == path.parent
    for name in (names[0], "none.gguf"):
        server.files.pop(name, None)
        with pytest.raises(DownloadError, match=f"models/m/{name}: there is no such file; check the address$"):
            fetch(f"{server.url}/{name}?X-Sig=abc", tmp_path / "to")


def test_a_whole_download_is_used_without_writing_to_its_folder(server, tmp_path) -> None:
    for streams in (False, True):
        root = fetch(server.url, tmp_path / "to", streams=streams)
        (root / ".lock").unlink()
        before = root.stat().st_mtime_ns
        assert fetch(server.url, tmp_path / "to", streams=streams) == root
        assert root.stat().st_mtime_ns == before


def test_a_download_larger_than_the_disk_is_refused_before_it_begins(server, tmp_path, monkeypatch) -> None:
    server.sizes[SHARDS[1]] = str(1 << 60)
    with pytest.raises(DownloadError, match=r"1152921504.6 GB are to be downloaded, and .* GB free; name a folder"):
        fetch(server.url, tmp_path / "to")
    assert not list((tmp_path / "to").rglob("*.part"))


class Doubled(Checkpoint):
    """A source of one's own."""

    def array(self, name: str) -> np.ndarray:
        return super().array(name) * 2


def test_a_source_of_ones_own_is_called_with_the_folder(folder) -> None:
    source = stored_tensors(folder, f"{__name__}:Doubled")
    np.testing.assert_array_equal(source.array("e"), 2 * Checkpoint(folder).array("e"))
    for name, words in (
        ("no_such_module:Source", "cannot be imported: No module named"),
        (f"{__name__}:Nothing", "cannot be imported: .*Nothing"),
        ("pathlib:Path", "lacks warnings, names, .*array, forget of StoredTensors"),
    ):
        with pytest.raises(CheckpointError, match=words):
            stored_tensors(folder, name)


def test_a_bucket_is_read_through_fsspec_and_is_pinned(folder, tmp_path, monkeypatch) -> None:
    bucket = fsspec.filesystem("memory")
    for path in folder.iterdir():
        bucket.pipe_file(f"/bucket/m/{path.name}", path.read_bytes())
    files = BucketFiles("s3://bucket/m", bucket, "/bucket/m")
    monkeypatch.setattr("millrace.model.checkpoint.remote_folder.open_files", lambda _: files)
    check_equal(Checkpoint(fetch("s3://bucket/m", tmp_path / "to")), folder)
    root = fetch("s3://bucket/m", tmp_path / "to", streams=True)
    _, pins = opened_stream(root)  # type: ignore[misc]
    checkpoint = StreamedCheckpoint(root, files, pins, CHUNK)
    check_equal(checkpoint, folder)
    bucket.pipe_file(f"/bucket/m/{SHARDS[1]}", (folder / SHARDS[1]).read_bytes())  # the same bytes, written later
    with pytest.raises(DownloadError, match="changed while it was read"):
        check_equal(checkpoint, folder)
    bucket.rm("/bucket", recursive=True)


def test_a_listed_name_that_leads_out_of_the_folder_is_not_written(folder, tmp_path, monkeypatch) -> None:
    class Listing:
        """A bucket whose listing names files outside of the folder, and in folders that no checkpoint has."""

        names = ("config.json", "model.safetensors", "../../../pwned.json", "/pwned.json", "a/pwned.json", "a\\b.json")

        def invalidate_cache(self) -> None: ...

        def find(self, path: str) -> list[str]:
            return [f"{path}/{name}" for name in (*self.names, "1_Pooling/config.json", "1_Pooling/a/pwned.json")]

        def info(self, path: str) -> dict[str, object]:
            return {"size": 2, "ETag": "x"}

        def cat_file(self, path: str, start: int, end: int) -> bytes:
            return b"{}"[start:end]

    files = BucketFiles("s3://b/m", Listing(), "b/m")
    monkeypatch.setattr("millrace.model.checkpoint.remote_folder.open_files", lambda _: files)
    root = fetch("s3://b/m", tmp_path / "x" / "y" / "z")
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert found == {"config.json", "model.safetensors", "1_Pooling/config.json", ".lock"}
    assert not list(tmp_path.rglob("*pwned*"))


@pytest.mark.parametrize("size", [1, 9, 10, 11, 100, 101])
def test_chunks_are_the_file_from_any_place(size: int) -> None:
    class Counting:
        url = ""

        def read(self, name: str, pinned: PinnedFile, begin: int, end: int) -> bytes:
            assert 0 <= begin < end <= size
            return bytes(range(begin, end))

    with ThreadPoolExecutor(3) as threads:
        file = ChunkedFile(Counting(), "f", PinnedFile(size, ""), threads, 10)  # type: ignore[arg-type]
        for begin in (0, size // 2, size - 1, 0):
            assert file.read(begin, size) == bytes(range(begin, size))
        assert file.read(0, 0) == b""
        assert b"".join(content for _, content in file.chunks()) == bytes(range(size))


def test_addresses_of_a_server_need_a_scheme_that_is_read() -> None:
    assert isinstance(open_files("https://example.org/m"), HttpFiles)
    assert open_files("https://example.org/m").url == "https://example.org/m/"
