"""An engine process that loses its device when a file exists, which says how. See `test_replacement.py`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from millrace.runtime.env.env import Env
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.device.device_guard import PROBE_S, DeviceGuard
from millrace.stages.split import engine_process

LOSE = "LOST_PROCESS_FILE"
ERROR, HANG = "error", "hang"


def load(config: EngineConfig, env: Env, phases: Phases) -> Any:
    """The real model, whose forward pass fails when the file is there. The probe then fails or blocks, as it says."""
    loaded, device = engine_process.load(config, env, phases)
    forward, flag, how = loaded.runner.forward, Path(os.environ[LOSE]), ""

    def forward_or_fail(grant: Any) -> Any:
        nonlocal how
        if not how and flag.exists():
            how = flag.read_text()
            flag.unlink()  # the successor has another device
        if how:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return forward(grant)

    def probe() -> None:
        if how == HANG:
            threading.Event().wait()
        if how == ERROR:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore of it")

    loaded.runner.forward = forward_or_fail
    device.guard = DeviceGuard(probe, lambda: PROBE_S, device._note_lost)
    return loaded, device


if __name__ == "__main__":
    sys.exit(engine_process.main(sys.argv[1:], load))
