"""The engine process of `--mode split`: `stages/split/engine_process.py` with the timed device."""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

from millrace.runtime.env.env import Env
from millrace.runtime.startup.phases import Phases
from millrace.stages.backends.cuda import build
from millrace.stages.config import EngineConfig
from millrace.stages.device.device import Device
from millrace.stages.split import engine_process
from tests.bench.simulated_gpu.device import TimedStreams, TimedWork

DEVICE = "MILLRACE_BENCH_TIMED_DEVICE"  # environment variable: JSON of [launch_us, speed]


def load(config: EngineConfig, env: Env, phases: Phases) -> tuple[Any, Device]:
    """As `engine_process.load`, on a timed device."""
    streams = TimedStreams(*json.loads(os.environ[DEVICE]))
    env.streams = streams
    with mock.patch.object(build, "TorchDeviceWork", TimedWork):
        loaded, device = engine_process.load(config, env, phases)
    loaded.runner._work.streams = streams
    return loaded, device


if __name__ == "__main__":
    sys.exit(engine_process.main(sys.argv[1:], load))
