"""Fault injection, by its command line text."""

from __future__ import annotations

import asyncio

import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.fault_injection import Fault, Faults, InjectedError, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("stage=execute,delay=200ms,rate=0.01", Fault("execute", "delay", 0.2, 0.01)),
        ("delay=1.5s,stage=sample", Fault("sample", "delay", 1.5)),
        ("stage=tokenize,error", Fault("tokenize", "error")),
        ("stage=exit,freeze,rate=1", Fault("exit", "freeze")),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault):
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text",
    [
        *("", "execute", "stage=execute", "delay=1s", "stage=,error", "stage=a,error,freeze", "stage=a,error=1"),
        *("stage=a,delay=5", "stage=a,delay=", "stage=a,delay=-1s", "stage=a,error,rate=0", "stage=a,error,rate=2"),
        *("stage=a,error,rate=x", "stage=a,error,rate=nan", "stage=a,drop"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_would_be_one(text: str):
    with pytest.raises(ValueError, match="must be"):
        parse_fault(text)


def test_the_same_seed_strikes_the_same_batches_at_about_the_rate():
    async def struck(seed: int) -> list[int]:
        faults = Faults([Fault("execute", "error", rate=0.1)], LiveEnv(seed))
        found = []
        for batch in range(1000):
            try:
                await faults.strike()
            except InjectedError:
                found.append(batch)
        assert faults.num_struck == len(found)
        return found

    first, again, other = (asyncio.run(struck(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert 60 < len(first) < 140
