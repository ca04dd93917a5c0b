"""What a download of the Hub will take, before it begins: the bytes of its files, and the room on the disk."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DownloadError, HubUnreachable, shown
from ..files import read_json
from .safetensors import INDEX, WHOLE, needed_shards

SAFETENSORS = "*.safetensors"
# Seconds to connect to the Hub, and between bytes of its answer: a Hub that is slow is not one that is away.
LIMITS_S: Any = (4.0, 60.0)  # the Hub's HTTP client takes both, though its annotations name one
SHARD = re.compile(r".+-\d+-of-\d+\.safetensors")
NUM_SHOWN = 3  # names of files in an error


def sizes_on_hub(model: str, revision: str | None, token: str | None) -> dict[str, int]:
    """The bytes of a repository's files; none where the Hub does not tell, as the download then says why.

    Raises HubUnreachable if there is no connection: after one try, as a mistyped name on a machine without a network
    is to be told soon.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi(token=token).model_info(model, revision=revision, files_metadata=True, timeout=LIMITS_S)
        return {file.rfilename: file.size for file in info.siblings or () if file.size is not None}
    except hub_errors() as error:
        if _is_unconnected(error):
            raise HubUnreachable(brief(error)) from None
        return {}


def _is_unconnected(error: BaseException) -> bool:
    """Whether no connection was made. The classes are told by name, as which HTTP client has them is the Hub's."""
    names = {each.__name__ for each in type(error).__mro__}
    return isinstance(error, ConnectionError) or not names.isdisjoint(("ConnectError", "ConnectTimeout"))


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


def missing_weights(root: Path) -> list[str]:
    """The files of safetensors that a folder lacks: by its index, or all. Those of an adapter need no index."""
    if (root / WHOLE).exists():
        return []
    try:
        weight_map = (read_json(root, INDEX) or {}).get("weight_map")
    except CheckpointError:
        return [INDEX]
    if isinstance(weight_map, dict):
        return [name for name in needed_shards(weight_map) if not (root / name).exists()]
    found = [path.name for path in root.glob(SAFETENSORS)]
    if not found:
        return [WHOLE]
    return [INDEX] if all(SHARD.fullmatch(name) for name in found) else []


def check_fetched(name: str, missing: Sequence[str], unreachable: str) -> None:
    """Raises DownloadError if a model's files are `missing`, as the Hub was `unreachable` (why) or broke off."""
    if not missing:
        return
    listed = ", ".join(shown(file) for file in missing[:NUM_SHOWN])
    listed += f" and {len(missing) - NUM_SHOWN} more" if len(missing) > NUM_SHOWN else ""
    why = f"cannot be reached: {unreachable}" if unreachable else "has not sent it"
    raise DownloadError(
        f"{name}: the cache lacks {listed}, and the Hub ({hub_address()}) {why}; check network and proxy, then run "
        "again to go on where the download stopped, or give a local directory"
    )


def hub_address() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


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
