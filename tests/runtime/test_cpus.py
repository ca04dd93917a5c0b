"""The cores to compute on: of a machine described in files, and of this one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from millrace.runtime.env import cpus
from millrace.runtime.env.cpus import ComputeThreads, Cpus

HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/\n"}
CASES: dict[str, tuple[dict[str, str], float | None]] = {
    "no cgroups": ({}, None),
    "v2, no limit": ({**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
    "v2, its own": ({**V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
    "v2, the narrowest of all levels": (
        {
            **V2,
            "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
            "sys/fs/cgroup/a/cpu.max": "200000 100000",
            "sys/fs/cgroup/cpu.max": "max 100000",
        },
        2.0,
    ),
    "v2 in a container, whose root is its own": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
        0.5,
    ),
    "v2 beside v1": (
        {"proc/self/cgroup": "1:cpu:/\n0::/\n", "sys/fs/cgroup/unified/cpu.max": "300000 100000\n"},
        3.0,
    ),
    "v1, no limit": (
        {
            **V1,
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "v1, its own": (
        {
            **V1,
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    "v1 in a container, with the host's path and another mount": (
        {**V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        1.0,
    ),
    "what makes no sense": ({**V2, "sys/fs/cgroup/a/b/cpu.max": "100000 0\n", "sys/fs/cgroup/a/cpu.max": "x"}, None),
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES.keys())
def test_the_quota_is_the_narrowest_of_the_processs_cgroups(tmp_path: Path, files, expected) -> None:
    assert cpus.quota(written(tmp_path, files)) == expected


def test_two_cpus_of_one_core_are_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 6}, raising=False)
    monkeypatch.setattr(cpus, "_narrowed", {})
    siblings = {1: "1,5", 5: "1,5", 2: "2"}  # the system does not describe CPU 6
    place = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = written(tmp_path, {place.format(cpu): text for cpu, text in siblings.items()})
    assert Cpus.of_this_process(root) == Cpus((1, 2, 5, 6), (1, 2, 6), None)


@pytest.mark.parametrize(
    ("asked", "there", "count", "pinned", "reason"),
    [
        (None, Cpus((0, 1), (0, 1)), 2, (0, 1), "one for each of 2 cores"),
        (None, Cpus((0, 1, 2, 3), (0, 2)), 2, (0, 2), "one for each of 2 cores (4 CPUs)"),
        (None, Cpus((3, 7), (3, 7), 8.0), 2, (3, 7), "one for each of 2 cores"),
        (None, Cpus((0, 1, 2, 3), (0, 1, 2, 3), 1.5), 1, (), "the cgroup's quota of 1.5 CPUs; not pinned"),
        (None, Cpus((0, 1, 2, 3), (0, 1, 2, 3), 0.5), 1, (), "the cgroup's quota of 0.5 CPUs; not pinned"),
        (4, Cpus((0, 1, 2, 3), (0, 2)), 4, (0, 1, 2, 3), "threads = 4"),
        (1, Cpus((0, 1), (0, 1)), 1, (), "threads = 1; not pinned"),
        (2, Cpus((0, 1), (0, 1), 1.0), 2, (), "threads = 2; not pinned"),
        (9, Cpus((0, 1), (0, 1)), 9, (), "threads = 9; not pinned"),
    ],
)
def test_threads_are_as_many_as_requested_or_can_run_and_pinned_if_they_take_all(
    asked, there, count, pinned, reason
) -> None:
    chosen = ComputeThreads.choose(asked, there)
    assert (chosen.count, chosen.pinned) == (count, pinned)
    assert chosen.reason.startswith(reason)


def test_the_environment_counts_where_no_setting_is_given() -> None:
    there = Cpus((0, 1, 2, 3), (0, 1, 2, 3))
    asked = ComputeThreads.choose(None, there, {"OMP_NUM_THREADS": "3"})
    assert asked.count == 3 and asked.reason.startswith("OMP_NUM_THREADS = 3")
    assert ComputeThreads.choose(2, there, {"OMP_NUM_THREADS": "3"}).count == 2
    for text in ("", "0", "many", "-1"):
        assert ComputeThreads.choose(None, there, {"OMP_NUM_THREADS": text}).count == 4


def test_of_this_machine_there_is_at_least_one_core() -> None:
    there = Cpus.of_this_process()
    assert 1 <= len(there.cores) <= len(there.allowed)
    assert ComputeThreads.choose(None, there).count >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_one_thread_and_what_it_starts_can_have_a_lower_priority_than_the_others() -> None:
    found: dict[str, int] = {}

    def note(name: str) -> None:
        found[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def lowered() -> None:
        assert cpus.lower_priority() and cpus.lower_priority()
        note("lowered")
        child = threading.Thread(target=note, args=("child",))
        child.start()
        child.join()

    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert before == cpus.FIRST
    thread = threading.Thread(target=lowered)
    thread.start()
    thread.join()
    note("here")
    lower = min(before + cpus.LOWER, 19)
    assert found == {"lowered": lower, "child": lower, "here": before}


STAT = """cpu  60 0 30 700 5 0 1 4 0 0
cpu0 10 1 5 100 2 0 1 3 0 0
cpu1 20 2 10 200 1 0 0 1 9 9
cpu10 30 3 15 400 2 0 0 0 0 0
intr 1 2 3
"""


def test_idle_time_is_added_up_of_the_cpus_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(STAT)
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert cpus.idle_ns((0, 1), tmp_path) == (303 * tick, 356 * tick)
    assert cpus.idle_ns((10,), tmp_path) == (402 * tick, 450 * tick)
    assert cpus.idle_ns((0, 2), tmp_path) is None, "one of them is not counted"


@pytest.mark.parametrize(
    "stat",
    ["cpu1 1 2 3 4 5\n", "cpu0 0 0 0 0 0\n", "cpu0\n", "cpu0 1 2 3\n", "cpu0 1 2 3 x 5\n", "cpu0 1 2 3 -4 5\n", "\n"],
)
def test_a_system_that_does_not_tell_idle_time_is_no_error(tmp_path: Path, stat: str) -> None:
    assert cpus.idle_ns((0,), tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(stat)
    assert cpus.idle_ns((0,), tmp_path) is None


@pytest.mark.skipif(not HERE or cpus.idle_ns(HERE) is None, reason="this system does not tell")
def test_a_cpu_of_this_machine_is_idle_for_some_of_its_time() -> None:
    told = cpus.idle_ns(HERE)
    assert told is not None and 0 < told[0] < told[1]


@pytest.mark.skipif(len(HERE) < 2, reason="with one CPU there is no other")
def test_one_thread_and_what_it_starts_can_keep_off_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "_narrowed", {})
    found: dict[str, set[int]] = {}

    def other() -> None:
        assert cpus.keep_off(HERE[0]) and cpus.keep_off(HERE[0])
        child = threading.Thread(target=lambda: found.update(child=os.sched_getaffinity(0)))
        child.start()
        child.join()
        found["other"] = os.sched_getaffinity(0)
        found["seen"] = set(Cpus.of_this_process().allowed)

    keeping = threading.Thread(target=other)
    keeping.start()
    keeping.join()
    left = set(HERE[1:])
    assert found == {"child": left, "other": left, "seen": set(HERE)}, "an engine that is made later has all of them"
    assert os.sched_getaffinity(0) == set(HERE)


@pytest.mark.skipif(not HERE, reason="threads are not kept to CPUs")
def test_a_thread_stays_where_it_is_if_it_was_not_given_that_cpu_or_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "_narrowed", {})
    assert not cpus.keep_off(max(HERE) + 1)
    assert os.sched_getaffinity(0) == set(HERE)
    found: dict[str, set[int]] = {}

    def with_one() -> None:
        os.sched_setaffinity(0, HERE[:1])
        assert not cpus.keep_off(HERE[0])
        found["with one"] = os.sched_getaffinity(0)

    thread = threading.Thread(target=with_one)
    thread.start()
    thread.join()
    assert found == {"with one": set(HERE[:1])}
