"""Several simulated engines behind the router that serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.fleet.engine_group import EnginesHere
from millrace.stages.recordings.fleet.fleet_simulation import FleetResult, FleetSimulation
from millrace.stages.recordings.fleet.presence import Death
from millrace.stages.recordings.recorded_engine import RecordedEngine
from millrace.stages.recordings.simulation import Simulation
from millrace.stages.recordings.workloads import Workload, WorkloadRequest
from millrace.stages.routing.policies import POLICIES

ENGINE = RecordedEngine(
    num_blocks=600,
    num_host_blocks=0,
    block_size=16,
    max_model_len=2048,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    steps_in_flight=2,
    enable_chunked_prefill=True,
    enable_prefix_caching=True,
    max_waiting=512,
    scheduler="priority",
    priority_ageing_s=None,
)
COSTS = CostModel(step_s=0.01, prefill_token_s=4e-4, decode_row_s=5e-4, decode_context_s=1e-7)


def drawn(count: int, rate: float, prompts: int, seed: int = 0) -> Workload:
    """Requests whose prompts of 512 tokens begin with one of so many prompts of 480."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, count))
    return Workload(
        [
            WorkloadRequest(
                at_s, 512, int(rng.integers(4, 24)), hash_ids=tuple(which * 15 + i for i in range(15)), hash_block=32
            )
            for at_s, which in zip(arrivals_s.tolist(), rng.integers(0, prompts, count).tolist(), strict=True)
        ],
        has_prefixes=True,
    )


def run(trace: Workload, policy: str, engines: int = 4, groups: int = 1, deaths: Sequence[Death] = ()) -> FleetResult:
    made = [EnginesHere(range(first, engines, groups), ENGINE, COSTS) for first in range(groups)]
    by_engine = {engine: made[engine % groups] for engine in range(engines)}
    return FleetSimulation(by_engine, ENGINE, POLICIES[policy](), deaths).run(trace)


def outcomes(result: Sequence[object]) -> list[str]:
    return [repr(one) for one in result]


def test_one_engine_behind_a_router_serves_as_one_alone():
    trace = drawn(40, 8.0, 6)
    alone = Simulation(ENGINE, COSTS).run(trace)
    behind = run(trace, "soonest", 1)
    assert outcomes(behind.whole.outcomes) == outcomes(alone.outcomes)
    assert behind.whole.num_hits == alone.num_hits > 0 and behind.whole.busy_s == alone.busy_s


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_is_served_once_and_the_same_run_gives_the_same(policy: str):
    trace = drawn(40, 30.0, 6)
    first, again = run(trace, policy), run(trace, policy)
    assert {outcome.how for outcome in first.whole.outcomes} == {"finished"}
    assert [outcome.arrival_s for outcome in first.whole.outcomes] == [one.arrival_s for one in trace.requests]
    assert first.chosen == again.chosen and first.summary() == again.summary()


def test_prompts_stay_where_their_prefix_is_and_more_of_them_is_found():
    trace = drawn(120, 15.0, 40)
    scored, least = run(trace, "soonest").summary(), run(trace, "least-work").summary()
    assert scored["cached_tokens"] > 1.3 * least["cached_tokens"], (scored, least)
    assert scored["ttft_p50_ms"] < least["ttft_p50_ms"]


def test_caches_that_are_full_hold_nearly_what_one_with_all_memory_does():
    trace = drawn(400, 22.0, 90)  # prefixes of 43,200 tokens, and memory for 38,400
    apart = run(trace, "soonest").summary()
    sizes = {name: 4 * getattr(ENGINE, name) for name in ("num_blocks", "max_num_seqs", "max_num_batched_tokens")}
    engine = replace(ENGINE, **sizes)
    costs = replace(COSTS, prefill_token_s=COSTS.prefill_token_s / 4, decode_row_s=COSTS.decode_row_s / 4)
    together = FleetSimulation({0: EnginesHere([0], engine, costs)}, engine, POLICIES["soonest"]()).run(trace).summary()
    assert apart["cached_tokens"] >= 0.9 * together["cached_tokens"]


def test_one_hot_prompt_is_spread_over_all_engines_once_one_is_busy():
    trace = drawn(90, 60.0, 1)
    scored, least = run(trace, "soonest"), run(trace, "least-work")
    assert set(scored.chosen) == {0, 1, 2, 3}
    assert scored.summary()["ttft_p99_ms"] <= 1.1 * least.summary()["ttft_p99_ms"]
    assert set(run(trace, "prefix-only").chosen) < {0, 1, 2, 3}, "that rule sends all to those that have it"


def test_engines_in_several_groups_serve_as_those_in_one():
    trace = drawn(60, 30.0, 6)
    one, three = run(trace, "soonest"), run(trace, "soonest", groups=3)
    assert one.chosen == three.chosen and one.summary() == three.summary()


def test_requests_of_a_lost_engine_go_on_elsewhere_with_the_tokens_they_have():
    trace = drawn(60, 30.0, 6)
    result, whole = run(trace, "least-work", deaths=[Death(1.0, 2, 0.5), Death(1.3, 0)]), run(trace, "least-work")
    assert result.num_resumed > 3
    assert {outcome.how for outcome in result.whole.outcomes} == {"finished"}
    for outcome, undisturbed in zip(result.whole.outcomes, whole.whole.outcomes, strict=True):
        assert outcome.num_tokens == undisturbed.num_tokens and outcome.arrival_s == undisturbed.arrival_s
        assert outcome.first_token_s is not None and outcome.end_s is not None
        assert outcome.arrival_s < outcome.first_token_s <= outcome.end_s
    assert len(result.engines) == 4, "the lives of an engine are one in the figures"
