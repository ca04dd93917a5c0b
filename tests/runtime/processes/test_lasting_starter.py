"""A child ends with its parent, also a stopped one, and not with the thread that asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.runtime.processes.lasting_starter import LastingStarter

ROOT = Path(__file__).parents[3]
CHILD = "from millrace.runtime.processes.lasting_starter import end_with_starter; end_with_starter();"
CHILD += "print(1, flush=True); import time; time.sleep(600)"
PARENT = f"""
import subprocess, sys, threading, time
from millrace.runtime.processes.lasting_starter import LastingStarter
starter = LastingStarter()
def ask():
    child = starter.start(lambda: subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE))
    child.stdout.read(1)
    print(child.pid, flush=True)
thread = threading.Thread(target=ask)
thread.start()
thread.join()
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")


def state(pid: int) -> str:
    """R, S, T (stopped), Z; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30.0
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.slow
def test_a_stopped_child_ends_with_its_parent_that_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: state(pid) == "S")  # the thread that asked for it has ended
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(pid) == "T")
    finally:
        parent.kill()
        parent.wait()
    until(lambda: state(pid) in ("Z", ""))


def test_what_a_start_raises_is_raised_where_it_was_asked_for() -> None:
    starter = LastingStarter()
    with pytest.raises(FileNotFoundError, match="no_such_file"):
        starter.start(lambda: subprocess.Popen(["/no_such_file"]))
    assert starter.start(threading.get_ident) != threading.get_ident()
    starter.close()
