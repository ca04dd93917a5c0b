"""Finds an adapter's files on the Hub or in its cache: only those that are read, and only of a bounded size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import AdapterError, DownloadError, HubUnreachable
from .hub import _hub_address, _is_offline, _snapshot
from .hub_sizes import LIMITS_S, brief, hub_address

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

NAMES = ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "added_tokens.json")
MAX_BYTES = 2 << 30  # of all files; rank 256 on all linears of a model of 8e9 weights takes 1.3e9 in float16


def resolve_adapter(
    text: str, commit: str = "", *, download_dir: Path | None = None, offline: bool = False, max_bytes: int = MAX_BYTES
) -> Path:
    """The folder of an adapter, OWNER/NAME or OWNER/NAME@REVISION; its name is the commit. `commit`: must be this one.

    Blocks. Raises `HubUnreachable` if the Hub does not answer and the adapter is not in the cache, `DownloadError` if
    it cannot be downloaded otherwise, and `AdapterError` for more than `max_bytes`.
    """
    name, told, _ = _hub_address(f"hf://{text}", None)
    revision = commit or told
    offline = offline or _is_offline()
    if not offline and (info := _ask_hub(name, revision)) is not None:
        sizes = [file.size or 0 for file in info.siblings or () if file.rfilename in NAMES]
        _check_size(text, sum(sizes), max_bytes)
        try:
            root = _snapshot(name, revision, download_dir, None, False, None, NAMES)
        except DownloadError as error:
            raise HubUnreachable(str(error)) from None
    else:
        try:
            root = _snapshot(name, revision, download_dir, None, True, None, NAMES)
        except DownloadError:
            if offline:
                raise
            raise HubUnreachable(f"{text}: not in the cache, and the Hub ({hub_address()}) does not answer") from None
        missing = [each for each in NAMES[:2] if not (root / each).exists()]
        if missing and not offline:
            raise HubUnreachable(
                f"{text}: the cache lacks {' and '.join(missing)}, and the Hub ({hub_address()}) does not answer"
            )
    _check_size(text, sum(os.stat(root / each).st_size for each in NAMES if (root / each).exists()), max_bytes)
    return root


def _ask_hub(name: str, revision: str | None) -> ModelInfo | None:
    """What the Hub tells of a repository and its files; None if it does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # with the HTTPError of whichever client the library has
    faults = cast("tuple[type[Exception], ...]", (*HfHubHTTPError.__bases__, OSError))
    try:
        return HfApi().model_info(name, revision=revision, files_metadata=True, timeout=LIMITS_S)
    except GatedRepoError:
        raise DownloadError(f"{name}: accept its licence on the Hub, then give a token (HF_TOKEN)") from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise DownloadError(f"{name} at {revision or 'main'}: not on the Hub: {brief(error)}") from None
    except faults:
        return None


def _check_size(text: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise AdapterError(
            f"{text}: its files have {num_bytes} bytes, and adapters of at most {max_bytes} are downloaded; put its "
            "folder into lora_dir"
        )
