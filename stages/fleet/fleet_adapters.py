"""The LoRA adapters of all engine processes: each has all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from ...runtime.env.env import Env
from ..errors import Unavailable
from ..split.engine_core import EngineCore
from ..split.protocol import AdapterCard


class FleetAdapters:
    """Reads and drops adapters in all engine processes. One that is being started reads them afterwards."""

    def __init__(self, cores: Sequence[EngineCore]) -> None:
        self._cores = cores
        for core in cores[1:]:
            core.adapters.share_origins(cores[0].adapters)

    async def read(self, env: Env, path: Path, name: str, digest: str) -> AdapterCard:
        """As `AdapterReader.read`. Raises what any process says of the adapter; `Unavailable` if none is there to.

        Afterwards each process that serves has it: also one that began to serve meanwhile.
        """
        found: AdapterCard | None = None
        while True:
            lacking = [core for core in self._cores if core.is_serving and not core.adapters.has(found)]
            if not lacking and found is not None:
                return found
            reads = (core.adapters.read(env, path, name, digest) for core in lacking or self._cores[:1])
            answers = await asyncio.gather(*reads, return_exceptions=True)
            found = next((answer for answer in answers if isinstance(answer, AdapterCard)), found)
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            refused = [error for error in errors if not isinstance(error, Unavailable)]
            if refused and found is not None:
                self.drop(found.digest)
            if refused or (errors and found is None):
                raise (refused or errors)[0]

    def drop(self, digest: str) -> None:
        """Frees an adapter in all processes."""
        for core in self._cores:
            core.adapters.drop(digest)
