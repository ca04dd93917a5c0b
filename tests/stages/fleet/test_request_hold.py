"""For how long a front without an engine takes requests, in virtual time."""

from __future__ import annotations

from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.fleet.request_hold import HOLD_S, RequestHold


def test_requests_are_taken_for_some_seconds_after_the_loss_of_the_last_engine() -> None:
    async def live(env: SimEnv) -> None:
        hold = RequestHold()
        hold.note(is_away=False)
        assert not hold.is_on, "an engine is there: it needs no hold"
        hold.note(is_away=True)
        await env.sleep(HOLD_S - 0.1)
        hold.note(is_away=True)
        assert hold.is_on
        await env.sleep(0.2)
        assert not hold.is_on
        hold.note(is_away=True)
        assert not hold.is_on, "it is the same loss"

    run(live, seed=0)


def test_an_engine_that_comes_back_gives_the_next_loss_all_of_the_time_again() -> None:
    async def live(env: SimEnv) -> None:
        hold = RequestHold()
        for _ in range(3):
            hold.note(is_away=True)
            await env.sleep(0.9 * HOLD_S)
            assert hold.is_on
            hold.note(is_away=False)
            assert not hold.is_on
        hold.note(is_away=True)
        hold.close()
        assert not hold.is_on

    run(live, seed=0)
