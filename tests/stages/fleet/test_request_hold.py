"""For how long a front without an engine takes requests, in virtual time."""

from __future__ import annotations

from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.fleet.request_hold import HOLD_S, RequestHold


class Ends:
    """Counts the ends of a hold."""

    num = 0

    def __call__(self) -> None:
        self.num += 1


def test_requests_are_taken_for_some_seconds_after_the_loss_of_the_last_engine() -> None:
    async def live(env: SimEnv) -> None:
        hold = RequestHold(ends := Ends())
        hold.note_serving()
        assert not hold.is_on, "an engine is there: it needs no hold"
        hold.note_lost()
        await env.sleep(HOLD_S - 0.1)
        hold.note_lost()
        assert hold.is_on and not ends.num
        await env.sleep(0.2)
        assert not hold.is_on and ends.num == 1
        hold.note_lost()
        assert not hold.is_on, "it is the same loss"

    run(live, seed=0)


def test_an_engine_that_comes_back_gives_the_next_loss_all_of_the_time_again() -> None:
    async def live(env: SimEnv) -> None:
        hold = RequestHold(ends := Ends())
        hold.note_serving()
        for _ in range(3):
            hold.note_lost()
            await env.sleep(0.9 * HOLD_S)
            assert hold.is_on
            hold.note_serving()
            assert not hold.is_on
        hold.note_lost()
        hold.close()
        await env.sleep(2 * HOLD_S)
        assert not hold.is_on and not ends.num

    run(live, seed=0)


def test_a_loss_without_an_engine_that_served_since_the_last_one_takes_no_requests() -> None:
    async def live(env: SimEnv) -> None:
        hold = RequestHold(ends := Ends())
        hold.note_lost()
        assert not hold.is_on, "none has served yet"
        hold.note_serving()
        hold.note_lost()
        hold.end()
        assert not hold.is_on and ends.num == 1
        for _ in range(3):  # tries of an engine that was given up
            hold.note_lost()
            assert not hold.is_on
            hold.end()
        hold.note_serving()
        hold.end()
        hold.note_lost()
        assert not hold.is_on and ends.num == 1, "it went by plan"

    run(live, seed=0)
