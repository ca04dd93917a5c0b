"""A server without requests costs next to nothing."""

from __future__ import annotations

import time

from tests.deploy.running import RunningServer
from tests.load.process import Figures, Held

MAX_SHARE = 0.01  # of one core


def run(seconds: float = 30.0) -> Figures:
    """Serves nothing for so long. `complaints` must be empty."""
    with RunningServer() as server:
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        time.sleep(2.0)
        before = Held.by(server.process.pid)
        time.sleep(seconds)
        used_s = Held.by(server.process.pid).cpu_s - before.cpu_s
    share = used_s / seconds
    complaints = [f"{share:.2%} of a core: at most {MAX_SHARE:.0%}"] if share > MAX_SHARE else []
    return {"seconds": seconds, "share_of_a_core": round(share, 4), "complaints": complaints}
