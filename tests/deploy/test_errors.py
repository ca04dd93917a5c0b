"""The table of error codes is complete, and describes each error for clients."""

from __future__ import annotations

import re
from pathlib import Path

from millrace.deploy.errors import CODES, MAX_MESSAGE_CHARS, ApiError, describe, not_serving
from millrace.runtime.pipeline import Health, NotServing
from millrace.stages.errors import Failed, Overloaded, Refused

ROOT = Path(__file__).resolve().parents[2]


def test_every_code_that_is_written_somewhere_is_in_the_table():
    written = set()
    for file in [*(ROOT / "deploy").rglob("*.py"), *(ROOT / "stages").rglob("*.py")]:
        text = file.read_text()
        written |= set(re.findall(r"ApiError\(\s*\"(\w+)\"", text))
        written |= set(re.findall(r"\b(?:error_)?code(?:: \w+)? ?= ?\"(\w+)\"", text))
    assert len(written) > 15
    assert written <= set(CODES)
    assert CODES["engine_died"] == (Failed.status, Failed.type)


def test_an_overload_says_when_to_come_back_and_why():
    error = describe(Overloaded("full", queue_depth=256, estimated_wait_s=2.7))
    assert error is not None
    assert (error.status, error.headers["Retry-After"]) == (429, "3")
    assert error.body()["error"]["details"] == {"stage": "schedule", "queue_depth": 256, "estimated_wait_s": 2.7}


def test_an_overload_of_a_fleet_says_how_many_engines_and_the_place_in_the_shortest_queue():
    error = describe(Overloaded("full", queue_depth=7, estimated_wait_s=2.7, num_engines=3))
    assert error is not None
    assert (error.headers["X-Queue-Position"], error.body()["error"]["details"]["engines"]) == ("7", 3)


def test_a_refusal_keeps_its_words_its_code_and_its_field():
    error = describe(Refused("n = 0: must be at least 1", param="n"))
    assert error is not None
    expected = {
        "message": "n = 0: must be at least 1",
        "type": "BadRequestError",
        "param": "n",
        "code": "invalid_value",
    }
    assert error.body() == {"error": expected}


def test_each_state_of_the_engine_has_its_words():
    for state in ("new", "loading", "draining", "dead", "stopped"):
        error = describe(NotServing(Health(state)))
        assert error is not None and error.status == 503 and "Retry-After" in error.headers
        assert error.message == not_serving(Health(state)).message


def test_an_unexpected_error_has_no_description():
    assert describe(RuntimeError("secret")) is None


def test_a_message_is_cut_to_its_limit():
    assert len(ApiError("invalid_value", "x" * 10_000).message) == MAX_MESSAGE_CHARS
