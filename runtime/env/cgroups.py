"""The control groups this process is in, of both versions, and the memory they give it and leave it.

Knows where Linux has them mounted; elsewhere there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Those that may limit what `controller` counts, from its own to the outermost.

    A container sees its own as the root of the mount, while the path that /proc names may be the host's: folders that
    are not there are named all the same.
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
    """Bytes that all processes of a group may take, the least of all levels; None: no limit. Version 1 writes that as
    a number, which is larger than any machine's memory."""
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes until a group ends the process that takes more, the least of all levels and never negative; None: no
    limit. Pages of files count as left, as they are given up before that."""
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def read(path: Path) -> str:
    """What is in the file, stripped; nothing if it can not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each group that has one and what is used of it, pages of files aside."""
    for folder in folders("memory", root):
        for limit_name, used_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = read(folder / limit_name), read(folder / used_name)
            if limit.isdigit() and used.isdigit():  # "max": none
                counts = dict(line.split(" ", 1) for line in read(folder / "memory.stat").splitlines() if " " in line)
                in_files = sum(int(counts.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
                yield int(limit), max(0, int(used) - in_files)
