"""The grammars of live requests, compiled once in the engine process.

The front process has tried them before.
"""

from __future__ import annotations

import asyncio

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.exit import Outbox
from ..grammar.compiled import MAX_BYTES, MAX_GRAMMARS, Grammars
from ..structured_outputs import StructuredOutputs

NUM_BYTES = MAX_BYTES // MAX_GRAMMARS  # assumed for each; the front process counts the actual bytes

log = get_logger("millrace.stages")


class KeptGrammars:
    """Compiles a grammar when its first request arrives, and keeps it while it is used.

    Compiles in a thread. An answer that starts before that compiles the grammar by itself.
    """

    def __init__(self, grammars: Grammars, env: Env) -> None:
        self._grammars = grammars
        self._env = env
        self._live: dict[str, StructuredOutputs] = {}  # by request id
        self._held: set[str] = set()  # those whose grammar is compiled
        self._compiling: dict[StructuredOutputs, asyncio.Task[None]] = {}

    def request_came(self, request_id: str, structured: StructuredOutputs) -> None:
        """A prompt of the request has arrived: starts compiling its grammar, if needed."""
        if request_id in self._live:
            return
        self._live[request_id] = structured
        if self._grammars.use(structured):
            self._held.add(request_id)
        elif structured not in self._compiling:
            task = self._compiling[structured] = asyncio.ensure_future(self._compile(structured))
            task.add_done_callback(lambda done: self._compiled(structured, done))

    def request_ended(self, outbox: Outbox[object], cause: str, error: BaseException | None) -> None:
        """Releases the grammar of a request that ended."""
        structured = self._live.pop(outbox.request_id, None)
        if structured is not None and outbox.request_id in self._held:
            self._held.discard(outbox.request_id)
            self._grammars.release(structured)

    async def aclose(self) -> None:
        """Cancels the running compilations."""
        for task in list(self._compiling.values()):
            task.cancel()
        await asyncio.gather(*self._compiling.values(), return_exceptions=True)

    def _compiled(self, structured: StructuredOutputs, task: asyncio.Task[None]) -> None:
        self._compiling.pop(structured, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # each answer will fail and log it
            log.warning("grammar.not_kept", kind=structured.kind, error=type(error).__name__)

    async def _compile(self, structured: StructuredOutputs) -> None:
        template = await self._env.run_in_thread(self._grammars.compile, structured)
        if self._grammars.add(structured, template, NUM_BYTES):
            waiting = [name for name, wanted in self._live.items() if wanted == structured and name not in self._held]
            self._held.update(name for name in waiting if self._grammars.use(structured))
