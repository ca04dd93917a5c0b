"""What a download of the Hub will take, before it begins: the bytes of its files, and the room on the disk."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError, DownloadError, HubUnreachable
from ..files import read_json
from .safetensors import INDEX, WHOLE, needed_shards

SAFETENSORS = "*.safetensors"
ANSWER_S = 4.0  # for the Hub to connect, and to answer


def sizes_on_hub(model: str, revision: str | None, token: str | None) -> dict[str, int]:
    """The bytes of a repository's files; none where the Hub refuses to tell, as the download then says why.

    Raises HubUnreachable if no answer comes: after one try, as a mistyped name on a machine without a network is to be
    told soon.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi(token=token).model_info(model, revision=revision, files_metadata=True, timeout=ANSWER_S)
        return {file.rfilename: file.size for file in info.siblings or () if file.size is not None}
    except (HfHubHTTPError, ValueError):
        return {}
    except hub_errors() as error:
        raise HubUnreachable(brief(error)) from None


def brief(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def hub_errors() -> tuple[type[Exception], ...]:
    """What a request to the Hub raises if it is refused, or if no answer comes.

    A ValueError is one of a proxy or of HF_ENDPOINT that is no address. NOTE: the errors of huggingface_hub's HTTP
    client, such as one of a host that cannot be found, are no OSError.
    """
    from huggingface_hub import errors

    return errors.HfHubHTTPError, getattr(errors, "HTTPError", OSError), OSError, ValueError


def weights_below(folder: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The files of safetensors in a folder of a repository, as a download takes them."""
    pattern = f"{folder}/{SAFETENSORS}" if folder else SAFETENSORS
    return {name: size for name, size in sizes.items() if fnmatch.fnmatch(name, pattern)}


def has_all_weights(root: Path) -> bool:
    """Whether a folder has every file of safetensors that its index names, or the only one."""
    if (root / WHOLE).exists():
        return True
    try:
        weight_map = (read_json(root, INDEX) or {}).get("weight_map")
    except CheckpointError:
        return False
    return isinstance(weight_map, dict) and all((root / str(name)).exists() for name in needed_shards(weight_map))


def check_disk(name: str, sizes: Mapping[str, int], root: Path, cache: Path) -> None:
    """Raises DownloadError if the disk of `cache` has no room for those of the files that `root` lacks."""
    needed = sum(size for file, size in sizes.items() if not (root / file).exists())
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise DownloadError(
            f"{name}: {needed / 1e9:.1f} GB are to be downloaded, and {cache} has {free / 1e9:.1f} GB free; name a "
            "folder with more by download_dir"
        )
