"""Why this process cannot listen on a port, and which process has it, as far as this user may see that."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def port_problem(host: str, port: int, error: OSError, host_flag: str = "--host", port_flag: str = "--port") -> str:
    """The error of an attempt to listen, with what to do; the flags are those that name the address."""
    where = f"cannot listen on {f'[{host}]' if ':' in host else host}:{port}"
    match error.errno:
        case errno.EADDRINUSE:
            return f"{where}: {_holder(port)} another {port_flag}"
        case errno.EACCES:
            return f"{where}: this user may not use the port; choose a {port_flag} from 1024 on"
        case errno.EADDRNOTAVAIL:
            return f"{where}: no network interface has this address; choose another {host_flag}"
        case _:
            flags = " or ".join(dict.fromkeys((host_flag, port_flag)))
            return f"{where}: {error.strerror or error}; try another {flags}"


def process_name(pid: int) -> str:
    """A process by its number and name; never its arguments, which may hold keys."""
    with contextlib.suppress(OSError):
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text('utf-8', 'replace').strip()})"
    return f"process {pid}"


def _holder(port: int) -> str:
    """What has a port, and what to do with it, up to the other port to choose."""
    listening, others = _sockets_at(port)
    pid = _owner_of(listening) if listening else _owner_of(others) if others else None
    if pid is not None:
        does = "listens there" if listening else "has a connection from there"
        if pid == os.getpid():
            return f"{process_name(pid)}, which is this one, {does}; choose"
        return f"{process_name(pid)} {does}; stop it, or choose"
    seen = "another process listens there" if listening else "the port is in use"
    return f"{seen} (as root, `ss -tanp 'sport = :{port}'` says by what); stop that, or choose"


def _sockets_at(port: int) -> tuple[set[str], set[str]]:
    """The sockets at a TCP port, as the descriptors of their processes name them: (that listen; others)."""
    listening, others = set[str](), set[str]()
    for table in TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port:
                    (listening if fields[3] == "0A" else others).add(f"socket:[{fields[9]}]")
    return listening, others


def _owner_of(inodes: set[str]) -> int | None:
    """A process that has one of these sockets, if this user may see it."""
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") in inodes:
                    return pid
    return None
