"""Which cores this process may compute on, and for how much of the time: the affinity mask, cgroup quotas of both
versions, cores that are two CPUs, and for how long any had nothing to do. And priorities of single threads, where the
system has them.

Knows Linux; elsewhere there is only a number of CPUs, and no priority of a thread.
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

FIRST = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0  # of this process, when it began
LOWER = 5  # more nice than that: a third of the time of a thread of ours that computes on the same core
_narrowed: dict[frozenset[int], frozenset[int]] = {}  # masks that `keep_off` left threads, and what they had before


@dataclass(frozen=True, slots=True)
class Cpus:
    """What there is to compute on."""

    allowed: tuple[int, ...]  # CPUs, by their numbers
    cores: tuple[int, ...]  # the first CPU of each core among them
    quota: float | None = None  # CPUs' worth of time that cgroups give; None: no limit

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
    """How many threads compute, and where."""

    count: int
    pinned: tuple[int, ...]  # a CPU for each; empty: wherever there is room
    reason: str  # of both

    @classmethod
    def choose(
        cls, asked: int | None, cpus: Cpus, environment: Mapping[str, str] = MappingProxyType({})
    ) -> ComputeThreads:
        """As many as were asked for, here or by OMP_NUM_THREADS, or one a core, and no more than the quota keeps
        running.

        They are pinned where they take every core there is for this process. Where they take fewer, others may be on
        the first ones (containers without CPUs of their own all number them alike), and the system knows better.
        """
        num_cores, by_environment = len(cpus.cores), environment.get("OMP_NUM_THREADS", "")
        if asked is not None:
            count, reason = asked, f"threads = {asked}"
        elif by_environment.isdigit() and int(by_environment):
            asked = count = int(by_environment)
            reason = f"OMP_NUM_THREADS = {count}"
        elif cpus.quota is not None and cpus.quota < num_cores:
            count, reason = max(1, int(cpus.quota)), f"the cgroup's quota of {cpus.quota:g} CPUs"
        else:
            count, reason = num_cores, f"one for each of {num_cores} cores"
        if len(cpus.allowed) > num_cores and asked is None:
            reason += f" ({len(cpus.allowed)} CPUs)"
        is_throttled = cpus.quota is not None and cpus.quota < count
        for some in (cpus.cores, cpus.allowed):
            if count == len(some) and not is_throttled:
                return cls(count, some, reason)
        return cls(count, (), f"{reason}; not pinned, as that is not all of {num_cores} cores")


def _cores(root: Path, allowed: tuple[int, ...]) -> Iterator[int]:
    """The CPUs that are the first of their core, of those that are allowed."""
    seen: set[str] = set()
    for cpu in allowed:
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = read(path) or str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            yield cpu


# -- quotas


def quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the cgroups of this process leave it, the least of all levels; None: no limit."""
    limits = [limit for folder in cgroups.folders("cpu", root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    """Quota over period, in version 2's file or version 1's two; "max" and -1 are no limit."""
    text = read(folder / "cpu.max") or " ".join(
        read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    )
    numbers = text.split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers) or not int(numbers[1]):
        return None
    return int(numbers[0]) / int(numbers[1])


# -- what others leave


def idle_ns(cpus: Collection[int], root: Path = Path("/")) -> tuple[int, int] | None:
    """(For how long they had nothing to run, how long that is of) of those CPUs, each added up since the machine was
    started, ns. None where `/proc/stat` does not tell. Takes 0.1 to 0.3 ms (2 CPUs of an EPYC), more where there are
    more, and grows in steps of a hundredth of a second."""
    names, idle, total = {f"cpu{cpu}" for cpu in cpus}, 0, 0
    for line in read(root / "proc/stat").splitlines():
        name, *fields = line.split()[:9] or [""]
        if name not in names:
            continue
        if len(fields) < 4 or not all(field.isdigit() for field in fields):
            return None
        names.remove(name)
        ticks = [int(field) for field in fields]
        idle += sum(ticks[3:5])  # idle, and idle until a disk answers
        total += sum(ticks)
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK") if total else 0
    return None if names or not total else (idle * tick_ns, total * tick_ns)


# -- priorities


def lower_priority(native_id: int | None = None) -> bool:
    """Has a thread of this process, by default the calling one, run when those that compute leave room, and have a
    small share where they do not. Threads that it starts from now on are like it. There is no way back; again changes
    nothing.

    False where threads have no priorities of their own. NOTE: elsewhere than on Linux `nice` is the process's.
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
    """Has a thread of this process, by default the calling one, and those that it starts from now on, run on other CPUs
    than this one: whoever is pinned to it need not wait for them when he has something to do.

    False, and nothing is changed, where the thread was not given this CPU, or no other, and where threads are not kept
    to CPUs. An engine that such a thread makes later has all of them.
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
    """The CPUs that a thread with this mask was given, less none that it keeps off."""
    given = frozenset(mask)
    return _narrowed.get(given, given)
