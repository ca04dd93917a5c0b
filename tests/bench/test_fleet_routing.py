"""The benchmark of routing rules on small workloads."""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson
import pytest

from tests.bench import fleet_routing

pytestmark = pytest.mark.slow


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    lines = [
        {"timestamp": 300 * at, "input_length": 1500, "output_length": 9, "hash_ids": [at % 5, 90 + at % 5]}
        for at in range(40)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    return argparse.Namespace(
        trace=trace, requests=None, times=1.0, policy="soonest,round-robin", engines=3, seconds=9.0
    )


def test_one_engine_with_all_memory_finds_the_most(options: argparse.Namespace):
    *rules, one = fleet_routing.run_mooncake(options)
    assert [row["finished"] for row in (*rules, one)] == [40, 40, 40]
    assert one["cached_tokens"] == 35 * 1024, "the first five prompts find nothing"
    assert rules[0]["cached_tokens"] == one["cached_tokens"]
    assert rules[1]["cached_tokens"] == 0, "one engine after the other: no prompt meets an engine twice"


def test_requests_with_the_hot_prefix_find_it(options: argparse.Namespace):
    options.requests = 30
    rows = fleet_routing.run_hot(options)
    assert [(row["share"], row["finished"]) for row in rows] == [(1.0, 30), (1.0, 30), (0.9, 30), (0.9, 30)]
    assert rows[0]["cached_tokens"] >= 22 * fleet_routing.HOT_TOKENS, "each of 8 engines computes it at most once"


def test_each_engine_brings_its_own_minutes_of_the_trace(
    options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fleet_routing, "LEAST_REQUESTS", 1)  # in processes of their own, as a long trace
    options.trace = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{at:02d}.0000000,300,20" for at in range(20)]
    options.trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    (row, _) = fleet_routing.run_azure(options)
    assert row["engines"] == 3 and row["finished"] == row["num_requests"] and 26 <= row["num_requests"] <= 28
    assert row["cached_tokens"] == 0, "the trace has no prefixes"
