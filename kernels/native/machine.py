"""The machine's resources for this process: instruction sets, processors, threads."""

from __future__ import annotations

import ctypes
import math
import os
import platform
from functools import cache
from pathlib import Path

AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
# The flags in /proc/cpuinfo that each needs; best first on AMD's processors.
INSTRUCTION_SETS: dict[str, frozenset[str]] = {
    "amx": AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": AVX512 | {"avx512_bf16", "avx512_vnni"},
    "avx512": AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64


@cache
def instruction_sets() -> tuple[str, ...]:
    """The `INSTRUCTION_SETS` that the processor has and the system permits, best first."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    try:
        found = best_first(Path("/proc/cpuinfo").read_text())
    except OSError:
        return ()
    return tuple(name for name in found if name != "amx" or ask_for_tiles())


@cache
def ask_for_tiles() -> bool:
    """Requests permission for AMX tile registers (Linux 5.16 or newer); whether it is granted.

    The permission covers all threads and forked processes, but not programs that these execute. Linux denies it if a
    thread has a signal stack that is too small for the registers.
    """
    return int(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) == 0


def best_first(cpuinfo: str) -> tuple[str, ...]:
    """The instruction sets of a processor, by the text of /proc/cpuinfo, best first.

    Intel's cores take two cycles for a bf16 dot product instruction (16 sums of two products), and start two float32
    FMA instructions (16 each) per cycle. On an Emerald Rapids, 576 x 1536 in bfloat16 at 12 rows runs at 88 GFLOP/s
    with the former and 158 with the latter. AMD's cores are as fast with both, or faster with bf16.
    """
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    said = {name.strip(): value.strip() for name, _, value in lines}
    flags = frozenset(said.get("flags", "").split())
    found = [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]
    if said.get("vendor_id") == "GenuineIntel" and "avx512_bf16" in found:
        first = found.index("avx512_bf16")
        found[first : first + 2] = "avx512", "avx512_bf16"
    return tuple(found)


def cpus() -> tuple[int, ...]:
    """Processors that this process may run on, in rising order; empty if the system does not report them."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def default_threads() -> int:
    """OMP_NUM_THREADS if set, else the number of processors that affinity and the container's quota allow."""
    configured = os.environ.get("OMP_NUM_THREADS", "")
    if configured.isdigit() and int(configured) > 0:
        return int(configured)
    return max(1, min(len(cpus()) or os.cpu_count() or 1, _quota()))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processors that the control group's quota grants, rounded up."""
    try:
        quota, period = path.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return 1 << 30
