"""Finds a model's files: in a directory, the Hub cache, or on the Hub. In offline mode no socket is opened."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DownloadError, HubUnreachable
from ..gguf.choice import choose, models_of
from ..gguf.reader import part_names
from ..gguf.siblings import model_bytes
from ..similar_models import BUNDLED, similar_model
from .hub_sizes import (
    SAFETENSORS,
    brief,
    check_disk,
    check_fetched,
    has_all_weights,
    hub_address,
    hub_errors,
    missing_weights,
    sizes_on_hub,
    weights_below,
)
from .remote_folder import fetch

Progress = Callable[[int, int], None]  # bytes done, bytes in total; the total grows while files are listed
CheckSize = Callable[[str, int, Mapping[str, int]], None]  # a GGUF model, its bytes, and those of the others
CheckWeights = Callable[[Path, int], None]  # a folder without its weights, and the bytes of these

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?")
HUB_SCHEME = "hf://"
HUB_ADDRESS = re.compile(r"hf://([^/@]+/[^/@]+)(?:@([\w.-]{1,128}))?(/[\w./ -]+)?|([^/@]+/[^/@]+)@([\w.-]{1,128})")
QUANT = re.compile(r"(.+):([A-Za-z0-9_.-]{1,64})")  # a folder or Hub id, and a part of the name of its GGUF file
SMALL = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
FILES = (SAFETENSORS, *SMALL)

POINTERS = ("stream.json", "gguf.json")  # say where weights are, in folders made here; never taken from elsewhere


def resolve(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: Path | None = None,
    token: str | None = None,
    offline: bool = False,
    on_progress: Progress | None = None,
    check_size: CheckSize | None = None,
    check_weights: CheckWeights | None = None,
    streams: bool = False,
) -> Path:
    """The directory of a model: the bundled one for None or "demo", else a local directory, an address, or a Hub id.

    An address is hf://owner/name@revision/path, or of https://, s3://, gs:// or az://; with `streams` the weights of
    these stay there. A Hub id may have @revision behind it. A GGUF file, by its path or as a folder's or repository's
    (`owner/name:Q4_K_M`), has a directory that stands for it.
    Blocks during a download; `on_progress` is called from its threads. Without `download_dir`, files go to the Hub's
    cache. `check_size` is called before a GGUF file of the Hub is downloaded, `check_weights` before files of
    safetensors, when all others are there; both may raise. With `offline`, or HF_HUB_OFFLINE set, only the cache is
    searched; so it is where no connection to the Hub is made, but a part of a model is then an error. A Hub that
    answers late is waited for. Raises DownloadError, whose message names the next step, or CheckpointError for a file.
    """
    if model is None or (model == BUNDLED and not Path(model).exists()):
        return bundled_model_path()
    name, quant = (model, None) if os.path.exists(Path(model).expanduser()) else _split(model)
    path = Path(name).expanduser()
    if name and os.path.isdir(path):
        return _in_folder(path, quant)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise CheckpointError(f"{model}: is a file; name the directory that holds config.json, or a .gguf file")
        return _stand_in(path)
    offline = offline or _is_offline()
    if "://" in model and not model.startswith(HUB_SCHEME):
        if offline:
            named = model.partition("?")[0]
            raise DownloadError(f"{named}: offline mode forbids reading it; download its files and give their folder")
        found = fetch(model, download_dir, on_progress, streams=streams)
        return _stand_in(found) if found.suffix == ".gguf" else found
    if streams:
        raise DownloadError(f"{model}: load_format = stream is for https://, s3://, gs:// and az://; leave it out")
    name, revision, folder = _hub_address(name, revision)
    if not HUB_ID.fullmatch(name):
        near = similar_model(model)
        raise DownloadError(f"{model[:200]!r}: no such directory, and not the form of a Hub id (owner/name){near}")
    sizes: Mapping[str, int] = {}
    unreachable = ""  # why; then the Hub is not asked again
    try:
        sizes = {} if offline else sizes_on_hub(name, revision, token)
    except HubUnreachable as error:
        unreachable = str(error)
    download = partial(_snapshot, name, revision, download_dir, token, offline, on_progress, unreachable=unreachable)
    cached = _cached_snapshot(name, revision, download_dir)
    if folder.endswith(".gguf"):
        root = download(part_names(folder))
        check_fetched(name, _missing(root, part_names(folder)) if unreachable else [], unreachable)
        return _stand_in(root / folder)
    if quant is None:
        weights = weights_below(folder, sizes)
        if weights and check_weights is not None and not has_all_weights(cached / folder):
            check_disk(name, weights, cached, _cache(download_dir))
            check_weights(download(_below(folder, SMALL)) / folder, sum(weights.values()))
        root = download(_below(folder, FILES)) / folder
        if any(root.glob(SAFETENSORS)):
            check_fetched(name, [] if offline else missing_weights(root), unreachable)
            return root
    is_told = bool(sizes)
    if not is_told:  # what the cache has, or why there is nothing; NOTE: other patterns might fetch all GGUF files
        sizes = dict.fromkeys(_cached_names(download(SMALL)), 0)
    if not is_told and not offline and not any((quant or "").lower() in each.lower() for each in sizes):
        check_fetched(name, ["its weights" if quant is None else f"a GGUF file {quant}"], unreachable)
    parts = choose(sizes, quant, name)
    if parts is not None:
        if check_size is not None:
            _check_size(check_size, parts, sizes)
        check_disk(name, {part: sizes[part] for part in parts}, cached, _cache(download_dir))
        parts = parts if is_told else part_names(parts[0])
        root = download(parts)
        check_fetched(name, [] if offline else _missing(root, parts), unreachable)
        return _stand_in(root / parts[0])
    if quant is not None:
        raise DownloadError(f"{name}: holds no GGUF file here, so :{quant} chooses none")
    return root


def resolve_text(
    model: str | None, *, revision: str | None = None, download_dir: Path | None = None, offline: bool = False
) -> Path | None:
    """The folder of a Hub id's files besides its weights; None for a model that is named otherwise, or is GGUF alone.

    Blocks during a download. Raises DownloadError.
    """
    if model is None or model == BUNDLED or os.path.exists(Path(model).expanduser()):
        return None
    if "://" in model and not model.startswith(HUB_SCHEME):
        return None
    model, quant = _split(model)
    name, revision, folder = _hub_address(model, revision)
    if quant is not None or folder.endswith(".gguf") or not HUB_ID.fullmatch(name):
        return None
    offline = offline or _is_offline()
    root = _snapshot(name, revision, download_dir, None, offline, None, _below(folder, SMALL)) / folder
    return root if (root / "config.json").exists() else None


def resolve_tokenizer(name: str, download_dir: Path | None = None, offline: bool = False) -> Path:
    """The folder of a tokenizer's files: a local one, or a Hub id, perhaps with @revision, without its weights.

    Blocks during a download. Raises DownloadError.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    name, revision, folder = _hub_address(name, None)
    if not HUB_ID.fullmatch(name):
        raise DownloadError(f"tokenizer = {name[:200]!r}: no such directory, and not the form of a Hub id (owner/name)")
    return _snapshot(name, revision, download_dir, None, offline or _is_offline(), None, _below(folder, SMALL)) / folder


def _hub_address(name: str, revision: str | None) -> tuple[str, str | None, str]:
    """The id, the revision and the path inside the repository of hf://owner/name@revision/path, or owner/name@revision.

    Raises DownloadError if `revision` is another one.
    """
    match = HUB_ADDRESS.fullmatch(name)
    if match is None:
        return name, revision, ""
    found, told = match[1] or match[4], match[2] or match[5]
    if told is not None and revision not in (None, told):
        raise DownloadError(f"{name}: the name and the setting revision = {revision} differ; leave out one of them")
    return found, told or revision, (match[3] or "").strip("/")


def model_name(model: str | None) -> str:
    """The name of a model for clients: its Hub id, or the name of its folder, without the path to it."""
    if model is None:
        return BUNDLED
    path = Path(model).expanduser()
    if os.path.isfile(path):
        return path.stem
    if not os.path.isdir(path):
        if "://" in model:
            last = model.partition("?")[0].rstrip("/").rpartition("/")[2]
            return last.removesuffix(".gguf") if not model.startswith(HUB_SCHEME) else _hub_address(model, None)[0]
        name, _ = _split(model)
        return model_name(name) if os.path.isdir(Path(name).expanduser()) else model
    folder = Path(os.path.abspath(path))
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):  # of the Hub's cache
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name or model


def _split(model: str) -> tuple[str, str | None]:
    """A folder or Hub id, and the part of a GGUF file's name behind a colon."""
    match = QUANT.fullmatch(model)
    return (match[1], match[2]) if match else (model, None)


def _in_folder(folder: Path, quant: str | None) -> Path:
    """The folder itself, or what stands for a GGUF file in it: without a config.json, or where `quant` asks for one."""
    if quant is None and (folder / "config.json").exists():
        return folder
    parts = choose(_cached_names(folder), quant, str(folder))
    if parts is not None:
        return _stand_in(folder / parts[0])
    if quant is not None:
        raise CheckpointError(f"{folder}: holds no GGUF file, so :{quant} chooses none")
    return folder


def _stand_in(file: Path) -> Path:
    from ..gguf.folder import folder_of

    return folder_of(file)


def _cached_names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.is_file()]


def _missing(root: Path, files: Sequence[str]) -> list[str]:
    return [file for file in files if not (root / file).exists()]


def _check_size(check_size: CheckSize, parts: Sequence[str], sizes: Mapping[str, int]) -> None:
    if any(sizes[part] for part in parts):
        all_bytes = model_bytes(sizes)
        own = next(name for name, files in models_of(sizes).items() if parts[0] in files)
        check_size(own, all_bytes.pop(own), all_bytes)


def _below(folder: str, patterns: Sequence[str]) -> Sequence[str]:
    return [f"{folder}/{pattern}" for pattern in patterns] if folder else patterns


def _cache(download_dir: Path | None) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return download_dir or Path(HF_HUB_CACHE)


def _cached_snapshot(model: str, revision: str | None, download_dir: Path | None) -> Path:
    """The folder of what the cache has of a model; where it has nothing, one that is not there."""
    try:
        return _snapshot(model, revision, download_dir, None, True, None, ())
    except DownloadError:
        return _cache(download_dir) / "none"


def bundled_model_path() -> Path:
    """The directory of the model that comes with the package."""
    return Path(str(resources.files("millrace.model.demo"))) / "weights"


def _snapshot(
    model: str,
    revision: str | None,
    download_dir: Path | None,
    token: str | None,
    offline: bool,
    on_progress: Progress | None,
    patterns: Sequence[str],
    *,
    unreachable: str = "",
) -> Path:
    """`unreachable`: why the Hub is not asked again. Of a cache alone, the folder may lack some of the files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    name = model if revision is None else f"{model} at revision {revision}"
    is_cache_only = offline or bool(unreachable)
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                token=token,
                allow_patterns=[] if is_cache_only else list(patterns),
                ignore_patterns=[f"*{name}" for name in POINTERS],
                local_files_only=is_cache_only,
                tqdm_class=None if on_progress is None else _reporting_bar(on_progress),
            )
        )
    except LocalEntryNotFoundError as error:
        near = similar_model(model, _cache(download_dir)) if patterns else ""
        if offline:
            raise DownloadError(
                f"{name}: not in the cache, and offline mode forbids fetching it{near}; run once without offline mode "
                "(HF_HUB_OFFLINE), or give a local directory"
            ) from None
        reason = unreachable or brief(error.__cause__ or error)
        raise DownloadError(
            f"{name}: no such directory here{near}, not in the cache, and the Hub ({hub_address()}) cannot be "
            f"reached: {reason}; check the name, network and proxy, or give a local directory; without a network set "
            "HF_HUB_OFFLINE=1, and the Hub is not asked"
        ) from None
    except GatedRepoError:
        raise DownloadError(f"{name}: accept its licence on the Hub, then give a token (HF_TOKEN)") from None
    except RepositoryNotFoundError:
        near = similar_model(model, _cache(download_dir))
        raise DownloadError(
            f"{name}: no such directory here and no such model on the Hub{near}; check the name, or give a token "
            "(HF_TOKEN) if it is private"
        ) from None
    except hub_errors() as error:
        reason = brief(error).removesuffix(".")
        raise DownloadError(f"{name}: download failed: {reason}; run again to go on where it stopped") from None


def _reporting_bar(on_progress: Progress) -> Any:
    """A progress bar for huggingface_hub that draws nothing and reports bytes."""
    from tqdm import tqdm

    byte_bars: list[tqdm[Any]] = []  # bars over the same bytes: received, and in newer versions also written

    class Reporting(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})
            if kwargs.get("unit") == "B":
                byte_bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            is_shown: bool | None = super().update(n)
            if self in byte_bars:
                on_progress(int(max(bar.n for bar in byte_bars)), int(max(bar.total or 0 for bar in byte_bars)))
            return is_shown

    return Reporting


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
