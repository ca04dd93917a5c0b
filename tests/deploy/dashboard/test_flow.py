"""The rates of the channels, from readings of their counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from millrace.deploy.dashboard.flow import WINDOW_S, FlowRates, TokenCounts


def channels(**num_sent: int) -> Any:
    return {name: SimpleNamespace(num_sent=count, seconds_full=count / 100) for name, count in num_sent.items()}


def test_messages_and_tokens_a_second_are_those_of_the_last_seconds():
    flow = FlowRates()
    flow.note(0.0, channels(a=0), TokenCounts())
    assert flow.of("a", "allocate", "execute") == {}  # one reading tells no rate
    flow.note(0.1, channels(a=999), TokenCounts())  # too soon
    for second in range(1, 9):
        flow.note(float(second), channels(a=10 * second), TokenCounts(second, 20 * second, 500 * second))
    assert flow.of("a", "allocate", "execute") == {"per_s": 10.0, "full": 0.1, "tokens_per_s": 500.0}
    assert flow.of("a", "sample", "detokenize")["tokens_per_s"] == 20.0
    assert flow.of("a", "tokenize", "schedule")["tokens_per_s"] == 1.0
    for source, target in (("intake", "tokenize"), ("sample", "schedule"), ("client", "intake")):
        assert "tokens_per_s" not in flow.of("a", source, target)


def test_a_channel_that_stood_still_for_the_window_has_no_rate():
    flow = FlowRates()
    for second in range(12):
        flow.note(float(second), channels(a=min(second, 3)), TokenCounts(num_generated=min(second, 3)))
    assert flow.of("a", "detokenize", "exit") == {"per_s": 0.0, "full": 0.0, "tokens_per_s": 0.0}


def test_counters_that_went_back_or_were_not_read_for_long_begin_anew():
    flow = FlowRates()
    flow.note(0.0, channels(a=50), TokenCounts())
    flow.note(1.0, channels(a=2), TokenCounts())  # another engine process
    assert flow.of("a", "allocate", "execute") == {}
    flow.note(2.0 + 2 * WINDOW_S, channels(a=900), TokenCounts())
    assert flow.of("a", "allocate", "execute") == {}
