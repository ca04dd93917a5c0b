"""The predicted wait in an engine, checked by hand."""

from __future__ import annotations

import pytest

from millrace.stages.routing.engine_load import EngineLoad, EngineView
from millrace.stages.routing.policies import LeastWork
from millrace.stages.routing.queue_wait import shortest, wait_s
from millrace.stages.routing.router import RoutedRequest, Router
from millrace.stages.schedule.step_timing.step_time_model import StepTimeCosts

COSTS = StepTimeCosts(step_s=0.02, prefill_token_s=0.001)


def load(num_rows: int, num_waiting: int, prompt_s: float = 0.0, capacity: int = 10_000) -> EngineLoad:
    """Of an engine with four slots, whose sequences have 50 tokens each."""
    tokens = (50 * num_rows, 50 * num_waiting)
    return EngineLoad(0, prompt_s, num_rows, num_waiting, *tokens, capacity, 4, 256, COSTS)


def view(*args: float, engine: int = 0, **options: int) -> EngineView:
    made = EngineView(engine)
    made.note_load(load(*args, **options))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("seen", "due_s"),
    [
        (view(0, 0), 0.0),
        (view(2, 1, 0.07), 0.07),  # all find a slot once the prompt is computed
        (view(4, 0), 0.5 / 4 * 0.2),  # ten tokens take 0.2 s, and four answers end in that time
        (view(4, 6, 0.12), 6.5 / 4 * 0.2 + 0.08),  # six prompts in two steps, in which the rows decode as well
        (view(2, 1, capacity=100), 1.5 / 2 * 0.2),  # the memory holds two sequences
    ],
)
def test_a_request_waits_for_the_prompts_before_it_and_for_a_slot(seen: EngineView, due_s: float) -> None:
    assert wait_s(seen, 10.0) == pytest.approx(due_s)


def test_requests_sent_since_the_report_and_those_on_their_way_wait_as_well() -> None:
    seen = view(4, 2)
    before_s = wait_s(seen, 10.0)
    seen.note_sent(0.05, 50)
    assert wait_s(seen, 10.0) == pytest.approx(before_s + 0.05 + 0.01)  # of two steps with prompts, rows decode in both
    assert wait_s(seen, 10.0, 2.0) > wait_s(seen, 10.0) + 0.1


def test_requests_on_their_way_are_not_as_long_as_a_prompt_that_was_begun() -> None:
    seen = view(1, 0, 10.0)
    seen.note_sent(0.05, 50)
    assert wait_s(seen, 10.0, 2.0) == pytest.approx(10.05 + 2 * 0.05)


def test_the_shortest_queue_is_that_of_least_time_and_not_of_fewest_requests() -> None:
    fast, slow = view(4, 3, engine=0), view(4, 1, engine=1)
    slow.note_load(EngineLoad(0, 0.0, 4, 1, 200, 50, 10_000, 4, 256, StepTimeCosts(step_s=0.1)))
    assert shortest([slow, fast], 10.0)[0] is fast


def test_a_router_knows_no_queue_before_an_engine_has_reported() -> None:
    router = Router(LeastWork(), 16)
    assert router.queues([0, 1], 0) is None
    router.note_load(0, load(4, 3))
    router.note_load(1, load(4, 1))
    for _ in range(3):
        router.note_answer(10)
    router.note_sent(1, RoutedRequest(50), 0.0)
    # one of the two on their way to each: (4 + 4 + 1 - 4 - 0.5) / 4 * 0.2 s in the first
    assert router.queues([0, 1], 2) == (4, pytest.approx(0.225), 3.0)


def test_an_engine_that_has_just_come_has_no_queue_until_its_slots_are_taken() -> None:
    router = Router(LeastWork(), 16)
    router.note_load(0, load(4, 3))
    for _ in range(4):
        assert router.queues([0, 1], 1) == (0, 0.0, 0.0)
        router.note_sent(1, RoutedRequest(50), 0.0)
    assert router.queues([0, 1], 0) == router.queues([0], 0) != (0, 0.0, 0.0)
