"""The LoRA adapters of all engine processes: each has all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ..errors import Unavailable
from ..split.engine_core import EngineCore
from ..split.protocol import AdapterCard

LATE_S = 0.5  # at least, from one process's answer on; a process that answers later is not waited for

Reads = dict[asyncio.Future[AdapterCard], EngineCore]

log = get_logger("millrace.stages")


class FleetAdapters:
    """Reads and drops adapters in all engine processes. One that is being started reads them afterwards.

    A process that is not heard, as it is stopped or hangs, reads an adapter once it goes on; until then it gets no
    requests for it, and `on_late_read` says when it does. Its successor reads all.
    """

    def __init__(self, cores: Sequence[EngineCore], on_late_read: Callable[[], object] = lambda: None) -> None:
        self._cores, self._on_late_read = cores, on_late_read
        self._wanted: set[str] = set()  # digests that were read and not dropped
        for core in cores[1:]:
            core.adapters.share_origins(cores[0].adapters)

    async def read(self, env: Env, path: Path, name: str, digest: str) -> AdapterCard:
        """As `AdapterReader.read`. Raises what any process says of the adapter; `Unavailable` if none is there to.

        Afterwards each process that serves and is heard has it: also one that began to serve meanwhile.
        """
        found: AdapterCard | None = None
        late: set[int] = set()  # indices of processes
        while True:
            serving = [core for core in self._cores if core.is_serving and core.index not in late]
            lacking = [core for core in serving if not core.adapters.has(found)]
            if not lacking and found is not None:
                return found
            reads: Reads = {
                asyncio.ensure_future(core.adapters.read(env, path, name, digest)): core
                for core in lacking or self._cores[:1]
            }
            answers = await self._wait(env, reads, found is not None)
            for reading in reads.keys() - answers:
                log.warning("adapter.late", name=name, engine=reads[reading].index)
                late.add(reads[reading].index)
                reading.add_done_callback(partial(self._read_late, reads[reading], name))
            errors = [error for answer in answers if (error := answer.exception()) is not None]
            found = next((answer.result() for answer in answers if answer.exception() is None), found)
            refused = [error for error in errors if not isinstance(error, Unavailable)]
            if found is not None:
                self._wanted.add(found.digest)
            if refused and found is not None:
                self.drop(found.digest)
            if refused or (errors and found is None):
                raise (refused or errors)[0]

    def drop(self, digest: str) -> None:
        """Frees an adapter in all processes."""
        self._wanted.discard(digest)
        for core in self._cores:
            core.adapters.drop(digest)

    async def _wait(self, env: Env, reads: Reads, is_known: bool) -> list[asyncio.Future[AdapterCard]]:
        """The reads that are over, in the order of `reads`: all, but for those that take twice as long as another."""
        began_s, pending = env.now(), set(reads)
        try:
            while pending:
                limit_s = max(LATE_S, env.now() - began_s) if is_known else None
                done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                is_known = is_known or any(reading.exception() is None for reading in done)
        except asyncio.CancelledError:
            for reading in pending:
                reading.cancel()
            raise
        return [reading for reading in reads if reading.done()]

    def _read_late(self, core: EngineCore, name: str, reading: asyncio.Future[AdapterCard]) -> None:
        """A process that was not heard has read an adapter, or has refused it, or has ended."""
        if reading.cancelled():
            return
        error = reading.exception()
        if error is None and reading.result().digest not in self._wanted:
            core.adapters.drop(reading.result().digest)  # everywhere else it was dropped meanwhile
        elif error is None:
            self._on_late_read()
        elif not isinstance(error, Unavailable):  # else its process has ended, and the next one reads it
            log.error("adapter.lost", name=name, engine=core.index, reason=str(error))
