"""What an engine process tells of its load and cache, and what the front makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.fleet.core_set import CoreSet
from millrace.stages.fleet.dispatcher import CoreLoad
from millrace.stages.fleet.fleet_requests import FleetRequests
from millrace.stages.fleet.fleet_router import FleetRouter
from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.routing.reports import KEY_BYTES, KeyChange, RouterReports, packed, unpacked
from millrace.stages.schedule.scheduler import Scheduler, StepLimits
from millrace.stages.schedule.step_timing.step_time_model import StepContents
from millrace.stages.split.protocol import CODEC
from tests.stages.fleet.test_fleet_parts import Core

KEY, BLOCK = b"of the front", 4
IDLE = [CoreLoad(0, 0, 0), CoreLoad(0, 0, 1)]


def prompt(name: str, *tokens: int) -> TokenRequest:
    return TokenRequest(name, 0, np.array(tokens, np.int32), SamplingParams(max_tokens=9, seed=0), 0)


class Process:
    """The step loop of an engine process, as far as it reports."""

    def __init__(self) -> None:
        self.cache = PrefixCache(BLOCK, KEY)
        scheduler = Scheduler(StepLimits(4, 64, 256, BLOCK))
        allocator = Allocator(100, BLOCK, 4, 256, self.cache)
        self.scheduler, self.num_blocks = scheduler, 0
        self.reports = RouterReports(scheduler, allocator)

    def learn(self) -> None:
        assert self.scheduler.costs is not None
        for num in (1, 8, 16):
            self.scheduler.costs.note(StepContents(num_prefill=num, num_decode=1), 0.01 + 0.001 * num)

    def put(self, tokens: TokenRequest) -> None:
        chain = self.cache.chain(self.num_blocks, tokens.token_ids)
        while chain.num_blocks < chain.num_known:
            self.cache.put(chain, self.num_blocks)
            self.num_blocks += 1

    def tell(self, router: FleetRouter, core: int) -> list[str]:
        told = [crossed(report) for report in self.reports.new()]
        for report in told:
            router.note_report(core, report)
        return [type(report).__name__ for report in told]


def crossed(word: Any) -> Any:
    header, body = CODEC.encode(word)
    return CODEC.decode(header, b"".join(body))


def routed_fleet(policy: str = "soonest") -> tuple[FleetRouter, list[Process]]:
    router = FleetRouter(policy, KEY, lambda: 0.0)
    router.open(BLOCK, has_prefixes=True)
    processes = [Process(), Process()]
    for core, process in enumerate(processes):
        process.learn()
        assert process.tell(router, core) == ["EngineLoad"]
    return router, processes


def test_a_prompt_goes_to_the_process_that_told_of_its_blocks():
    router, processes = routed_fleet()
    asked = prompt("a", *range(13))
    processes[1].put(asked)
    assert processes[1].tell(router, 1) == ["KeyChange"] and len(router.held_by(1)) == 3
    assert router.choose(router.routed(asked), IDLE) == 1
    assert router.choose(router.routed(prompt("b", *range(20, 33))), IDLE) == 0
    processes[1].cache.clear()
    assert processes[1].tell(router, 1) == ["KeyChange"] and router.held_by(1) == set()


def test_tokens_that_should_be_cached_are_counted_where_their_prompt_goes():
    router, processes = routed_fleet()
    asked = prompt("a", *range(13))
    processes[1].put(asked)
    processes[1].tell(router, 1)
    router.note_sent(1, router.routed(asked))
    router.note_sent(0, router.routed(asked))
    assert (router.num_expected(0), router.num_expected(1)) == (0, 12)
    router.note_sent(0, router.routed(asked))  # which has them soon, from the first time
    router.drop(0)
    assert (router.num_expected(0), router.num_expected(1)) == (12, 12)


def test_nothing_is_told_twice_and_no_load_before_its_costs_are_known():
    process, router = Process(), FleetRouter("soonest", KEY, lambda: 0.0)
    assert list(process.reports.new()) == []
    process.learn()
    router.open(BLOCK, has_prefixes=True)
    assert process.tell(router, 0) == ["EngineLoad"] and process.tell(router, 0) == []
    process.reports.num_seen += 1
    assert process.tell(router, 0) == ["EngineLoad"]


def test_until_all_have_told_their_load_the_least_work_decides():
    router = FleetRouter("soonest", KEY, lambda: 0.0)
    router.open(BLOCK, has_prefixes=True)
    asked = router.routed(prompt("a", 1, 2, 3))
    assert router.choose(asked, [CoreLoad(5, 1, 0), CoreLoad(4, 9, 1)]) == 1
    assert router.choose(asked, [CoreLoad(4, 2, 0), CoreLoad(4, 1, 1)]) == 1
    assert router.choose(asked, []) is None and router.choose(asked, [CoreLoad(9, 9, 1)]) == 1


def test_a_lost_process_is_forgotten_with_what_it_had_cached():
    router, processes = routed_fleet()
    asked = prompt("a", *range(13))
    processes[1].put(asked)
    processes[1].tell(router, 1)
    router.drop(1)
    assert router.held_by(1) == set() and router.choose(router.routed(asked), IDLE) == 0


def test_prompts_are_counted_as_sent_until_the_process_has_seen_them():
    router, processes = routed_fleet()
    table = FleetRequests(2)
    cores = [Core(table, index, 100) for index in range(2)]
    fleet = CoreSet(cores, table, router)  # type: ignore[arg-type]
    for number in range(6):
        assert fleet.place(
            replace(prompt(f"r{number}", *range(60 * number, 60 * number + 60)), first_sequence_id=number)
        )
    assert [len(core.sent) for core in cores] == [3, 3], "each of them waits behind those sent before"
    views = router._router.views if router._router is not None else {}
    assert views[0].tokens_since == 180 and views[0].prompt_s_since > 0
    processes[0].reports.num_seen = 3
    processes[0].tell(router, 0)
    assert views[0].tokens_since == 0 and views[1].tokens_since == 180


def test_keys_cross_by_their_first_bytes_and_others_are_refused():
    keys = [bytes([i]) * 32 for i in range(3)]
    change = crossed(KeyChange(packed(keys), packed([])))
    assert unpacked(change.added) == [key[:KEY_BYTES] for key in keys] and unpacked(change.removed) == []
    with pytest.raises(ValueError, match=r"must be uint8\[N, 16\]"):
        unpacked(np.zeros((2, 8), np.uint8))


@pytest.mark.parametrize("policy", ["least-work", "round-robin", "prefix-only"])
def test_other_rules_can_be_set(policy: str):
    router, _ = routed_fleet(policy)
    asked = router.routed(prompt("a", 1, 2, 3))
    assert {router.choose(asked, [CoreLoad(5, 0, 0), CoreLoad(4, 0, 1)]) for _ in range(2)} <= {0, 1}


def test_a_session_of_an_owner_stays_where_it_is_unless_that_is_much_worse():
    router, processes = routed_fleet()
    homes = {}
    for number in range(12):
        asked = [replace(prompt("a", *range(20 * number, 20 * number + n)), session=f"s{number}") for n in (5, 9, 13)]
        (homes[number],) = {router.choose(router.routed(each), IDLE) for each in asked}
    assert set(homes.values()) == {0, 1}, "sessions are spread"
    others = [replace(prompt("a", 1, 2, 3), session=f"s{number}", owner="other") for number in range(12)]
    assert [router.choose(router.routed(each), IDLE) for each in others] != list(homes.values())
    home = homes[0]
    for _ in range(400):
        router.note_sent(home, router.routed(prompt("b", *range(99))))
    assert router.choose(router.routed(replace(prompt("a", 1, 2, 3), session="s0")), IDLE) == 1 - home
