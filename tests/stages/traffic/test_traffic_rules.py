"""Shares of requests by labels: which requests are in one, and what is no share."""

from __future__ import annotations

import pytest

from millrace.stages.errors import ConfigError
from millrace.stages.traffic.split_counts import SIDES, SplitCounts, choose_side
from millrace.stages.traffic.traffic_rules import TrafficRules, TrafficShare

KEYS = [f"session {number}".encode() for number in range(10_000)]


def taken(text: str) -> set[bytes]:
    share = TrafficShare.parse("--split", text)
    return {key for key in KEYS if share.takes(key)}


def test_a_share_takes_its_part_of_the_keys_and_a_larger_one_keeps_those() -> None:
    some, more = taken("version=v2:5"), taken("version=v2:50")
    assert abs(len(some) - 500) < 75 and abs(len(more) - 5000) < 200 and some < more
    assert taken("version=v2:0") == set() and taken("version=v2:100") == set(KEYS)
    assert abs(len(taken("version=v2:0.5")) - 50) < 25


def test_shares_of_two_labels_are_drawn_independently() -> None:
    both = taken("version=v2:50") & taken("version=v3:50")
    assert abs(len(both) - 2500) < 200
    assert taken(f"{'x' * 32}={'y' * 63}:50") != taken(f"{'x' * 32}={'y' * 62}z:50")


def test_a_share_reads_as_it_was_written() -> None:
    share = TrafficShare.parse("--split", "version=v2.1-rc:0.5")
    assert (share.name, share.value, share.percent, str(share)) == ("version", "v2.1-rc", 0.5, "version=v2.1-rc:0.5")
    assert share.selects({"version": "v2.1-rc", "zone": "eu"})
    assert not share.selects({"version": "v2.1"}) and not share.selects({})


@pytest.mark.parametrize("text", ["version=v2", "v2:5", "v=v2:101", "v=v2:-1", "v=v2:5%", "=v2:5", "a=b:x"])
def test_what_is_no_share_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be NAME=VALUE:PERCENT.*such as version=v2:5") as refused:
        TrafficShare.parse("--split", text)
    assert f"--split {text}:" in str(refused.value)


def test_engines_of_a_shadow_are_of_no_side_and_cannot_be_those_of_the_split() -> None:
    rules = TrafficRules.parse("version=v2:5", "version=v3:1")
    groups = [rules.group_of({"version": version}) for version in ("v1", "v2", "v3")]
    assert groups == ["rest", "labelled", "shadow"]
    assert [rules.serves_clients({"version": version}) for version in ("v2", "v3")] == [True, False]
    with pytest.raises(ConfigError, match="serve copies alone"):
        TrafficRules.parse("version=v2:5", "version=v2:1")


# -- sides


def test_a_request_goes_to_its_side_unless_only_the_other_can_take_it() -> None:
    def chosen(labelled: list[int], rest: list[int], *full: int) -> list[str | None]:
        sides = {"labelled": labelled, "rest": rest}
        return [choose_side(drawn, sides, lambda some: some[0] in full) for drawn in SIDES]  # type: ignore[arg-type]

    assert chosen([1], [2]) == ["labelled", "rest"]
    assert chosen([], [2]) == ["rest", "rest"] and chosen([1], []) == ["labelled", "labelled"]
    assert chosen([1], [2], 1) == ["rest", "rest"] and chosen([1], [2], 2) == ["labelled", "labelled"]
    assert chosen([1], [2], 1, 2) == ["labelled", "rest"]
    assert chosen([1], [], 1) == ["labelled", "labelled"] and chosen([], []) == [None, None]


def test_each_side_counts_what_became_of_its_requests() -> None:
    counts = SplitCounts()
    for number, (drawn, side) in enumerate([("labelled", "labelled"), ("labelled", "rest"), ("rest", "rest")]):
        counts.note_sent(f"r{number}", drawn, side)  # type: ignore[arg-type]
        counts.note_first_token(f"r{number}", 1000 * (number + 1))
    counts.note_end("r0", is_finished=False, is_failed=True)
    counts.note_end("r1", is_finished=True, is_failed=False)
    counts.note_end("r2", is_finished=False, is_failed=False)
    counts.note_end("r0", is_finished=True, is_failed=False)  # it has ended
    counts.note_first_token("unknown", 5)
    labelled, rest = (counts.sides[side].to_json() for side in SIDES)
    expected = {"num_requests": 1, "num_moved": 1, "num_finished": 0, "num_failed": 1}
    assert labelled == expected | {"ttft_p50_ms": labelled["ttft_p50_ms"], "ttft_p99_ms": labelled["ttft_p99_ms"]}
    assert labelled["ttft_p50_ms"] == pytest.approx(1.0, rel=0.02)
    assert rest["ttft_p99_ms"] == pytest.approx(3.0, rel=0.02)
    assert (rest["num_requests"], rest["num_moved"], rest["num_finished"], rest["num_failed"]) == (2, 0, 1, 0)
    assert len(counts) == 0
    counts.clear()
    assert counts.sides["rest"].to_json()["num_requests"] == 0 and counts.sides["rest"].to_json()["ttft_p50_ms"] is None
