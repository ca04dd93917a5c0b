"""torch's profiler over a window of time, for all threads of the process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class TorchProfiler:
    """One window: call `start`, then `stop`, on one thread. Records operators of all threads, and the GPU's work."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        config = _ExperimentalConfig(profile_all_threads=True, trace_only=True)
        self._profile = profile(activities=activities, experimental_config=config)

    def start(self) -> None:
        """Starts recording."""
        self._profile.start()

    def stop(self, path: Path) -> None:
        """Stops recording and writes the trace to `path`, in the format of Chrome and Perfetto.

        Takes about as long as the window was.
        """
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))
