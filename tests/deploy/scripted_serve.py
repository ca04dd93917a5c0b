"""A process that serves the scripted engine, as `millrace serve` would serve a model. For tests with raw sockets.

    python tests/deploy/scripted_serve.py '{"server": {...ServerConfig...}, "engine": {...}, "step_s": 0.01}'

`--fork DESCRIPTOR` in the place of the options forks servers instead, as `forked.py` says.

With "parrot": true it answers a chat with the last user's own words, so that a test says what the model says.

Prints the ready line. Then each line on stdin is answered with a line of JSON on stdout: `stats` says how late the
event loop was since the last `stats` (it is sampled every 5 ms), and what the engine holds; `collect` gives back the
unused memory; `hold` keeps the loop for 0.2 s, as nothing may. With "audit": true, `arm` begins to watch for
what no request may cause, and `audit` says what was seen since it was last asked, how many stages were restarted,
and whether the engine is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from millrace.deploy.cli.serve import serve
from millrace.deploy.config import ServerConfig
from millrace.runtime.env.log import configure
from millrace.stages.config import EngineConfig
from millrace.stages.grammar import gate as grammar_gate
from millrace.stages.testing.scripted.byte_tokenizer import SPECIAL_TOKENS
from millrace.stages.testing.scripted.engine import SMALL, ScriptedEngine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.forked import options_of_fork
from tests.security.audit import Audit
from tests.security.audited_helper import complaints

HELPER = "tests.security.audited_helper"
LATE = ("millrace.deploy.server.server", "encodings.idna")  # what a server imports while it starts


class LoopLag:
    """How late a timer of 5 ms was, at worst; and a clock of what it measures.

    Time in which this process used no processor is not counted, but for a tenth: on a busy machine that is the time
    others had it, and what a loop of ours is to blame for is what it did itself.

    `clock_s` goes no further than 10 ms and what this process computed from one ring of the timer to the next. It
    stands still while others have the processor, so it tells how long something took from how long it had to wait.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.clock_s = 0.0

    async def watch(self) -> None:
        while True:
            began_s, used_s = time.monotonic(), time.process_time()
            await asyncio.sleep(0.005)
            late_s, own_s = time.monotonic() - began_s - 0.005, time.process_time() - used_s
            self.worst_s = max(self.worst_s, min(late_s, own_s), late_s / 10)
            self.clock_s += min(late_s + 0.005, own_s + 0.010)

    def take(self) -> float:
        worst_s, self.worst_s = self.worst_s, 0.0
        return worst_s


class Talk:
    """Answers questions from stdin, on the loop."""

    def __init__(self, engine: ScriptedEngine, lag: LoopLag, audit: Audit | None) -> None:
        self._engine = engine
        self._lag = lag
        self._audit = audit
        self._answers: dict[str, Callable[[], Any]] = {
            "stats": self._stats,
            "collect": _collect,
            "hold": lambda: time.sleep(0.2),
            "arm": self._arm,
            "audit": self._audited,
        }
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._answer, line.strip())

    def _answer(self, question: str) -> None:
        print(json.dumps(self._answers[question]()), flush=True)

    def _arm(self) -> None:
        assert self._audit is not None, "the server was started without audit"
        self._audit.is_armed = True

    def _audited(self) -> dict[str, Any]:
        """What was seen in this process and in the helpers it started; and how the engine is."""
        seen = [] if self._audit is None else self._audit.take()
        with contextlib.suppress(FileNotFoundError):
            seen += complaints(os.getpid()).read_text().splitlines()
            complaints(os.getpid()).unlink()
        pipeline = self._engine.pipeline
        num_restarts = sum(runner.num_restarts for runner in pipeline.runners.values())
        return {"seen": seen, "num_restarts": num_restarts, "is_ready": pipeline.health.is_ready}

    def _stats(self) -> dict[str, Any]:
        parts = self._engine.parts
        return {
            "lag_ms": 1e3 * self._lag.take(),
            "clock_s": self._lag.clock_s,
            "live": len(parts.exit.live),
            "blocks_in_use": parts.allocate.allocator.pool.num_in_use,
            "blocks_quarantined": parts.allocate.allocator.pool.num_quarantined,
            "admitted": parts.intake.admission.num_admitted,
            "sequences": len(parts.schedule.scheduler.sequences),
            "violations": self._engine.model.violations,
            "tasks": len(asyncio.all_tasks()),
            "allocated_blocks": sys.getallocatedblocks(),
        }


def _collect() -> None:
    """Objects in cycles, and what the C library keeps of memory that was freed, where it can be asked for it."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def audited() -> Audit:
    """A hook in this process, and one in each helper in which it has grammars tried."""
    grammar_gate.HELPER = HELPER
    return Audit(allowed=[f"subprocess.Popen {sys.executable} -P -m {HELPER}"])


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
        Talk(scripted, lag, audited() if options.get("audit") else None)
        try:
            yield scripted
        finally:
            watching.cancel()


def main() -> int:
    if sys.argv[1] == "--fork":
        for module in LATE:
            importlib.import_module(module)
        options = options_of_fork(socket.socket(fileno=int(sys.argv[2])))
    else:
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
