"""A child of the supervisor without a server or a model, for its tests: python -m tests...light_child.

what its front's host names  -> what it does
127.0.0.1                       is ready, and ends when the supervisor says so
127.0.0.2                       so too, and front 1 is never ready
localhost                       cannot start
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from millrace.deploy.front_processes.front_member import FrontMember
from millrace.deploy.front_processes.words import CoreReady, CoreSetup, FrontReady, StartFailed
from millrace.runtime.processes.child import joined


async def live() -> int:
    sock, _ = joined(sys.argv[1:])
    member = FrontMember(sock)
    member.link.start()
    setup: Any = await member.link.setup
    if isinstance(setup, CoreSetup):
        member.link.post(CoreReady())
    elif setup.server_config.host == "localhost":
        member.link.post(StartFailed("ConfigError", "it has no name"))
        member.close()
        return 1
    else:
        await member.has_engines.wait()
        member.tell_metrics(lambda: b'[["a", "counter", "", [["a_total", {}, 3.0]]]]')
        if (setup.server_config.host, setup.number) != ("127.0.0.2", 1):
            member.link.post(FrontReady(["light"], "millrace"))
    await member.link.stopping.wait()
    member.tell_last_metrics()
    member.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(live()))
