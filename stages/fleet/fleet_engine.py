"""`FleetEngine`: an engine whose step loop runs in several processes, each with all of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import EngineConfig
from ..engine.engine import Engine
from ..split.remote_core import RemoteCore
from .fleet_processes import FleetProcesses


class FleetEngine(Engine):
    """An `Engine` with `data_parallel_size` engine processes. It takes requests while one of them serves.

    `options` are those of `Engine`.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        super().__init__(config, core=partial(RemoteCore, make_processes=FleetProcesses), **options)
