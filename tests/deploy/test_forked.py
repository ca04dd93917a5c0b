"""What goes wrong with one fork, or with what it is asked, hurts no later one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import running
from tests.deploy.forked import CAN_FORK, ForkedProcess, Origin

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="this system has no pidfd_open")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, socket, sys
from tests.deploy import running
from tests.deploy.forked import options_of_fork
options = options_of_fork(socket.socket(fileno=int(sys.argv[1])))
print(os.getpid(), len(os.environ.get("LONG", "")), flush=True)
sys.stdin.read()
sys.exit(options["code"])
"""


@pytest.fixture
def origin() -> Iterator[Origin]:
    origin = Origin([sys.executable, "-c", PROGRAM], ROOT, os.environ | {"PYTHONPATH": str(ROOT)})
    yield origin
    origin.close()


def started(origin: Origin, code: int = 0, **environment: str) -> tuple[ForkedProcess, int]:
    """A fork that says who it is, and what it says of its environment."""
    fork = origin.start({"code": code}, os.environ | environment, 2)
    pid, length = fork.stdout.readline().split()
    assert int(pid) == fork.pid, "the answer is of another fork"
    return fork, int(length)


def test_an_interrupted_start_leaves_later_forks_their_own_process_ids(origin: Origin, monkeypatch):
    """As by SIGALRM of a test that takes too long: between the question and the answer."""
    started(origin)[0].communicate()

    class Interrupted:
        def __init__(self, channel: Any) -> None:
            self.channel = channel

        def __getattr__(self, name: str) -> Any:
            return getattr(self.channel, name)

        def recv(self, size: int) -> bytes:
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(origin, "_channel", Interrupted(origin._channel))
        with pytest.raises(InterruptedError):
            origin.start({"code": 0}, os.environ, 2)
    forks = [started(origin, code)[0] for code in (3, 4)]
    forks[0].kill()
    assert (forks[0].wait(60), forks[1].poll()) == (-signal.SIGKILL, None), "the other one was killed"
    forks[1].communicate()
    assert forks[1].returncode == 4


def test_an_environment_of_half_a_megabyte_reaches_a_fork(origin: Origin):
    fork, length = started(origin, LONG="x" * 500_000)
    fork.communicate()
    assert (length, fork.returncode) == (500_000, 0)


def test_threads_that_wait_for_one_fork_all_get_its_exit_code(origin: Origin):
    fork, _ = started(origin, 7)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(fork.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    fork.stdin.close()
    for thread in threads:
        thread.join()
    assert codes == [7, 7, 7]
    assert origin.exit_code(fork.pid) == 7, "asked again, as after an interrupted answer"
    started(origin)[0].communicate()


def test_what_the_origin_cannot_do_it_says_and_goes_on(origin: Origin):
    with pytest.raises(RuntimeError, match="KeyError"):
        origin.exit_code(os.getpid())
    fork, _ = started(origin, 5)
    fork.communicate()
    assert fork.returncode == 5


def test_a_fork_ends_with_its_origin(origin: Origin):
    fork, _ = started(origin)
    origin._channel.close()
    assert fork._ends_within(60.0)
    assert origin._process.wait(60) == 0


@pytest.mark.slow
def test_a_server_starts_after_the_origin_of_the_last_one_was_killed(monkeypatch):
    if not running.is_forked(None):
        pytest.skip("servers with two fronts, and those of full counts, are not forked")
    monkeypatch.setattr(running, "_origins", {})
    with running.RunningServer() as server:
        assert isinstance(server.process, ForkedProcess)
    (origin,) = running._origins.values()
    origin._process.kill()
    origin._process.wait(60)
    with running.RunningServer() as server:
        assert server.get("/health").status == 200


def test_outside_of_a_test_a_server_is_no_fork(monkeypatch):
    """So what loads and benchmarks measure by a command is a process as users start it."""
    commands = [None, *running.FORKED_COMMANDS]
    if not running.is_forked(None):
        pytest.skip("servers with two fronts, and those of full counts, are not forked")
    assert all(running.is_forked(command) for command in commands)
    with monkeypatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")
        assert not any(running.is_forked(command) for command in commands)
