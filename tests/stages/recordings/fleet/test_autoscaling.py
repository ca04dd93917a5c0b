"""Simulated engines whose number follows the load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.stages.recordings.fleet.engine_group import EnginesHere
from millrace.stages.recordings.fleet.fleet_simulation import FleetResult, FleetSimulation
from millrace.stages.recordings.fleet.presence import Death, EnginePresence, Scaling
from millrace.stages.recordings.workloads import Workload, WorkloadRequest
from millrace.stages.routing.policies import POLICIES
from millrace.stages.routing.scaling import SCALING_RULES, EngineWork, QueuedWork
from tests.stages.recordings.fleet.test_fleet_simulation import COSTS
from tests.stages.recordings.fleet.test_fleet_simulation import ENGINE as CACHING

ENGINE = replace(CACHING, enable_prefix_caching=False)


def burst_and_calm() -> Workload:
    """Prompts of 512 tokens: 120 within 20 s, which takes one engine half a minute, and then one each 20 s."""
    arrivals_s = [at / 6 for at in range(120)] + [40.0 + 20 * at for at in range(25)]
    return Workload([WorkloadRequest(at_s, 512, 8) for at_s in arrivals_s], False)


def run(scaling: Scaling | None, deaths: list[Death]) -> FleetResult:
    group = EnginesHere(range(4), ENGINE, COSTS)
    simulation = FleetSimulation(dict.fromkeys(range(4), group), ENGINE, POLICIES["soonest"](), deaths, scaling)
    return simulation.run(burst_and_calm())


@pytest.mark.parametrize("name", sorted(SCALING_RULES))
def test_engines_come_with_a_burst_and_go_in_the_calm_after_it(name: str):
    fixed, deaths = run(None, []), [Death(1.0, 0, 5.0), Death(6.0, 1), Death(7.0, 3)]
    for lost in ([], deaths):
        result = run(Scaling(SCALING_RULES[name](2.0, 8.0), 1, 3.0), lost)
        assert {one.how for one in result.whole.outcomes} == {"finished"}
        assert result.most_engines > 1 and 1 in result.chosen[:120] and set(result.chosen[-3:]) == {0}
        assert result.engine_s < 0.9 * fixed.engine_s and result.num_resumed >= bool(lost)


def test_a_fleet_of_fixed_size_is_there_for_all_of_the_time():
    result = run(None, [])
    end_s = max(one.end_s or 0.0 for one in result.whole.outcomes)
    assert result.most_engines == 4 and 4 * end_s <= result.engine_s <= 4 * (end_s + 1.0)
    assert result.summary()["engine_hours"] == result.engine_s / 3600


def test_an_engine_that_is_to_end_stays_until_it_has_no_request():
    presence = EnginePresence(range(3), scaling=Scaling(QueuedWork(1.0), 1, 10.0))
    presence.ask([EngineWork(3.0, 16, 16)], 0.0)
    assert presence.taking(9.0) == [0] and presence.taking(10.0) == [0, 1, 2]
    presence.ask([EngineWork(0.0, 0, 16)] * 3, 400.0)
    assert presence.taking(400.0) == [0], "the last that began ends first"
    assert presence.end({2}, 401.0) == [1] and presence.end({2}, 402.0) == []
    assert presence.end((), 403.0) == [2]
    assert presence.engine_s(403.0) == 403 + 401 + 403 and presence.most == 3


def test_an_engine_that_is_not_there_is_not_lost():
    presence = EnginePresence(range(3), [Death(2.0, 2), Death(1.0, 0, 5.0)], Scaling(QueuedWork(1.0)))
    assert presence.lose(0.5) == [] and presence.lose(3.0) == [0] and presence.ready_s(0) == 8.0


def test_while_all_are_away_requests_wait_for_the_first_that_comes_back():
    result = run(None, [Death(0.5, number, 30.0 + number) for number in range(4)])
    waited = [one for one in result.whole.outcomes if 0.6 < one.arrival_s < 15.0]
    assert waited and all((one.first_token_s or 0.0) > 30.6 for one in waited)
