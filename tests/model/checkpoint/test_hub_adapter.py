"""Adapters of the Hub: which files are downloaded, of which size, and what is said without the Hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from millrace.model.checkpoint.hub_adapter import NAMES, resolve_adapter
from millrace.model.errors import AdapterError, DownloadError, HubUnreachable

SIZES = {"adapter_config.json": 10, "adapter_model.safetensors": 90, "full/model.safetensors": 10**12, "x.json": 10**12}


class Hub:
    """Stands for the Hub and its cache; `asked` are the downloads."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.asked, self.is_there, self.is_cached = root / ("c" * 40), list[dict[str, Any]](), True, True
        self.root.mkdir()
        for name in NAMES[:2]:
            (self.root / name).write_bytes(bytes(SIZES[name]))
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def model_info(self, name: str, revision: str | None, files_metadata: bool, timeout: tuple[float, float]) -> Any:
        if not self.is_there:
            raise OSError("no route")
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in SIZES.items()]
        return SimpleNamespace(siblings=files)

    def download(self, name: str, **values: Any) -> str:
        self.asked.append({"name": name, **values})
        if not (self.is_cached if values["local_files_only"] else self.is_there):
            raise LocalEntryNotFoundError("not here")
        return str(self.root)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return Hub(tmp_path, monkeypatch)


def test_only_an_adapters_own_files_are_downloaded_and_no_large_ones(hub: Hub) -> None:
    assert resolve_adapter("me/two@v1", max_bytes=100) == hub.root
    (asked,) = hub.asked
    assert (asked["name"], asked["revision"], asked["allow_patterns"]) == ("me/two", "v1", list(NAMES))
    with pytest.raises(AdapterError, match=r"me/two@v1: its files have 100 bytes, .* at most 99"):
        resolve_adapter("me/two@v1", max_bytes=99)
    assert len(hub.asked) == 1, "the size is known before"
    resolve_adapter("me/two@v1", "c" * 40)
    assert hub.asked[-1]["revision"] == "c" * 40


def test_without_the_hub_the_cache_serves_and_else_the_error_passes(hub: Hub) -> None:
    hub.is_there = False
    assert resolve_adapter("me/two") == hub.root and hub.asked[-1]["local_files_only"]
    (hub.root / NAMES[1]).unlink()
    with pytest.raises(HubUnreachable, match=r"me/two: the cache lacks adapter_model\.safetensors, and the Hub \(http"):
        resolve_adapter("me/two")
    hub.is_cached = False
    with pytest.raises(HubUnreachable, match="me/two: not in the cache"):
        resolve_adapter("me/two")
    with pytest.raises(DownloadError, match="offline mode") as refused:
        resolve_adapter("me/two", offline=True)
    assert not isinstance(refused.value, HubUnreachable)
