"""How many threads compute beside others, on a machine of numbers: `n` cores, and who else wants them."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.kernels.native.thread_throttle import Neighbours, Share

MS = 1_000_000
STEP_NS = 10 * MS  # of one thread alone, with all others
TICK_NS = 10 * MS


class Machine:
    """Steps of `num_threads` threads at most, on as many cores. `others` of other processes, each with a core of its
    own as long as one is left, half of one where one of ours computes, too: then the step takes twice as long, as all
    threads wait for that one. What else this process computes: `own` cores that its steps lose, `beside` of those left.
    `tells`: how long cores were idle, where `unseen` cores of others seem to be, too, or, below 0, as many less are."""

    def __init__(self, num_threads: int, *, tells: bool = False) -> None:
        self.num_threads, self.others, self.own, self.beside = num_threads, 0, 0.0, 0.0
        self.shares, self.process_ns = np.zeros(len(Share), np.int64), 0
        self.told: list[int] = []
        self.limits: list[int] = []  # of each step
        self.num_tries = 0
        self.idle_ns = self.all_ns = self.unseen = 0
        self.neighbours = Neighbours(
            num_threads,
            lambda limit, lost: self.told.append(limit),
            lambda: self.process_ns,
            lambda: (self.idle_ns // TICK_NS * TICK_NS, self.all_ns // TICK_NS * TICK_NS) if tells else None,
            lambda: self.all_ns // num_threads,
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
            self.process_ns += limit * passed - lost + int((self.own + self.beside) * passed)
            self.all_ns += self.num_threads * passed
            self.idle_ns += int(max(0, idle - self.others + self.unseen - self.beside) * passed)
            if is_trying:
                lost = min(idle, self.others) * passed // 2 + int((self.own + self.beside / 2) * passed)
                self.num_tries += 1
                self.shares[Share.TRIED] += idle * passed
                self.shares[Share.LOST_TRYING] += lost
                self.process_ns += idle * passed - lost
            self.limits.append(limit)
            self.neighbours.note(self.shares)

    def rest(self, passed: int) -> None:
        """No step is requested."""
        self.all_ns += self.num_threads * passed
        self.idle_ns += max(0, self.num_threads - self.others) * passed


def test_a_core_that_another_process_computes_on_is_left_to_it_within_ten_steps():
    machine = Machine(2)
    machine.step(50)
    assert machine.limits == [2] * 50, "there is no neighbour"
    machine.others = 1
    machine.step(10)
    assert machine.limits[-1] == 1 and machine.told == [1]


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("num_threads", [2, 16])
def test_all_threads_compute_again_within_a_second_after_the_other_one_has_left(num_threads: int, tells: bool):
    machine = Machine(num_threads, tells=tells)
    machine.others = 1
    machine.step(100)
    machine.others = 0
    machine.step(100)
    assert machine.limits[-1] == num_threads and machine.told == [num_threads - 1, num_threads]


@pytest.mark.parametrize(("tells", "within"), [(True, 110), (False, 420)])
@pytest.mark.parametrize("more", range(0, 420, 10))  # of a cycle of tries, which is 401 to 413 steps
def test_it_takes_no_longer_however_long_the_other_one_stayed(tells: bool, within: int, more: int):
    """Within 1.1 s of steps, as that is the pause after a try in vain, or half a second does not tell and the next has
    to; or 4.2 where idle time is unknown."""
    machine = Machine(2, tells=tells)
    machine.others = 1
    machine.step(10_000 + more)
    machine.others = 0
    machine.step(within)
    assert machine.limits[-1] == 2


@pytest.mark.parametrize("num_threads", [2, 16])
def test_a_try_in_four_seconds_is_the_most_while_others_are_seen_to_have_a_core(num_threads: int):
    """However long the engine rests, in which its own cores are idle."""
    machine = Machine(num_threads, tells=True)
    machine.others = 1
    for _ in range(3000):
        machine.step()
        machine.rest(5 * MS)
    assert machine.limits[10:] == [num_threads - 1] * 2990
    assert machine.num_tries <= 3000 * 15 // 4000


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("num_threads", [2, 16])
@pytest.mark.parametrize("more", range(4))  # of a window of four steps
def test_who_left_while_the_engine_rested_costs_it_five_steps(more: int, num_threads: int, tells: bool):
    """However often a try was in vain before, if half a second of steps came after: a rest counts as a pause."""
    machine = Machine(num_threads, tells=tells)
    machine.others = 1
    machine.step(10_000)
    num_tries = machine.num_tries
    while machine.num_tries == num_tries:
        machine.step()
    machine.step(50 + more)
    assert machine.limits[-1] == num_threads - 1
    machine.others = 0
    machine.rest(5000 * MS)
    machine.step(6)
    assert machine.limits[-1] == num_threads


@pytest.mark.parametrize("tells", [True, False])
def test_tries_become_rare_while_the_other_one_stays(tells: bool):
    """Each may cost a slice of the other one's time: one step in two hundred tries, also where a core seems idle."""
    machine = Machine(2, tells=tells)
    machine.others = machine.unseen = 1
    machine.step(3000)
    assert machine.limits[10:] == [1] * 2990
    assert 3 <= machine.num_tries <= 15


@pytest.mark.parametrize("tells", [True, False])
def test_half_a_second_of_steps_lies_between_tries_in_vain_however_long_each_step_is_waited_for(tells: bool):
    machine = Machine(2, tells=tells)
    machine.others = 1
    for _ in range(3000):
        machine.step()
        machine.rest(1000 * MS)
    assert machine.limits[10:] == [1] * 2990
    assert 3 <= machine.num_tries <= 3000 / 50


def test_a_core_that_never_seems_idle_is_tried_all_the_same():
    """A neighbour that gets only what no one else wants."""
    machine = Machine(2, tells=True)
    machine.others = 1
    machine.step(1000)
    machine.others, machine.unseen = 0, -1
    machine.step(420)
    assert machine.limits[-1] == 2


def test_what_this_process_computes_besides_keeps_no_thread_out():
    machine = Machine(2, tells=True)
    machine.others = 1
    machine.step(1000)
    machine.others, machine.beside = 0, 0.8
    machine.step(110)
    assert machine.limits[-1] == 2


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
    machine.rest(10_000 * MS)
    machine.step(40)
    assert machine.told == [1, 2], "five seconds of steps, not of the clock"


def test_work_of_other_threads_of_this_process_is_not_a_neighbours():
    """The loop, tokenizers and the embedding program have their share by priority."""
    machine = Machine(2)
    machine.own = 0.45
    machine.step(200)
    assert machine.limits == [2] * 200 and not machine.told
    machine.others = 1
    machine.step(100)
    machine.others = 0
    machine.step(100)
    assert machine.told == [1, 2]
