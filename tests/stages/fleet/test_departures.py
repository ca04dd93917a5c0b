"""Engine processes that go by plan, in virtual time, without processes."""

from __future__ import annotations

from typing import Any

from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.fleet.departures import Departures
from tests.stages.fleet.test_fleet_parts import fleet
from tests.stages.split.test_split import token_request


class Client:
    """Of no process."""

    def cut(self) -> None:
        """Does nothing."""

    async def stop(self, timeout_s: float) -> None:
        """Does nothing."""


def test_a_process_that_dies_while_it_leaves_goes_though_it_is_reached_again() -> None:
    async def test(env: SimEnv) -> None:
        cores, table, (core, _) = fleet(2)
        leaving: Any = core
        vars(leaving).update(client=Client(), keeper=None, is_parting=False, forget_process=lambda: None)
        parted: list[Any] = []
        departures = Departures(env, table, cores, parted.append)
        assert cores.place(token_request("r", 0))
        departures.begin(leaving)
        await env.sleep(1.0)
        assert not parted, "its request has not ended"
        table.note_death(0)
        leaving.client, leaving.is_draining = Client(), False  # as the start of the next one does, before any look
        cores.send(table.prompts_to_resume("r", lambda _: True)[0], leaving)
        await env.sleep(0.1)
        assert parted == [core] and table.orphans() == ([], ["r"])
        await departures.stop()

    run(test, seed=0)


def test_a_process_without_a_stand_in_is_empty_only_after_a_while_without_requests() -> None:
    async def test(env: SimEnv) -> None:
        cores, table, (core, other) = fleet(2)
        other.model_digest = "v2"
        leaving: Any = core
        vars(leaving).update(client=Client(), keeper=None, forget_process=lambda: None)
        parted: list[Any] = []
        departures = Departures(env, table, cores, parted.append)
        table.search_of = lambda request_id: "search"
        assert cores.place(token_request("step 0", 0))
        departures.begin(leaving)
        for number in range(20):
            table.forget(f"step {number}")
            await env.sleep(0.1)
            assert cores.place(token_request(f"step {number + 1}", number + 1)) and not parted
            await env.sleep(0.005)  # less than between two looks
        assert len(core.sent) == 21 and not other.sent
        other.model_digest = ""
        table.forget("step 20")
        await env.sleep(0.05)
        assert parted == [core], "one that stands in takes the next step"
        await departures.stop()

    run(test, seed=0)
