"""How many threads compute beside others, on a machine of numbers: `n` cores, and who else wants them."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.kernels.native.neighbours import Neighbours, Share

MS = 1_000_000
STEP_NS = 10 * MS  # of one thread alone, with all others


class Machine:
    """Steps of `num_threads` threads at most, on as many cores. `others` of other processes, each with a core of its
    own as long as one is left, half of one where one of ours computes, too: then the step takes twice as long, as all
    threads wait for that one. `counts_ticks`: it tells how long cores were idle, `unseen` of them less than it says."""

    def __init__(self, num_threads: int, *, counts_ticks: bool = False) -> None:
        self.num_threads, self.others, self.own = num_threads, 0, 0.0
        self.shares, self.process_ns = np.zeros(len(Share), np.int64), 0
        self.told: list[int] = []
        self.limits: list[int] = []  # of each step
        self.num_tries = 0
        self.idle_ns = self.all_ns = self.unseen = 0
        self.neighbours = Neighbours(
            num_threads,
            lambda limit, lost: self.told.append(limit),
            lambda: self.process_ns,
            lambda: (self.idle_ns // (10 * MS), self.all_ns // (10 * MS)) if counts_ticks else None,
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            limit, is_trying = self.neighbours.limit, self.neighbours.is_trying
            idle = self.num_threads - limit
            shared = min(limit, max(0, self.others - idle))  # threads of ours with half a core
            passed = STEP_NS * (2 if shared else 1)
            lost = shared * passed // 2 + int(self.own * passed)
            self.shares[Share.PASSED] += passed
            self.shares[Share.USED] += limit * passed - lost
            self.shares[Share.LOST] += lost
            self.process_ns += limit * passed - lost + int(self.own * passed)
            self.all_ns += self.num_threads * passed
            self.idle_ns += max(0, idle - self.others + self.unseen) * passed
            if is_trying:
                lost = min(idle, self.others) * passed // 2 + int(self.own * passed)
                self.num_tries += 1
                self.shares[Share.TRIED] += idle * passed
                self.shares[Share.LOST_TRYING] += lost
                self.process_ns += idle * passed - lost
            self.limits.append(limit)
            self.neighbours.note(self.shares)


def test_a_core_that_another_process_computes_on_is_left_to_it_within_ten_steps():
    machine = Machine(2)
    machine.step(50)
    assert machine.limits == [2] * 50, "nobody is there"
    machine.others = 1
    machine.step(10)
    assert machine.limits[-1] == 1 and machine.told == [1]


@pytest.mark.parametrize("counts_ticks", [True, False])
@pytest.mark.parametrize("num_threads", [2, 16])
def test_all_threads_compute_again_within_a_second_after_the_other_one_has_left(num_threads: int, counts_ticks: bool):
    machine = Machine(num_threads, counts_ticks=counts_ticks)
    machine.others = 1
    machine.step(100)
    machine.others = 0
    machine.step(100)
    assert machine.limits[-1] == num_threads and machine.told == [num_threads - 1, num_threads]


@pytest.mark.parametrize(("counts_ticks", "within"), [(True, 70), (False, 210)])
def test_it_takes_no_longer_however_long_the_other_one_stayed(counts_ticks: bool, within: int):
    """Within 0.7 s, or 2.1 where the system does not tell what is idle."""
    machine = Machine(2, counts_ticks=counts_ticks)
    machine.others = 1
    machine.step(10_000)
    machine.others = 0
    machine.step(within)
    assert machine.limits[-1] == 2


def test_nobody_tries_while_no_core_is_idle():
    machine = Machine(2, counts_ticks=True)
    machine.others = 1
    machine.step(3000)
    assert machine.limits[10:] == [1] * 2990 and machine.num_tries == 0


@pytest.mark.parametrize("counts_ticks", [True, False])
def test_tries_become_rare_while_the_other_one_stays(counts_ticks: bool):
    """Each may cost a slice of the other one's time: fewer than one step in fifty tries, also if a core seems idle."""
    machine = Machine(2, counts_ticks=counts_ticks)
    machine.others = machine.unseen = 1
    machine.step(3000)
    assert machine.limits[10:] == [1] * 2990
    assert 3 <= machine.num_tries <= 30


def test_as_many_cores_are_left_as_others_want():
    machine = Machine(16)
    machine.others = 3
    machine.step(100)
    assert machine.limits[-1] == 13


def test_where_others_want_every_core_all_threads_stay():
    """Who leaves a core gains nothing by it: it is noticed, and not tried again for five seconds."""
    machine = Machine(2)
    machine.others = 4
    machine.step(200)
    assert machine.limits.count(2) > 180 and machine.told == [1, 2]


def test_what_other_threads_of_this_process_compute_is_nobody_elses():
    """The loop, tokenizers and whoever embeds the engine have their share by priority."""
    machine = Machine(2)
    machine.own = 0.45
    machine.step(200)
    assert machine.limits == [2] * 200 and not machine.told
    machine.others = 1
    machine.step(100)
    machine.others = 0
    machine.step(100)
    assert machine.told == [1, 2]
