from __future__ import annotations

from millrace.stages.fleet.choice_log import MAX_CHOICES, ChoiceLog, EngineChoice
from millrace.stages.fleet.dispatcher import CoreLoad


def choice(number: int) -> EngineChoice:
    loads = [CoreLoad(40, 3, 1), CoreLoad(70, 1, 0)]
    return EngineChoice(f"r{number}", 1, 2.00049, 33, loads, {0: 0.12345, 1: 0.1}, {1: 16})


def test_a_choice_tells_the_score_and_the_cached_tokens_of_each_engine() -> None:
    assert choice(5).to_json() == {
        "request_id": "r5",
        "engine": 1,
        "at_s": 2.0,
        "num_prompt_tokens": 33,
        "engines": [
            {"index": 0, "score_s": 0.1235, "num_cached_tokens": 0, "work": 70, "num_requests": 1},
            {"index": 1, "score_s": 0.1, "num_cached_tokens": 16, "work": 40, "num_requests": 3},
        ],
    }


def test_the_last_choices_are_kept_and_the_newest_comes_first() -> None:
    log = ChoiceLog()
    for number in range(MAX_CHOICES + 2):
        log.note(choice(number))
    names = [one.request_id for one in log.newest()]
    assert names == [f"r{number}" for number in range(MAX_CHOICES + 1, 1, -1)]
    assert [one.request_id for one in log.newest(1)] == names[:1] and log.newest(0) == []
