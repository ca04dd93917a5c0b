"""The requests of several fronts in one engine keep their numbers apart."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from millrace.stages.fleet.front_table import FrontTable, front_of
from millrace.stages.messages import (
    Pooled,
    PromptLogprobs,
    PromptProgress,
    Started,
    StepTokens,
    TokenRequest,
    TopLogprobs,
)
from millrace.stages.params import SamplingParams

IDS = np.arange(3, dtype=np.int32)
SLOTS = 8


def prompt(request_id: str, first: int, n: int = 1) -> TokenRequest:
    return TokenRequest(request_id, 0, IDS, SamplingParams(n=n, max_tokens=4), first)


def started(slot: int, sequence_id: int, request_id: str) -> Started:
    return Started(slot, sequence_id, request_id, IDS, 3, SamplingParams(max_tokens=4), 0)


def step_of(slots: list[int], ids: list[int], *begun: Started) -> StepTokens:
    at, numbers = np.array(slots, np.intp), np.array(ids, np.int64)
    return StepTokens(1, at, numbers, at * 0, at + 100, np.zeros(len(at), np.int8), begun)


def two_fronts() -> FrontTable:
    table = FrontTable(SLOTS)
    table.add(0)
    table.add(1)
    return table


def test_equal_numbers_of_two_fronts_are_two_sequences_and_go_back_to_their_fronts():
    table = two_fronts()
    mine, theirs = table.take(0, prompt("a", 7, 2)), table.take(1, prompt("a", 7))
    assert mine.request_id != theirs.request_id and front_of(theirs.request_id) == 1
    ids = [mine.first_sequence_id, mine.first_sequence_id + 1, theirs.first_sequence_id]
    assert len(set(ids)) == 3
    begun = [
        started(slot, one, each.request_id)
        for slot, one, each in zip((3, 5, 4), ids, (mine, mine, theirs), strict=True)
    ]
    (front, first), (other, second) = table.split(step_of([3, 4, 5], [ids[0], ids[2], ids[1]], *begun))
    assert (front, other) == (0, 1)
    assert first.sequence_ids.tolist() == [7, 8] and first.token_ids.tolist() == [103, 105]
    assert second.sequence_ids.tolist() == [7] and second.slots.tolist() == [4]
    assert [(one.request_id, one.sequence_id) for one in (*first.started, *second.started)] == [
        ("a", 7),
        ("a", 8),
        ("a", 7),
    ]


def test_what_is_told_of_rows_slots_and_sequences_goes_with_them():
    table = two_fronts()
    ids = [table.take(front, prompt("r", 40 + front)).first_sequence_id for front in (0, 1)]
    begun = [started(front, one, f"r@{front}") for front, one in enumerate(ids)]
    step = replace(
        step_of([0, 1], ids, *begun),
        logprobs={1: TopLogprobs(-1.0, 1, (), ())},
        pooled={0: Pooled(ids[0], None, None)},  # type: ignore[arg-type]
        prompt_logprobs=[PromptLogprobs(ids[1], 1, *[IDS] * 5)],  # type: ignore[arg-type]
        progress=[PromptProgress(ids[0], 2)],
    )
    (_, first), (_, second) = table.split(step)
    assert second.logprobs == {0: step.logprobs[1]} and not first.logprobs
    assert first.pooled[0].sequence_id == 40 and not second.pooled
    assert [one.sequence_id for one in second.prompt_logprobs] == [41] and not first.prompt_logprobs
    assert [one.sequence_id for one in first.progress] == [40] and not second.progress


def test_a_step_without_rows_still_tells_a_front_of_its_prompt():
    table = two_fronts()
    one = table.take(1, prompt("long", 3)).first_sequence_id
    ((front, part),) = table.split(replace(step_of([], []), progress=[PromptProgress(one, 16)]))
    assert front == 1 and not len(part.slots)
    assert [(each.sequence_id, each.num_processed) for each in part.progress] == [(3, 16)]


def test_causes_reach_live_sequences_of_their_front_only():
    table = two_fronts()
    ours = table.take(0, prompt("a", 5)).first_sequence_id
    table.take(1, prompt("b", 6))
    assert table.causes(0, {5: "cancel", 6: "cancel"}) == {ours: "cancel"}
    assert table.forget(0, ["a", "unknown"]) == ["a@0"]
    assert table.causes(0, {5: "cancel"}) == {}
    assert table.by_front({ours: "x"}) == {}


def test_a_front_that_is_gone_leaves_its_requests_to_be_cancelled_and_hears_nothing():
    table = two_fronts()
    ids = [table.take(front, prompt("r", 1)).first_sequence_id for front in (0, 1)]
    table.split(step_of([0, 1], ids, *(started(front, one, f"r@{front}") for front, one in enumerate(ids))))
    assert table.drop(0) == (["r@0"], [ids[0]])
    ((front, part),) = table.split(step_of([0, 1], ids))
    assert front == 1 and part.sequence_ids.tolist() == [1]
    table.check()


def test_any_history_of_requests_gives_each_front_the_tokens_of_its_own():
    drawn, table, fronts = Random(11), FrontTable(SLOTS), list[int]()
    live: dict[int, tuple[int, int, str]] = {}  # the engine's number -> (front, its number, its request)
    held: dict[int, int] = {}  # slot -> the engine's number
    next_of: dict[int, int] = {}
    for turn in range(1500):
        what = drawn.random()
        if what < 0.05 or not fronts:
            fronts.append(turn)
            next_of[turn] = 0
            table.add(turn)
        elif what < 0.08:
            gone = fronts.pop(drawn.randrange(len(fronts)))
            wanted = {one for one, (front, _, _) in live.items() if front == gone}
            assert set(table.drop(gone)[1]) == wanted
            live = {one: told for one, told in live.items() if one not in wanted}
            held = {slot: one for slot, one in held.items() if one not in wanted}
        elif what < 0.4:
            front, n = drawn.choice(fronts), drawn.randint(1, 3)
            first = next_of[front]
            next_of[front] += n
            took = table.take(front, prompt(f"q{first}", first, n))
            assert table.take(front, prompt(f"q{first}", first, n)).first_sequence_id == took.first_sequence_id
            live.update({took.first_sequence_id + i: (front, first + i, f"q{first}") for i in range(n)})
        elif what < 0.55 and live:
            front, _, request = drawn.choice(list(live.values()))
            table.forget(front, [request])
            over = {one for one, told in live.items() if (told[0], told[2]) == (front, request)}
            live = {one: told for one, told in live.items() if one not in over}
            held = {slot: one for slot, one in held.items() if one not in over}
        else:
            begun = []
            for slot in set(range(SLOTS)) - set(held):
                waiting = [one for one in live if one not in held.values()]
                if waiting and drawn.random() < 0.5:
                    held[slot] = drawn.choice(waiting)
                    begun.append(started(slot, held[slot], f"{live[held[slot]][2]}@{live[held[slot]][0]}"))
            heard = set()
            for front, part in table.split(step_of(list(held), list(held.values()), *begun)):
                heard |= {
                    (front, number, slot)
                    for number, slot in zip(part.sequence_ids.tolist(), part.slots.tolist(), strict=True)
                }
            assert heard == {(live[one][0], live[one][1], slot) for slot, one in held.items()}
        table.check()
