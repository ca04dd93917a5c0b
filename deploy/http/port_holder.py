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
            return f"{where}: {_holder(port)}; stop it, or choose another {port_flag}"
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
    inodes = _listening(port)
    if inodes and (pid := _owner_of(inodes)) is not None:
        return f"{process_name(pid)} listens there"
    seen = "listens there" if inodes else "has the port"
    return f"a process that this user cannot see {seen} (as root, `ss -tlnp 'sport = :{port}'` names it)"


def _listening(port: int) -> set[str]:
    """The sockets that listen on a TCP port, as the descriptors of their processes name them."""
    inodes = set()
    for table in TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # it listens
                    inodes.add(f"socket:[{fields[9]}]")
    return inodes


def _owner_of(inodes: set[str]) -> int | None:
    """A process that has one of these sockets, if this user may see it."""
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") in inodes:
                    return pid
    return None
