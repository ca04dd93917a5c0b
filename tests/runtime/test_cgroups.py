"""Memory limits and free memory of cgroups, read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.runtime.env.cgroups import memory_left, memory_limit
from tests.runtime.test_cpus import written

STAT = "anon 500\ninactive_file 30\nactive_file 20\n"
V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/\n"}
CASES: dict[str, tuple[dict[str, str], int | None, int | None]] = {  # the limit, and what is left
    "no cgroups": ({}, None, None),
    "v2, no limit": (
        {**V2, "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "7"},
        None,
        None,
    ),
    "v2, the least of all levels": (
        {
            **V2,
            "sys/fs/cgroup/a/b/memory.max": "9000",
            "sys/fs/cgroup/a/b/memory.current": "600",
            "sys/fs/cgroup/a/memory.max": "4000",
            "sys/fs/cgroup/a/memory.current": "700",
        },
        4000,
        3300,
    ),
    "v2, the outer one gives more and leaves less": (
        {
            **V2,
            "sys/fs/cgroup/a/b/memory.max": "4000",
            "sys/fs/cgroup/a/b/memory.current": "600",
            "sys/fs/cgroup/a/memory.max": "9000",
            "sys/fs/cgroup/a/memory.current": "8900",
        },
        4000,
        100,
    ),
    "v2, lowered below what is used": (
        {**V2, "sys/fs/cgroup/a/b/memory.max": "500", "sys/fs/cgroup/a/b/memory.current": "600"},
        500,
        0,
    ),
    "v2, pages of files are left": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000",
            "sys/fs/cgroup/memory.current": "600",
            "sys/fs/cgroup/memory.stat": STAT,
        },
        1000,
        450,
    ),
    "v1, with the host's path": (
        {
            **V1,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "600",
            "sys/fs/cgroup/memory/memory.stat": STAT + "total_inactive_file 100\ntotal_active_file 0\n",
        },
        1000,
        500,
    ),
    "v1, no limit": (
        {
            **V1,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "4096",
        },
        9223372036854771712,
        9223372036854767616,
    ),
}


@pytest.mark.parametrize(("files", "limit", "left"), CASES.values(), ids=CASES.keys())
def test_the_limit_and_what_is_left_are_the_least_of_all_groups_of_the_process(
    tmp_path: Path, files: dict[str, str], limit: int | None, left: int | None
) -> None:
    root = written(tmp_path, files)
    assert (memory_limit(root), memory_left(root)) == (limit, left)
