"""A checkpoint elsewhere (https://, s3://, gs://, az://) as a local folder: downloaded, or with its weights left there.

The folder's name has a digest of all sizes and versions, so files of two versions are never mixed. A download that was
broken off goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import filecmp
import fnmatch
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import CheckpointError, DownloadError, shown
from ..files import FILE_BYTES, JSON_BYTES, read_json
from ..gguf.folder import POINTER as GGUF_POINTER
from ..gguf.folder import cache_directory, is_made_in
from ..gguf.reader import part_names
from .chunked_file import CHUNK_BYTES, IN_FLIGHT, ChunkedFile
from .ranged_files import PinnedFile, RangedFiles, open_files
from .safetensors import INDEX, PICKLES, WHOLE, is_plain_name, is_shard_name, needed_shards

POINTER = "stream.json"
SMALL = (  # files of a checkpoint besides its weights, where a server lists none
    *("config.json", "generation_config.json", "modules.json", "1_Pooling/config.json", "params.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "adapter_config.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)
PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")

log = logging.getLogger("millrace.model")

Pins = dict[str, PinnedFile]
OnBytes = Callable[[int, int], None]  # bytes done, bytes in total


def fetch(url: str, download_dir: Path | None, on_progress: OnBytes | None = None, *, streams: bool = False) -> Path:
    """The folder, or the GGUF file, that `url` names, as a local path.

    With `streams` the weights stay where they are, and `streamed.StreamedCheckpoint` reads them. Blocks; raises
    DownloadError and CheckpointError.
    """
    if url.startswith("http"):
        url, _, query = url.partition("?")
    else:
        query = ""
    folder, _, last = url.rstrip("/").rpartition("/")
    if last.endswith(".gguf"):
        if streams:
            raise DownloadError(f"{url}: a GGUF file is mapped, not streamed; leave out load_format = stream")
        files = open_files(folder, query)
        pins = _pinned(files, [last])
        names = part_names(last) if pins else [last]
        pins |= _pinned(files, [name for name in names if name != last])
        missing = [name for name in names if name not in pins]
        if missing:
            raise DownloadError(f"{files.url}{missing[0]}: there is no such file; check the address")
        return _download(files, pins, download_dir, on_progress) / last
    if query:
        raise DownloadError(f"{url}: only the address of a .gguf file may have a query; leave it out for a folder")
    files = open_files(url)
    return _fetch_folder(files, download_dir, on_progress, streams=streams)


def opened_stream(root: Path) -> tuple[RangedFiles, Pins] | None:
    """The files elsewhere whose weights the folder `root` leaves there; None for any other folder.

    Only a folder below `streams_directory` is one: a checkpoint may hold a stream.json of its own. Raises
    CheckpointError for a pointer that was damaged.
    """
    pointer = read_json(root, POINTER) if is_made_in(streams_directory(), root) else None
    if pointer is None:
        return None
    url, files = pointer.get("url"), pointer.get("files")
    if not isinstance(url, str) or not isinstance(files, dict) or not all(map(_is_pin, files.items())):
        raise CheckpointError(f"{POINTER} ({root}): must hold url and files; remove the folder, and start again")
    return open_files(url), {name: PinnedFile(*found) for name, found in files.items()}


def streams_directory() -> Path:
    """Where the folders are kept whose weights stay elsewhere: millrace/streams in the cache directory."""
    return cache_directory().parent / "streams"


def _is_pin(item: tuple[str, object]) -> bool:
    name, found = item
    return is_shard_name(name) and isinstance(found, list) and [type(part) for part in found] == [int, str]


def _fetch_folder(files: RangedFiles, download_dir: Path | None, on_progress: OnBytes | None, *, streams: bool) -> Path:
    listed = files.names()
    small = [*SMALL, INDEX] if listed is None else [name for name in listed if _is_small(name)]
    config = files.pin("config.json")  # first, as what is not allowed after it counts as missing
    pins = {} if config is None else {"config.json": config}
    if pins:
        pins |= _pinned(files, [name for name in small if name != "config.json"])
    for name, pin in pins.items():
        if pin.size > FILE_BYTES:
            raise CheckpointError(f"{files.url}{name}: {pin.size} bytes; at most {FILE_BYTES} are read")
    if "config.json" not in pins:
        raise DownloadError(f"{files.url}: has no config.json; name the folder of a checkpoint, or a .gguf file")
    shards = _shards(files, pins)
    if not shards:
        raise CheckpointError(_no_weights(files, listed))
    base = streams_directory() if streams else download_dir
    root = _download(files, pins | ({} if streams else shards), base, on_progress, key=pins | shards)
    if streams:
        told = {name: [pin.size, pin.version] for name, pin in shards.items()}
        _write(root / POINTER, json.dumps({"url": files.url, "files": told}).encode())
    return root


def _is_small(name: str) -> bool:
    """Whether a listed name is of a file besides the weights: of the folder itself, or of its 1_Pooling."""
    last = name.removeprefix("1_Pooling/")
    return "/" not in last and last not in (POINTER, GGUF_POINTER) and is_plain_name(name) and _matches(last)


def _matches(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)


def _shards(files: RangedFiles, pins: Pins) -> Pins:
    """The files that hold the weights."""
    whole = files.pin(WHOLE)
    if whole is not None:
        return {WHOLE: whole}
    if INDEX not in pins:
        return {}
    try:
        index = json.loads(_whole(files, INDEX, pins[INDEX]))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{files.url}{INDEX}: not valid JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(map(is_shard_name, weight_map.values())):
        raise CheckpointError(f"{files.url}{INDEX}: weight_map: must map tensors to names of safetensors files")
    names = needed_shards(weight_map)
    found = _pinned(files, names)
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(f"{files.url}{missing[0]}: {INDEX} names this shard, but there is no such file")
    return found


def _no_weights(files: RangedFiles, listed: list[str] | None) -> str:
    names = listed if listed is not None else ["pytorch_model.bin", "model.gguf"]
    other = next((n for n in names if any(fnmatch.fnmatch(n, p) for p in PICKLES) and files.pin(n) is not None), None)
    if other is None:
        return f"{files.url}: has no {WHOLE} and no {INDEX}"
    if other.endswith(".gguf"):
        return f"{files.url}: has no safetensors; serve {files.url}{other} itself"
    return f"{files.url}: unsupported weight format: {other}; only safetensors and GGUF are loaded"


def _pinned(files: RangedFiles, names: list[str]) -> Pins:
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        found = zip(names, threads.map(files.pin, names), strict=True)
        return {name: pin for name, pin in found if pin is not None}


def _whole(files: RangedFiles, name: str, pin: PinnedFile) -> bytes:
    if pin.size > JSON_BYTES:
        raise CheckpointError(f"{files.url}{name}: {pin.size} bytes; at most {JSON_BYTES} are read")
    return files.read(name, pin, 0, pin.size) if pin.size else b""


def _download(
    files: RangedFiles,
    pins: Pins,
    download_dir: Path | None,
    on_progress: OnBytes | None,
    key: Mapping[str, PinnedFile] | None = None,
) -> Path:
    """A folder with the files; those that are there already are kept."""
    told = files.url + "".join(f" {name} {pin.size} {pin.version}" for name, pin in sorted((key or pins).items()))
    base = download_dir or cache_directory().parent / "downloads"
    stem = urlsplit(files.url).path.rstrip("/").rpartition("/")[2] or urlsplit(files.url).hostname or "model"
    root = base / f"{stem[:64]}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    if all(_is_there(root / name, pin) for name, pin in pins.items()):
        return root  # which may be read-only, so it is not locked
    total, done = sum(pin.size for pin in pins.values()), 0
    try:
        with _locked(root), ThreadPoolExecutor(IN_FLIGHT) as threads:
            _check_space(files, pins, root)
            if unversioned := [name for name, pin in pins.items() if not pin.version]:
                log.warning("%s%s: the server tells no version, so it is read at each start", files.url, unversioned[0])
            if on_progress is not None:
                on_progress(sum(_num_saved(root / name, pin) for name, pin in pins.items()), total)
            for name, pin in pins.items():
                path = root / name
                if not path.resolve().is_relative_to(root.resolve()):
                    raise DownloadError(f"{files.url}: {shown(name)}: leads out of {root}; nothing is written there")
                path.parent.mkdir(parents=True, exist_ok=True)
                if not _is_there(path, pin):
                    for count in _save(files, name, pin, path, threads):
                        if on_progress is not None:
                            on_progress(done + count, total)
                done += pin.size
    except OSError as error:
        raise DownloadError(
            f"{files.url}: {root} cannot be written: {error.strerror}; name a folder with {total / 1e9:.1f} GB free by "
            "download_dir"
        ) from None
    return root


def _part(path: Path) -> Path:
    """What there is of a file that is being downloaded."""
    return path.with_name(f"{path.name}.part")


def _num_saved(path: Path, pin: PinnedFile) -> int:
    """The bytes of a file that need not be downloaded again."""
    if _is_there(path, pin):
        return pin.size
    part = _part(path)
    return part.stat().st_size // CHUNK_BYTES * CHUNK_BYTES if part.is_file() and pin.version else 0


def _is_there(path: Path, pin: PinnedFile) -> bool:
    return bool(pin.version) and path.is_file() and path.stat().st_size == pin.size


def _check_space(files: RangedFiles, pins: Pins, root: Path) -> None:
    """Raises DownloadError if the disk has no place for what is missing."""
    missing = {name: pin.size for name, pin in pins.items() if not _is_there(root / name, pin)}
    parts = [part.stat().st_size for name in missing if (part := _part(root / name)).is_file()]
    needed, free = sum(missing.values()) - sum(parts), shutil.disk_usage(root).free
    if needed > free:
        raise DownloadError(
            f"{files.url}: {needed / 1e9:.1f} GB are to be downloaded, and {root} has {free / 1e9:.1f} GB free; name a "
            "folder with more by download_dir"
        )


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Waits while another process, or thread, fills the folder."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("%s: another process downloads this model; waiting for it", root)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _save(files: RangedFiles, name: str, pin: PinnedFile, path: Path, threads: ThreadPoolExecutor) -> Iterator[int]:
    """Writes a file from where its part ends; yields the bytes that are there."""
    part, begin = _part(path), _num_saved(path, pin)
    source = ChunkedFile(files, name, pin, threads)
    with part.open("r+b" if begin else "wb") as file:
        file.truncate(begin)
        file.seek(begin)
        for place, content in source.chunks(begin):
            file.write(content)
            yield place + len(content)
    if not pin.version and path.is_file() and filecmp.cmp(part, path, shallow=False):
        part.unlink()  # the file that is there may be in use, and keeps its time
    else:
        os.replace(part, path)


def _write(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")  # of this writer alone
    part.write_bytes(content)
    os.replace(part, path)
