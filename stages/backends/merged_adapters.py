"""The adapters that setting `merge_adapter` merges into a model while it is loaded. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...model.checkpoint import hub
from ..config import EngineConfig, parse_merge
from ..errors import ConfigError

if TYPE_CHECKING:
    from ...model.lora.merge import Merging


def merging_of(config: EngineConfig) -> Merging | None:
    """What changes the model's tensors while they are read; None without the setting. May download the adapters."""
    if not config.merge_adapter:
        return None
    from ...model.lora.merge import Merging  # only now, as most models are served as they are

    if config.load_format == "dummy":
        raise ConfigError("merge_adapter: needs the weights of a checkpoint, and load_format = dummy has none")
    return Merging([_resolved(config, text) for text in config.merge_adapter], hub.model_name(config.model))


def _resolved(config: EngineConfig, text: str) -> tuple[Path, float]:
    name, scale = parse_merge(text)
    cache = Path(config.download_dir) if config.download_dir else None
    return hub.resolve(name, download_dir=cache, offline=config.offline), scale


def refuse_merging(config: EngineConfig, why: str) -> None:
    """Raises `ConfigError` if adapters are to be merged into a model of another kind."""
    if config.merge_adapter:
        raise ConfigError(f"merge_adapter = {config.merge_adapter[0]}: {why}; merge it with peft (merge_and_unload)")
