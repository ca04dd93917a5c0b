"""A child process joined to its parent by a socketpair, which ends when the parent ends.

The parent starts `python -m <module> <socket> <file>...`. The arguments are numbers of the descriptors that the child
inherits; it inherits nothing else. The protocol on the socket is in `link.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence

from ..workers.thread_start import ThreadNotStarted, is_thread_shortage, start_thread
from .oom_score import ENGINE, raise_oom_score
from .transport import SocketTransport

ORPHAN_S = 5.0  # that a child may take to end by itself after its parent has gone


class Child:
    """A child process, seen from its parent. `sock` is the parent's end, and `transport` is over it."""

    link_timeout_s: float | None = None  # the end of the process ends its link, so the link needs no pings
    death_s = 1.0  # from the end of the link to that of the process

    def __init__(self, process: Process, sock: socket.socket) -> None:
        self.process = process
        self.sock = sock
        self.transport = SocketTransport(sock)

    @classmethod
    async def start(cls, module: str, files: Sequence[int], environment: Mapping[str, str]) -> Child:
        """Starts a child. It shares standard error and has no standard input or output."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-P", "-m", module, *map(str, (theirs.fileno(), *files)))
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    env=dict(environment),
                    pass_fds=(theirs.fileno(), *files),
                )
            except BaseException as error:
                ours.close()
                if is_thread_shortage(error):  # asyncio's own loop starts one for each child
                    raise ThreadNotStarted("that waits for a child process", error) from error
                raise
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> str:
        """Waits for its end and describes it: "signal 9 (SIGKILL)", "exit status 1"."""
        code = await self.process.wait()
        if code >= 0:
            return f"exit status {code}"
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"signal {-code}"

    def kill(self) -> None:
        """Kills it. Does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


def child_environment() -> dict[str, str]:
    """This process's environment and module path, for a child, without the server's secrets."""
    secret = ("MILLRACE_API_KEY", "MILLRACE_ADMIN_KEY", "MILLRACE_SSL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(secret)}
    ours = [path or os.getcwd() for path in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(
        path for path in ours if not path.startswith((sys.prefix, sys.base_prefix))
    )
    return environment


def shared_file(num_bytes: int) -> int:
    """The descriptor of an unnamed file, for shared memory.

    It is freed with the last process that has it open.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("millrace")
    else:
        with tempfile.TemporaryFile() as named_nowhere:
            file = os.dup(named_nowhere.fileno())
    os.ftruncate(file, num_bytes)
    return file


# -- the child's side


def joined(arguments: Sequence[str]) -> tuple[socket.socket, list[int]]:
    """The socket and the files that the parent passed.

    Ignores SIGINT and SIGTERM, which a terminal or a supervisor sends to the whole group: the parent handles them.
    The kernel will end this process before its parent when memory runs out. Call `end_with_parent` next.
    """
    raise_oom_score(ENGINE)
    number, *files = map(int, arguments)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    sock = socket.socket(fileno=number)
    for descriptor in (number, *files):
        os.set_inheritable(descriptor, False)  # children of this process must not keep it open
    return sock, files


def end_with_parent(sock: socket.socket) -> None:
    """Makes this process end when the parent does, whatever hangs. Raises `ThreadNotStarted`, and OSError."""
    number = os.dup(sock.fileno())
    try:
        start_thread(threading.Thread(target=_end_with_parent, args=(number,), name="millrace-parent", daemon=True))
    except ThreadNotStarted:
        os.close(number)
        raise


def _end_with_parent(number: int) -> None:
    """Waits for the parent to close the socket.

    If this process still lives ORPHAN_S later, ends it.
    """
    poll = select.poll()
    closed = select.POLLHUP | getattr(select, "POLLRDHUP", 0)  # over TCP the first comes only when both ends close
    poll.register(number, closed)
    while not any(event & (closed | select.POLLERR | select.POLLNVAL) for _, event in poll.poll()):
        pass
    threading.Event().wait(ORPHAN_S)
    os._exit(1)
