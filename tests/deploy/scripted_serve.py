"""A process that serves the scripted engine, as `millrace serve` would serve a model. For tests with raw sockets.

    python tests/deploy/scripted_serve.py '{"server": {...ServerConfig...}, "engine": {...}, "step_s": 0.01}'

With "parrot": true it answers a chat with the last user's own words, so that a test says what the model says.

Prints the ready line. Then each line on stdin is answered with a line of JSON on stdout: `stats` says how late the
event loop was since the last `stats` (it is sampled every 5 ms), and what the engine holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from millrace.deploy.config import ServerConfig
from millrace.deploy.serve import serve
from millrace.runtime.log import configure
from millrace.stages.config import EngineConfig
from millrace.stages.scripted import SPECIAL_TOKENS, Script
from millrace.stages.testing import SMALL, ScriptedEngine


class LoopLag:
    """How late a timer of 5 ms was, at worst.

    Time in which this process used no processor is not counted, but for a tenth: on a busy machine that is the time
    others had it, and what a loop of ours is to blame for is what it did itself.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        while True:
            began_s, used_s = time.monotonic(), time.process_time()
            await asyncio.sleep(0.005)
            late_s, own_s = time.monotonic() - began_s - 0.005, time.process_time() - used_s
            self.worst_s = max(self.worst_s, min(late_s, own_s), late_s / 10)

    def take(self) -> float:
        worst_s, self.worst_s = self.worst_s, 0.0
        return worst_s


class Talk:
    """Answers questions from stdin, on the loop."""

    def __init__(self, engine: ScriptedEngine, lag: LoopLag) -> None:
        self._engine = engine
        self._lag = lag
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._answer, line.strip())

    def _answer(self, question: str) -> None:
        if question == "stats":
            print(json.dumps(self._stats()), flush=True)

    def _stats(self) -> dict[str, Any]:
        parts = self._engine.parts
        return {
            "lag_ms": 1e3 * self._lag.take(),
            "live": len(parts.exit.live),
            "blocks_in_use": parts.allocate.allocator.pool.num_in_use,
            "blocks_quarantined": parts.allocate.allocator.pool.num_quarantined,
            "admitted": parts.intake.admission.num_admitted,
            "sequences": len(parts.schedule.scheduler.sequences),
            "violations": self._engine.model.violations,
            "tasks": len(asyncio.all_tasks()),
        }


def last_words(prompt: Sequence[int], seed: int) -> list[int]:
    """Of the last user's turn, up to its end."""
    begin = len(prompt) - list(reversed(prompt)).index(256 + SPECIAL_TOKENS.index("<|user|>"))
    return list(itertools.takewhile(lambda token_id: token_id < 256, prompt[begin:]))


@contextlib.asynccontextmanager
async def engine(options: dict[str, Any]) -> AsyncIterator[Any]:
    await asyncio.sleep(options.get("load_s", 0.0))
    config = replace(SMALL, **options.get("engine", {}))
    script = Script(**options.get("script", {}))
    if options.get("parrot"):
        script = replace(script, answer=last_words)
    async with ScriptedEngine(config, script, step_s=options.get("step_s", 0.0)) as scripted:
        lag = LoopLag()
        watching = asyncio.create_task(lag.watch())
        Talk(scripted, lag)
        try:
            yield scripted
        finally:
            watching.cancel()


def main() -> int:
    options = json.loads(sys.argv[1])
    server = options.get("server", {})
    server.update({name: tuple(value) for name, value in server.items() if isinstance(value, list)})
    server_config = ServerConfig(**{"port": 0} | server)
    with_messages = server_config.log_error_messages
    configure(server_config.log_format, server_config.log_level, with_error_messages=with_messages)
    gc.collect()
    return asyncio.run(serve(EngineConfig(), server_config, lambda _: engine(options)))


if __name__ == "__main__":
    sys.exit(main())
