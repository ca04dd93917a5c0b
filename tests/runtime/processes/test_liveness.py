"""Pings: the other end's clock is read from the quickest ones, and silence is counted in own ticks."""

from __future__ import annotations

import math
import random

import pytest

from millrace.runtime.processes.liveness import NUM_TRIPS, PeerClock, Silence


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0, 86_400.0, 0.25])
def test_the_offset_is_that_of_the_quickest_trip_within_half_of_it(ahead_s: float) -> None:
    draw, clock = random.Random(5), PeerClock()
    ways = []
    for number in range(50):
        there_s, back_s = draw.uniform(0.0001, 0.1), draw.uniform(0.0001, 0.1)
        ways.append(there_s + back_s)
        sent_s = 100.0 + number
        clock.note_trip(sent_s, sent_s + there_s + ahead_s, sent_s + there_s + back_s)
        least_s = min(ways[-NUM_TRIPS:])
        assert clock.round_trip_s == pytest.approx(least_s)
        assert abs(clock.offset_s - ahead_s) <= least_s / 2 + 1e-9


def test_clocks_that_may_be_one_count_as_one() -> None:
    clock = PeerClock()
    assert clock.offset_s == 0.0 and clock.round_trip_s is None
    clock.note_trip(10.0, 10.3, 10.4)
    assert clock.offset_s == 0.0, "0.1 s ahead, or it answered late: the trip took 0.4 s"
    clock.note_trip(11.0, 11.3, 11.2)
    assert clock.offset_s == pytest.approx(0.2)


def test_until_the_first_answer_the_hello_says_the_offset() -> None:
    clock = PeerClock()
    clock.note_greeting(500.0, 20.0)
    assert clock.offset_s == 480.0, "the hello waited for this end, or the clock is so far ahead"
    clock.note_greeting(509.9, 29.5)
    clock.note_greeting(510.0, 30.0)
    assert clock.offset_s == pytest.approx(480.4)
    clock.note_trip(21.0, 501.5, 21.2)
    assert clock.offset_s == pytest.approx(480.4)


@pytest.mark.parametrize("times", [(5.0, 1.0, 4.0), (math.nan, 1.0, 4.0), (1.0, math.nan, 4.0), (1.0, math.inf, 4.0)])
def test_an_impossible_trip_is_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="a ping sent at"):
        PeerClock().note_trip(*times)


def test_silence_is_too_long_after_as_many_ticks_and_any_arrival_ends_it() -> None:
    silence = Silence(10.0)
    assert silence.tick_s == 1.0 and [silence.tick() for _ in range(9)] == [False] * 9
    silence.has_heard = True
    assert [silence.tick() for _ in range(11)] == [False] * 10 + [True]
    assert Silence(2.0).tick_s == 0.5


def test_a_late_tick_gives_the_other_end_all_of_the_timeout_again_but_once() -> None:
    silence = Silence(10.0)
    assert [silence.tick() for _ in range(9)] == [False] * 9
    assert not silence.tick(late_s=30.0), "it may have stood still, too"
    assert [silence.tick(late_s=2.0) for _ in range(10)] == [False] * 9 + [True], "an end that is always late"
    silence.has_heard = True
    assert not silence.tick() and not silence.tick(late_s=30.0)
    assert [silence.tick(late_s=0.5) for _ in range(10)] == [False] * 9 + [True]
