"""A window of torch's profiler sees what other threads do, as a server's device thread does."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from millrace.model.profiler import TorchProfiler


@pytest.mark.slow
def test_operators_of_all_threads_are_in_a_window_and_none_from_outside_it(tmp_path: Path):
    begun, window_is_open = threading.Event(), threading.Event()

    def work() -> None:
        torch.ones(3).cumsum(0)
        begun.set()
        window_is_open.wait()
        torch.ones(4, 4) @ torch.ones(4, 4)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    profiler = TorchProfiler()
    profiler.start()
    window_is_open.set()
    thread.join()
    profiler.stop(tmp_path / "profile.json")
    told = json.loads((tmp_path / "profile.json").read_text())
    names = {event.get("name") for event in told["traceEvents"]}
    assert "aten::mm" in names and "aten::cumsum" not in names
