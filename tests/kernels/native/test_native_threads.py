"""How the native step's threads share phases, by a program of their own: who does what, and who waits for whom."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.kernels.native import build, machine

AVAILABLE = machine.instruction_sets()
pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

SOURCE = """
#include "machine/threads.h"
#include <chrono>
using namespace millrace;
#define EXPORT extern "C" __attribute__((visibility("default")))

// Things of all phases that were not done once, and in their phase.
EXPORT long things_not_done_once(int num_threads, int lateness, long num_regions, long num, long size, long pause_us) {
    constexpr int PHASES = 20;
    Pool pool(num_threads, {});
    pool.team.join_delay = lateness;
    std::vector<std::atomic<int>> done(PHASES * num);
    std::atomic<long> num_wrong{0};
    for (long region = 0; region < num_regions; region++) {
        for (auto& times : done) times = 0;
        pool.run(num_threads, [&](int thread) {
            Phases phases(&pool, thread);
            for (int phase = 0; phase < PHASES; phase++) {
                phases.run([&](ThreadTeam::Member member) {
                    if (member.rank == 0) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
                    member.parallel_for(num, size, [&](long first, long last, long end) {
                        if (last <= first || last > end || end > num) num_wrong++;
                        for (long i = first; i < last; i++) {
                            done[phase * num + i].fetch_add(1, std::memory_order_relaxed);
                            if (phase && done[(phase - 1) * num + i] != 1) num_wrong++;
                        }
                    });
                });
            }
        });
        for (auto& times : done) num_wrong += times != 1;
    }
    return num_wrong;
}

// Thread 1 goes on with its first thing only when `num` - 1 others are done. How many were before `limit_s`.
EXPORT long done_beside_one_that_stands(int num_threads, long num, double limit_s) {
    Pool pool(num_threads, {});
    pool.team.join_delay = 0;
    std::atomic<long> num_done{0};
    std::atomic<bool> is_standing{false};
    long found = 0;
    pool.run(num_threads, [&](int thread) {
        Phases phases(&pool, thread);
        phases.run([](ThreadTeam::Member) {});  // all are there from the next one on
        phases.run([&](ThreadTeam::Member member) {
            member.parallel_for(num, 1, [&](long, long, long) {
                if (member.rank == 1 && !is_standing.exchange(true)) {
                    auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
                    while (num_done < num - 1 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
                    found = num_done;
                } else {
                    while (member.rank != 1 && !is_standing) std::this_thread::yield();
                    num_done++;
                }
            });
        });
    });
    return found;
}

// Whether the system refused a thread. The threads that had started have ended then.
EXPORT int is_refused(int num_threads) {
    try {
        Pool pool(num_threads, {});
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}
"""

REFUSED = """
import ctypes, os, resource, sys
library = ctypes.CDLL(sys.argv[1])
assert not library.is_refused(3)
before = len(os.listdir("/proc/self/task"))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)  # room for the stacks of a few threads
assert library.is_refused(200)
assert len(os.listdir("/proc/self/task")) == before
"""


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("threads")
    (folder / "shared.cpp").write_text(SOURCE)
    flags = [*build.COMMON, *build.EXACT, *build.QUIET, *build.FLAGS["avx2"], f"-I{build.SOURCE}", "-shared"]
    sources = ["shared.cpp", str(build.SOURCE / "machine/threads.cpp")]
    subprocess.run([str(build.find_compiler()), *flags, *sources, "-o", "shared.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "shared.so"))
    library.things_not_done_once.restype = library.done_beside_one_that_stands.restype = ctypes.c_long
    return library


def not_done_once(
    threads: ctypes.CDLL, num_threads: int, lateness: int, num_regions: int, num: int, size: int, pause_us: int = 0
) -> int:
    sizes = (ctypes.c_long(number) for number in (num_regions, num, size, pause_us))
    return int(threads.things_not_done_once(num_threads, lateness, *sizes))


@pytest.mark.parametrize("lateness", [-1, 0, 1, 4])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_each_item_of_a_phase_is_done_once_before_the_next_phase_starts(
    threads: ctypes.CDLL, num_threads: int, lateness: int
) -> None:
    for num, size in ((0, 1), (1, 1), (2, 3), (17, 1), (17, 4), (100, 16)):
        assert not_done_once(threads, num_threads, lateness, 20, num, size) == 0, f"{num} things in pieces of {size}"


@pytest.mark.parametrize("num_threads", [2, 5])
def test_nothing_is_lost_or_done_twice_where_threads_give_up_waiting_for_a_long_phase(
    threads: ctypes.CDLL, num_threads: int
) -> None:
    """A phase of 200 us is over ten times as long as they spin."""
    assert not_done_once(threads, num_threads, -1, 20, 40, 1, pause_us=200) == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc")
def test_a_team_that_gets_too_few_threads_is_refused_and_leaves_none(threads: ctypes.CDLL) -> None:
    command = [sys.executable, "-c", REFUSED, threads._name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-500:]}"


def test_a_phase_may_have_a_hundred_thousand_pieces(threads: ctypes.CDLL) -> None:
    assert not_done_once(threads, 2, 0, 1, 300_000, 1) == 0


@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_thread_that_loses_its_core_holds_up_no_more_than_the_piece_it_is_at(
    threads: ctypes.CDLL, num_threads: int
) -> None:
    """Thread 1 stands in its first piece until all others are done."""
    assert threads.done_beside_one_that_stands(num_threads, ctypes.c_long(40), ctypes.c_double(20)) == 39
