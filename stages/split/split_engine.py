"""`SplitEngine`: an engine whose step loop runs in a process of its own."""

from __future__ import annotations

from typing import Any

from ..config import EngineConfig
from ..engine.engine import Engine
from .remote_core import RemoteCore


class SplitEngine(Engine):
    """An `Engine` with a `RemoteCore`; `options` are those of `Engine`."""

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        super().__init__(config, core=RemoteCore, **options)
