"""An engine process that a request with the token `POISON` kills, each time that it runs. See `test_poison.py`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from millrace.runtime.env.env import Env
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.split import engine_process

POISON = 77


def load(config: EngineConfig, env: Env, phases: Phases) -> Any:
    """The real model, whose forward pass looks for the token among those of sequences that start."""
    loaded, device = engine_process.load(config, env, phases)
    forward = loaded.runner.forward

    def forward_or_die(grant: Any) -> Any:
        if any(POISON in started.token_ids[: started.num_prompt] for started in grant.started):
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(grant)

    loaded.runner.forward = forward_or_die
    return loaded, device


if __name__ == "__main__":
    sys.exit(engine_process.main(sys.argv[1:], load))
