"""The cgroups of this process (v1 and v2): their folders, memory limits and free memory.

Reads where Linux mounts them; on other systems there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The cgroup folders that may limit `controller`, from this process's own to the outermost.

    A container sees its own cgroup as the root of the mount, while /proc may name the host's path. So folders that do
    not exist are yielded too.
    """
    mounts = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        bases = (mounts / controllers, mounts / controller) if controllers else (mounts / "unified", mounts)
        base = next((base for base in bases if base.is_dir()), None)
        if base is None:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:length])


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that all processes of a cgroup may use, the least of all levels; None: no limit.

    Version 1 writes "no limit" as a number larger than any machine's memory.
    """
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes left until a cgroup kills a process; None: no limit.

    The least of all levels, never negative. File pages count as free, as the kernel drops them first.
    """
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def read(path: Path) -> str:
    """The stripped content of a file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """(Limit, bytes used without file pages) of each cgroup that has a limit."""
    for folder in folders("memory", root):
        for limit_name, used_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = read(folder / limit_name), read(folder / used_name)
            if limit.isdigit() and used.isdigit():  # "max" means no limit
                counts = dict(line.split(" ", 1) for line in read(folder / "memory.stat").splitlines() if " " in line)
                in_files = sum(int(counts.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
                yield int(limit), max(0, int(used) - in_files)
