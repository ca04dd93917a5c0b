"""The cores this process may compute on, their idle time, and priorities of single threads.

Reads the affinity mask, the cgroup quotas of both versions and the topology (two CPUs on one core). Other systems than
Linux give only a number of CPUs, and no thread priorities.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from . import cgroups
from .cgroups import read

FIRST = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0  # this process's nice value at start
LOWER = 5  # added to the nice value: a third of the time that a compute thread gets on the same core
_narrowed: dict[frozenset[int], frozenset[int]] = {}  # masks that `keep_off` set -> the masks before


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPUs that this process may use."""

    allowed: tuple[int, ...]  # CPU numbers
    cores: tuple[int, ...]  # the first CPU of each core among them
    quota: float | None = None  # CPUs' worth of time that the cgroups allow; None: no limit

    @classmethod
    def of_this_process(cls, root: Path = Path("/")) -> Cpus:
        """Read from `/proc` and `/sys` under `root`."""
        if not hasattr(os, "sched_getaffinity"):
            allowed = tuple(range(os.cpu_count() or 1))
            return cls(allowed, allowed)
        allowed = tuple(sorted(_before(os.sched_getaffinity(0))))
        return cls(allowed, tuple(_cores(root, allowed)), quota(root))


@dataclass(frozen=True, slots=True)
class ComputeThreads:
    """How many threads compute, and on which CPUs."""

    count: int
    pinned: tuple[int, ...]  # a CPU for each thread; empty: not pinned
    reason: str  # of both, for the log

    @classmethod
    def choose(
        cls, requested: int | None, cpus: Cpus, environment: Mapping[str, str] = MappingProxyType({})
    ) -> ComputeThreads:
        """The `requested` number, or that of OMP_NUM_THREADS.

        By default one per core, at most what the quota keeps running.

        Threads are pinned only if they take every core or CPU of this process. With fewer, other processes may use
        the first CPUs (containers without CPUs of their own all number them alike), so the kernel places them better.
        """
        num_cores, by_environment = len(cpus.cores), environment.get("OMP_NUM_THREADS", "")
        if requested is not None:
            count, reason = requested, f"threads = {requested}"
        elif by_environment.isdigit() and int(by_environment):
            requested = count = int(by_environment)
            reason = f"OMP_NUM_THREADS = {count}"
        elif cpus.quota is not None and cpus.quota < num_cores:
            count, reason = max(1, int(cpus.quota)), f"the cgroup's quota of {cpus.quota:g} CPUs"
        else:
            count, reason = num_cores, f"one for each of {num_cores} cores"
        if len(cpus.allowed) > num_cores and requested is None:
            reason += f" ({len(cpus.allowed)} CPUs)"
        is_throttled = cpus.quota is not None and cpus.quota < count
        for some in (cpus.cores, cpus.allowed):
            if count == len(some) and not is_throttled:
                return cls(count, some, reason)
        return cls(count, (), f"{reason}; not pinned, as that is not all of {num_cores} cores")


def _cores(root: Path, allowed: tuple[int, ...]) -> Iterator[int]:
    """The first allowed CPU of each core."""
    seen: set[str] = set()
    for cpu in allowed:
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = read(path) or str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            yield cpu


# -- quotas


def quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the cgroups allow, the least of all levels; None: no limit."""
    limits = [limit for folder in cgroups.folders("cpu", root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    """Quota divided by period, from version 2's file or version 1's two.

    "max" and -1 mean no limit.
    """
    text = read(folder / "cpu.max") or " ".join(
        read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    )
    numbers = text.split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers) or not int(numbers[1]):
        return None
    return int(numbers[0]) / int(numbers[1])


# -- idle time


def idle_ns(cpus: Collection[int], root: Path = Path("/")) -> tuple[int, int] | None:
    """(Idle time, total time) of those CPUs in ns, each summed since the machine's start.

    None if `/proc/stat` does not say. A call takes 0.1 to 0.3 ms on 2 CPUs, more with more CPUs. The resolution is 10
    ms.
    """
    names, idle, total = {f"cpu{cpu}" for cpu in cpus}, 0, 0
    for line in read(root / "proc/stat").splitlines():
        name, *fields = line.split()[:9] or [""]
        if name not in names:
            continue
        if len(fields) < 4 or not all(field.isdigit() for field in fields):
            return None
        names.remove(name)
        ticks = [int(field) for field in fields]
        idle += sum(ticks[3:5])  # idle, and waiting for I/O
        total += sum(ticks)
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK") if total else 0
    return None if names or not total else (idle * tick_ns, total * tick_ns)


# -- priorities


def lower_priority(native_id: int | None = None) -> bool:
    """Lowers a thread's priority below that of the compute threads. Default: the calling thread.

    It keeps a small share when they use every core. Threads that it starts later inherit this. It cannot be undone;
    calling it again changes nothing.

    Returns False where threads have no own priorities. NOTE: outside Linux, `nice` applies to the whole process.
    """
    if sys.platform != "linux":
        return False
    thread = threading.get_native_id() if native_id is None else native_id
    try:
        os.setpriority(os.PRIO_PROCESS, thread, FIRST + LOWER)
    except OSError:  # it has ended
        return False
    return True


def keep_off(cpu: int, native_id: int | None = None) -> bool:
    """Bars a thread, and those it starts later, from one CPU. Default: the calling thread.

    The compute thread pinned to that CPU then need not wait for them.

    Returns False and changes nothing where the thread may not run on `cpu` or only there, and where threads have no
    affinity. `Cpus.of_this_process` still counts the CPU for an engine that such a thread makes later.
    """
    if not hasattr(os, "sched_getaffinity"):
        return False
    thread = threading.get_native_id() if native_id is None else native_id
    try:
        before = _before(os.sched_getaffinity(thread))
        left = before - {cpu}
        if not left or left == before:
            return False
        os.sched_setaffinity(thread, left)
    except OSError:  # it has ended
        return False
    _narrowed[left] = before
    return True


def _before(mask: Iterable[int]) -> frozenset[int]:
    """The CPUs that a thread with this mask had before `keep_off`."""
    given = frozenset(mask)
    return _narrowed.get(given, given)
