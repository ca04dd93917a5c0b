"""As `scripted_serve`, with several fronts on one port, each with an engine of its own. MILLRACE_TEST_FRONTS: how many.

The fronts are in this process, so a connection lands at any of them, and what lives in one is asked of another as among
processes. `stats` are sums over all.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from millrace.deploy.cli.serve import STOP_S, StopSignals
from millrace.deploy.config import ServerConfig
from millrace.runtime.env.log import configure
from millrace.stages.testing.scripted.engine import SMALL, ScriptedEngine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.front_processes.local_fronts import local_fronts
from tests.deploy.scripted_serve import LoopLag, Talk, audited, last_words

SUMMED = ("live", "blocks_in_use", "blocks_quarantined", "admitted", "sequences")


class FrontsTalk(Talk):
    """Answers for all engines."""

    def __init__(self, engines: list[ScriptedEngine], lag: LoopLag, audit: Any) -> None:
        self._engines = engines
        super().__init__(engines[0], lag, audit)

    def _stats(self) -> dict[str, Any]:
        every = []
        for engine in self._engines:
            self._engine = engine
            every.append(super()._stats())
        sums = {name: sum(one[name] for one in every) for name in SUMMED}
        lags = {"lag_ms": max(one["lag_ms"] for one in every)}
        return every[0] | sums | lags | {"violations": [each for one in every for each in one["violations"]]}


async def serve_fronts(options: dict[str, Any], config: ServerConfig, count: int) -> int:
    """Serves until SIGTERM or SIGINT, and drains all fronts."""
    stop = StopSignals(config.lame_duck_s + config.shutdown_timeout_s + STOP_S)
    script = Script(**options.get("script", {}))
    if options.get("parrot"):
        script = replace(script, answer=last_words)
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(count):
            made = ScriptedEngine(
                replace(SMALL, **options.get("engine", {})), script, step_s=options.get("step_s", 0.0)
            )
            engines.append(await stack.enter_async_context(made))
        lag = LoopLag()
        watching = asyncio.create_task(lag.watch())
        stack.callback(watching.cancel)
        FrontsTalk(engines, lag, audited() if options.get("audit") else None)
        fronts = await stack.enter_async_context(local_fronts(engines, config, shares_port=True))
        first = fronts.servers[0]
        line = {"event": "ready", "url": first.url, "models": list(first.service.model_names), "pid": os.getpid()}
        print(json.dumps(line | {"model_impl": "millrace"}), flush=True)
        await stop.event.wait()
        await asyncio.gather(*(server.leave() for server in fronts.servers))
        await asyncio.gather(*(server.drain() for server in fronts.servers))
        await asyncio.gather(*(server.stop() for server in fronts.servers))
    stop.close()
    return 0


def main() -> int:
    options = json.loads(sys.argv[1])
    server = options.get("server", {})
    server.update({name: tuple(value) for name, value in server.items() if isinstance(value, list)})
    config = ServerConfig(**{"port": 0} | server)
    configure(config.log_format, config.log_level, with_error_messages=config.log_error_messages)
    gc.collect()
    return asyncio.run(serve_fronts(options, config, int(os.environ["MILLRACE_TEST_FRONTS"])))


if __name__ == "__main__":
    sys.exit(main())
