"""The choice of an engine: by seconds, and the rules it is measured against."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from millrace.stages.routing.engine_load import EngineLoad, EngineView
from millrace.stages.routing.policies import POLICIES, LeastWork, PrefixOnly, RoundRobin, SoonestAnswer
from millrace.stages.routing.router import RoutedRequest, Router
from millrace.stages.routing.score import LOST, RequestFacts, prompt_s, scores_s
from millrace.stages.schedule.step_timing.step_time_model import StepTimeCosts

COSTS = StepTimeCosts(0.01, 1e-4, 1e-9, 1e-4, 1e-8)
IDLE: dict[str, Any] = {
    "seen": 0,
    "prompt_s": 0.0,
    "num_rows": 0,
    "num_waiting": 0,
    "context_tokens": 0,
    "waiting_tokens": 0,
    "capacity_tokens": 100_000,
    "max_rows": 64,
    "token_budget": 2048,
    "costs": COSTS,
    "free_tokens": 100_000,
}
ASKED = RequestFacts(4000, 100.0)


def views(*loads: dict[str, Any]) -> list[EngineView]:
    made = [EngineView(engine) for engine in range(len(loads))]
    for view, load in zip(made, loads, strict=True):
        view.note_load(EngineLoad(**{**IDLE, **load}))
    return made


def best(of: Sequence[EngineView], cached: dict[int, int], facts: RequestFacts = ASKED) -> int:
    return SoonestAnswer().choose(facts, of, cached)


def test_a_cached_prefix_wins_while_the_wait_for_it_is_shorter_than_computing_it():
    computing_s = prompt_s(COSTS, 4000, 0, 2048)
    assert best(views({}, {"prompt_s": 0.5 * computing_s}), {1: 3900}) == 1
    assert best(views({}, {"prompt_s": 1.5 * computing_s}), {1: 3900}) == 0


def test_a_copy_into_a_full_cache_counts_six_times():
    computing_s, cached_s = prompt_s(COSTS, 4000, 0, 2048), prompt_s(COSTS, 4000, 3900, 2048)
    for free, share in ((0, 3900 / 4000), (2100, 0.5), (4100, 0.0)):
        wait_s = (1 + LOST * share) * computing_s - cached_s
        for part, chosen in ((0.9, 1), (1.2, 0)):
            assert best(views({"free_tokens": free}, {"prompt_s": part * wait_s}), {1: 3900}) == chosen, (free, part)


def test_a_new_prompt_costs_the_same_wherever_the_memory_is():
    assert len(set(scores_s(views({"free_tokens": 0}, {}), ASKED, {}).values())) == 1
    some = scores_s(views({"free_tokens": 0}, {}), ASKED, {0: 512, 1: 512})
    assert some[0] == some[1], "both have what is cached"


def test_a_prompt_sent_since_the_report_takes_free_memory():
    view = views({"free_tokens": 5000})[0]
    before_s = scores_s([view], ASKED, {9: 3900})[0]
    view.note_sent(0.0, 4000)
    assert scores_s([view], ASKED, {9: 3900})[0] > before_s + 0.5 * LOST * prompt_s(COSTS, 4000, 0, 2048)


@pytest.mark.parametrize(
    ("busier", "why"),
    [
        ({"prompt_s": 1.0}, "prompts wait"),
        ({"num_rows": 60, "context_tokens": 60_000}, "its rows make steps longer, and lose by one more"),
        ({"num_rows": 64}, "no slot is free"),
        ({"context_tokens": 99_000, "num_rows": 1}, "no memory is free"),
        ({"num_waiting": 70, "waiting_tokens": 9000}, "others wait before it"),
    ],
)
def test_each_kind_of_load_sends_a_request_to_the_other_engine(busier: dict[str, Any], why: str):
    assert best(views(busier, {}), {}) == 1, why
    assert best(views({}, busier), {}) == 0, why


def test_what_was_sent_since_the_report_counts_until_a_report_has_seen_it():
    view = views({})[0]
    alone_s = scores_s([view], ASKED, {})[0]
    view.note_sent(0.5, 4000)
    view.note_sent(0.25, 10)
    assert scores_s([view], ASKED, {})[0] > alone_s + 0.7
    view.note_load(EngineLoad(**{**IDLE, "seen": 1}))
    assert view.prompt_s_since == 0.25 and view.tokens_since == 10 and view.rows_since == 1
    view.note_load(EngineLoad(**{**IDLE, "seen": 2}))
    assert scores_s([view], ASKED, {})[0] == alone_s


def test_an_engine_that_has_not_reported_is_judged_by_what_was_sent_to_it():
    unheard = [EngineView(0), EngineView(1)]
    unheard[0].note_sent(0.0, 100)
    assert best(unheard, {}) == 1


def test_a_sticky_key_stays_at_its_engine_unless_another_is_much_better():
    facts = replace(ASKED, sticky_key=b"session")
    home = best(views({}, {}, {}), {}, facts)
    assert {best(views(*[{"prompt_s": 0.1 * (engine == home)} for engine in range(3)]), {}, facts)} == {home}
    assert best(views(*[{"prompt_s": 9.0 * (engine == home)} for engine in range(3)]), {}, facts) != home


def test_a_copy_in_a_full_cache_moves_no_session_from_its_engine():
    homes = set()
    for number in range(40):
        facts, full = replace(ASKED, sticky_key=bytes([number])), [{"free_tokens": 0}] * 4
        home = best(views(*full), {}, facts)
        assert best(views(*full), {0: 2000}, facts) == home
        homes.add(home)
    assert homes == {0, 1, 2, 3}


def test_sticky_keys_spread_over_engines_and_few_move_when_one_comes():
    def homes(count: int) -> list[int]:
        facts = [replace(ASKED, sticky_key=str(i).encode()) for i in range(600)]
        return [best(views(*[{}] * count), {}, one) for one in facts]

    before, after = homes(3), homes(4)
    assert min(before.count(engine) for engine in range(3)) > 150
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {3} and 100 < len(moved) < 200


def test_the_rules_it_is_measured_against_choose_as_they_are_named():
    three = views({"num_rows": 5}, {}, {})
    assert PrefixOnly().choose(ASKED, three, {0: 16}) == 0 and PrefixOnly().choose(ASKED, three, {}) == 1
    turns = RoundRobin()
    assert [turns.choose(ASKED, three, {}) for _ in range(4)] == [0, 1, 2, 0]
    three[0].work, three[1].work = 5.0, 2.0
    assert LeastWork().choose(ASKED, three, {}) == 2
    assert all(policy().choose(ASKED, three[:1], {}) == 0 for policy in POLICIES.values())


def test_routers_that_number_engines_otherwise_send_a_sticky_key_to_the_same_one():
    names = [f"10.0.0.{number}:7000" for number in range(5)]
    homes: list[list[str]] = []
    for order in (names, names[::-1], [*names[2:], *names[:2]]):
        router = Router(SoonestAnswer(), 16)
        for place, name in enumerate(order):
            router.names[place] = name
            router.note_load(place, EngineLoad(0, 0.0, 0, 0, 0, 0, 1 << 20, 64, 512, StepTimeCosts(step_s=0.01)))
        keys = [f"session {number}".encode() for number in range(20)]
        asked = [RoutedRequest(100, sticky_key=key) for key in keys]
        homes.append([order[router.choose(one, range(len(order)), 0.0)] for one in asked])
    assert homes[0] == homes[1] == homes[2] and len(set(homes[0])) > 2


def test_a_score_is_the_sum_that_its_module_tells_of_any_engine():
    rng = random.Random(62)
    for _ in range(300):
        running = rng.choice([0, rng.randrange(99_000)])
        load = {"prompt_s": rng.random(), "num_rows": rng.randrange(65), "num_waiting": rng.choice([0, 30])}
        load |= {"free_tokens": rng.choice([0, rng.randrange(12_000)])}
        view = views({**load, "context_tokens": running, "waiting_tokens": rng.randrange(9000)})[0]
        for _ in range(rng.randrange(3)):
            view.note_sent(rng.random(), rng.randrange(500), rng.randrange(1, 3))
        facts = RequestFacts(rng.randrange(1, 9000), rng.uniform(1, 900), rng.randrange(1, 4))
        cached, elsewhere = (rng.choice([0, rng.randrange(facts.num_prompt + 1)]) for _ in range(2))
        plain_s = plain_score_s(view, facts, cached, elsewhere)
        assert scores_s([view], facts, {0: cached, 1: elsewhere})[0] == pytest.approx(plain_s, rel=1e-9)


def plain_score_s(view: EngineView, facts: RequestFacts, num_cached: int, elsewhere: int) -> float:
    load = view.load
    assert load is not None
    num_there = load.num_rows + load.num_waiting + view.rows_since
    rows = min(load.max_rows, num_there)
    context = load.context_tokens + load.waiting_tokens + view.tokens_since
    before_s = COSTS.decoding_s(rows, context)
    after_s = COSTS.decoding_s(rows + facts.num_choices, context + facts.num_prompt)
    computing_s = prompt_s(COSTS, facts.num_prompt, num_cached, load.token_budget)
    num_left, free = max(1, facts.num_prompt - num_cached), load.free_tokens - load.waiting_tokens - view.tokens_since
    pushed_out = facts.num_prompt - num_cached + facts.num_answer * facts.num_choices - free
    lost = LOST * max(0.0, min(elsewhere - num_cached, pushed_out)) / num_left
    first_s = load.prompt_s + view.prompt_s_since + computing_s + lost * computing_s
    missing = context + facts.num_prompt + facts.num_answer * facts.num_choices - num_cached - load.capacity_tokens
    room = missing / load.context_tokens if missing > 0 and load.context_tokens else 0.0
    slots = max(0, num_there + 1 - load.max_rows) / load.max_rows
    answer_s, harm_s = facts.num_answer * after_s, facts.num_answer * (after_s - before_s) * rows
    return first_s + answer_s + harm_s + max(room, slots) * facts.num_answer * before_s
