"""Processes that are forked from one which has imported all that they need: 0.6 s of processor time less for each.

A program calls `options_of_fork` where it begins, with its modules imported and nothing done, and runs with what that
returns. `Origin` starts it once; from then on `Origin.start` has it fork. A fork has the streams and the environment
that it is given, its own process id and exit code, and is like a started process but for `/proc/PID/cmdline`.

What is asked is in a file in memory, so of any size, and an answer has the number of what was asked: one that was
waited for no longer is told from the next. The process that forks answers errors, and when it ends it kills the
forks whose exit codes were not asked for.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 1 << 16  # of an answer
CAN_FORK = hasattr(os, "pidfd_open")


class Origin:
    """The process that forks, of one program. Safe to use from several threads. It ends with this process."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    @property
    def has_ended(self) -> bool:
        """Then it starts nothing more."""
        return self._process.poll() is not None

    def start(self, options: Mapping[str, Any], environment: Mapping[str, str], errors: int) -> ForkedProcess:
        """A fork that runs with these options, with pipes as stdin and stdout, and the file `errors` as stderr."""
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        with os.fdopen(stdin), os.fdopen(stdout, "w"):
            ours = os.fdopen(to_stdin, "w"), os.fdopen(from_stdout)
            try:
                asked = {"options": options, "environment": dict(environment)}
                return ForkedProcess(self, self._ask(asked, [stdin, stdout, errors]), *ours)
            except BaseException:
                for file in ours:
                    file.close()
                raise

    def exit_code(self, pid: int) -> int:
        """Of a fork that has ended."""
        return self._ask({"wait": pid}, [])

    def close(self) -> None:
        self._channel.close()
        self._process.wait(10)

    def _ask(self, what: Mapping[str, Any], files: list[int]) -> int:
        """Raises RuntimeError if it could not do that, or has ended."""
        with self._lock, os.fdopen(os.memfd_create("asked"), "w+b") as file:
            number = next(self._numbers)
            file.write(json.dumps({"number": number, **what}).encode())
            file.flush()
            with suppress(BrokenPipeError):  # then there is no answer
                socket.send_fds(self._channel, [b"?"], [file.fileno(), *files])
            while answer := self._channel.recv(MOST_BYTES):
                answered = json.loads(answer)
                if answered["number"] == number:
                    break
            else:
                raise RuntimeError(f"the process that forks has ended with {self._process.wait(10)}")
        if "error" in answered:
            raise RuntimeError(f"the process that forks: {answered['error']}")
        return int(answered["value"])


class ForkedProcess:
    """As much of `subprocess.Popen` as tests use."""

    def __init__(self, origin: Origin, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self._origin = origin
        self._lock = threading.Lock()
        self._pidfd = os.pidfd_open(pid)  # the origin keeps it until it is asked for its exit code
        weakref.finalize(self, os.close, self._pidfd)  # not before: a thread may wait for it
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs; of a signal the negative number."""
        with self._lock:
            if self.returncode is None and self._ends_within(0.0):
                self.returncode = self._origin.exit_code(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not self._ends_within(timeout):
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, None]:
        """What is left of its stdout, once it has ended."""
        with suppress(BrokenPipeError):  # of what was written and it did not read
            self.stdin.close()
        told = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        self.wait()
        return told, None

    def _ends_within(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def options_of_fork(channel: socket.socket) -> dict[str, Any]:
    """Forks as often as `Origin` asks, and returns in each fork; ends this process when that has ended."""
    codes: dict[int, int | None] = {}  # of each fork; None: not asked for yet
    while (message := socket.recv_fds(channel, 1, 4))[0]:
        files = message[1]
        number, pid = None, -1
        try:
            with os.fdopen(files.pop(0), "rb") as file:
                file.seek(0)
                asked = json.loads(file.read())
            number = asked["number"]
            if "wait" in asked:
                answer = {"value": _exit_code(asked["wait"], codes)}
            elif (pid := os.fork()) != 0:
                codes[pid] = None
                answer = {"value": pid}
        except Exception as error:
            answer = {"error": repr(error)}
        if pid == 0:
            channel.close()
            for place, descriptor in enumerate(files):
                os.dup2(descriptor, place)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(asked["environment"])
            return asked["options"]  # type: ignore[no-any-return]
        for descriptor in files:
            os.close(descriptor)
        with suppress(BrokenPipeError):  # the next message is the end then
            channel.send(json.dumps({"number": number, **answer}).encode())
    for pid in [pid for pid, code in codes.items() if code is None]:
        os.kill(pid, signal.SIGKILL)  # if it has ended, no other process has its id yet
    sys.exit(0)


def _exit_code(pid: int, codes: dict[int, int | None]) -> int:
    """Of a fork that has ended, as often as it is asked for."""
    code = codes[pid]
    if code is None:
        _, status = os.waitpid(pid, 0)
        code = codes[pid] = os.waitstatus_to_exitcode(status)
    return code
