"""A child process of ours that is joined to this one by a socketpair, and lives no longer than this one.

The parent starts `python -m <module> <socket> <file>...`, numbers of descriptors that the child inherits, and nothing
else of ours. Knows processes and how they end. Refuses to know what goes over the socket: that is `link.py`.
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

ORPHAN_S = 5.0  # that a child whose parent has gone may take to end by itself


class Child:
    """One process, seen from its parent. `sock` is the parent's end."""

    def __init__(self, process: Process, sock: socket.socket) -> None:
        self.process = process
        self.sock = sock

    @classmethod
    async def start(cls, module: str, files: Sequence[int], environment: Mapping[str, str]) -> Child:
        """Starts it. What it writes to standard error goes where ours goes; it has no standard input or output."""
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
            except BaseException:
                ours.close()
                raise
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> str:
        """How it ended, in words: "signal 9 (SIGKILL)", "exit status 1"."""
        code = await self.process.wait()
        if code >= 0:
            return f"exit status {code}"
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"signal {-code}"

    def kill(self) -> None:
        """Ends it at once; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


def shared_file(num_bytes: int) -> int:
    """A descriptor of a file without a name, for memory that a child shares: gone with the last process that has it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("millrace")
    else:
        with tempfile.TemporaryFile() as named_nowhere:
            file = os.dup(named_nowhere.fileno())
    os.ftruncate(file, num_bytes)
    return file


# -- the child's side


def joined(arguments: Sequence[str]) -> tuple[socket.socket, list[int]]:
    """The socket and the files that the parent passed on. From now on Ctrl-C and SIGTERM, which a terminal or a
    supervisor sends to all of a group, are the parent's alone to heed; and this process ends when the parent does."""
    number, *files = map(int, arguments)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    sock = socket.socket(fileno=number)
    for descriptor in (number, *files):
        os.set_inheritable(descriptor, False)  # our own children have no part in it
    threading.Thread(target=_end_with_parent, args=(os.dup(number),), name="millrace-parent", daemon=True).start()
    return sock, files


def _end_with_parent(number: int) -> None:
    """Waits for the other end to be closed; who still hangs some seconds later, whatever holds the loop, is ended."""
    poll = select.poll()
    poll.register(number, select.POLLHUP)
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll()):
        pass
    threading.Event().wait(ORPHAN_S)
    os._exit(1)
