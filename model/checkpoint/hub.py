"""Finds a model's files: in a directory, the Hub cache, or on the Hub. In offline mode no socket is opened."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DownloadError
from ..foreign import describe_gguf

Progress = Callable[[int, int], None]  # bytes done, bytes in total; the total grows while files are listed

BUNDLED = "demo"
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?")
FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


def resolve(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: Path | None = None,
    token: str | None = None,
    offline: bool = False,
    on_progress: Progress | None = None,
) -> Path:
    """The directory of a model: the bundled one for None or "demo", else a local directory, else a Hub id.

    Blocks during a download; `on_progress` is called from its threads. Without `download_dir`, files go to the Hub's
    cache. With `offline`, or HF_HUB_OFFLINE set, only the cache is searched. Raises DownloadError, whose message names
    the next step, or CheckpointError for a file.
    """
    if model is None or (model == BUNDLED and not Path(model).exists()):
        return bundled_model_path()
    path = Path(model).expanduser()
    if model and os.path.isdir(path):
        return path
    if os.path.isfile(path):
        if path.suffix == ".gguf":
            raise CheckpointError(describe_gguf(path, path.name))
        raise CheckpointError(f"{model}: is a file; name the directory that holds config.json")
    if not HUB_ID.fullmatch(model):
        raise DownloadError(f"{model[:200]!r}: no such directory, and not the form of a Hub id (owner/name)")
    return _snapshot(model, revision, download_dir, token, offline or _is_offline(), on_progress)


def model_name(model: str | None) -> str:
    """The name of a model for clients: its Hub id, or the name of its folder, without the path to it."""
    if model is None:
        return BUNDLED
    path = Path(model).expanduser()
    if not os.path.isdir(path):
        return model
    folder = Path(os.path.abspath(path))
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):  # of the Hub's cache
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name or model


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
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    name = model if revision is None else f"{model} at revision {revision}"
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                token=token,
                allow_patterns=list(FILES),
                local_files_only=offline,
                tqdm_class=None if on_progress is None else _reporting_bar(on_progress),
            )
        )
    except LocalEntryNotFoundError as error:
        if offline:
            raise DownloadError(
                f"{name}: not in the cache, and offline mode forbids fetching it; run once without offline mode "
                "(HF_HUB_OFFLINE), or give a local directory"
            ) from None
        raise DownloadError(f"{name}: not in the cache, and the Hub cannot be reached: {_brief(error)}") from None
    except GatedRepoError:
        raise DownloadError(f"{name}: accept its licence on the Hub, then give a token (HF_TOKEN)") from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"{name}: no such directory here and no such model on the Hub; check the name, or give a token (HF_TOKEN) "
            "if it is private"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise DownloadError(f"{name}: download failed: {_brief(error)}; run again to go on where it stopped") from None


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


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
