"""What is left of memory by the limits of control groups that are written down in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.runtime.cgroups import memory_left
from tests.runtime.test_cpus import written

STAT = "anon 500\ninactive_file 30\nactive_file 20\n"
V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/\n"}
CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "no cgroups": ({}, None),
    "v2, no limit": ({**V2, "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "7"}, None),
    "v2, the least of all levels": (
        {
            **V2,
            "sys/fs/cgroup/a/b/memory.max": "9000",
            "sys/fs/cgroup/a/b/memory.current": "600",
            "sys/fs/cgroup/a/memory.max": "4000",
            "sys/fs/cgroup/a/memory.current": "700",
        },
        3300,
    ),
    "v2, pages of files are left": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000",
            "sys/fs/cgroup/memory.current": "600",
            "sys/fs/cgroup/memory.stat": STAT,
        },
        450,
    ),
    "v1, with the host's path": (
        {
            **V1,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "600",
            "sys/fs/cgroup/memory/memory.stat": STAT + "total_inactive_file 100\ntotal_active_file 0\n",
        },
        500,
    ),
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES.keys())
def test_what_is_left_is_the_least_that_a_group_of_the_process_leaves(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert memory_left(written(tmp_path, files)) == expected
