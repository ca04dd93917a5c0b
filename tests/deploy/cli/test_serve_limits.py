"""`serve` on a system that allows few threads, and the end that a signal always brings."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from millrace.deploy.cli import main as cli
from millrace.deploy.cli import serve as serving
from millrace.deploy.config import ServerConfig
from millrace.runtime.workers.thread_start import ThreadNotStarted
from millrace.stages.config import EngineConfig
from millrace.stages.errors import NotStartedError
from millrace.stages.testing.scripted.engine import scripted_engine

ENDLESS = """
import asyncio, os, signal, time
from millrace.deploy.cli.serve import StopSignals
async def main():
    stop = StopSignals(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    {hang}
asyncio.run(main())
"""


@pytest.mark.parametrize("num_allowed", [0, 1, 2, 3, 9])
def test_a_server_with_few_threads_serves_or_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, num_allowed: int
) -> None:
    start, left, is_ready = threading.Thread.start, [num_allowed], []

    def counted(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    def ready(server: object, model_impl: str) -> None:
        is_ready.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(threading.Thread, "start", counted)
    monkeypatch.setattr(serving, "_print_ready", ready)
    server_config = ServerConfig(port=0)
    began_s = time.monotonic()
    try:
        code = asyncio.run(serving.serve(EngineConfig(), server_config, lambda config: scripted_engine()))
        assert is_ready and code == 0
    except ThreadNotStarted as error:
        assert not is_ready and "cannot be started (can't start new thread)" in str(error)
    finally:
        gc.unfreeze()
        gc.enable()
    assert time.monotonic() - began_s < 60.0
    assert bool(is_ready) == (num_allowed >= 2), "the device's thread, and the one that watches the loop"


@pytest.mark.slow
@pytest.mark.parametrize(("hang", "code"), [("await asyncio.Event().wait()", 1), ("time.sleep(60)", -signal.SIGALRM)])
def test_a_signal_ends_the_process_in_time_whatever_hangs(hang: str, code: int) -> None:
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ENDLESS.format(hang=hang)], timeout=99, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert time.monotonic() - began_s < 55.0
    if code == 1:
        assert "it did not stop within 0.2 s" in done.stderr


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), NotStartedError("the engine process ended before it was ready")]
)
def test_a_start_that_the_system_prevents_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: object) -> Callable[..., int]:
        raise error

    monkeypatch.setattr(serving, "run", fail)
    assert cli.main(["serve"]) == cli.STARTUP_ERROR_EXIT_CODE
    assert capsys.readouterr().err == f"millrace: {error}\n"
