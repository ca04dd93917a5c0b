"""torch's profiler over a window of time, whatever threads work in it. Knows torch, and no server."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class TorchProfiler:
    """One window: `start`, then `stop`, both on one thread. Operators of all threads are in it, and what a GPU does."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        config = _ExperimentalConfig(profile_all_threads=True, trace_only=True)
        self._profile = profile(activities=activities, experimental_config=config)

    def start(self) -> None:
        """From now on."""
        self._profile.start()

    def stop(self, path: Path) -> None:
        """Writes what was seen since to `path`, as Chrome and Perfetto read it. Takes about as long as it was on."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))
