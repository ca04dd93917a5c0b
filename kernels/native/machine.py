"""What this process may use of the machine: instruction sets, processors, threads."""

from __future__ import annotations

import math
import os
import platform
from functools import cache
from pathlib import Path

# best first; what each needs of /proc/cpuinfo
INSTRUCTION_SETS: dict[str, frozenset[str]] = {
    "avx512_bf16": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "avx2": frozenset({"avx2", "fma"}),
}


def instruction_sets() -> tuple[str, ...]:
    """Those of `INSTRUCTION_SETS` that the processor has and the system lets us use, best first."""
    flags = _flags()
    return tuple(name for name, needed in INSTRUCTION_SETS.items() if needed <= flags)


@cache
def _flags() -> frozenset[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def cpus() -> tuple[int, ...]:
    """The processors this process may run on, in rising order; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def default_threads() -> int:
    """OMP_NUM_THREADS where it is set, otherwise as many processors as affinity and the container's quota allow."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, min(len(cpus()) or os.cpu_count() or 1, _quota()))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Whole processors that the control group grants, rounded up."""
    try:
        quota, period = path.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return 1 << 30
