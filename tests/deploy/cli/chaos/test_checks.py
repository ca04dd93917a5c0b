"""The checks of `millrace chaos` find what is planted, and nothing in a history that is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from millrace.deploy.cli.chaos.awake_clock import AwakeClock
from millrace.deploy.cli.chaos.cases import Case, RightChoice
from millrace.deploy.cli.chaos.checks import check_answers, check_errors, check_logs
from millrace.deploy.cli.chaos.costs import first_tokens
from millrace.deploy.cli.chaos.fleet import FleetSize
from millrace.deploy.cli.chaos.history import ClientRequest
from millrace.deploy.cli.chaos.link_watch import LinkHistory, LinkSpan
from millrace.deploy.cli.chaos.plan import parse_strike
from millrace.deploy.cli.chaos.rest import wait_for_fronts
from millrace.deploy.cli.chaos.strikes import StrikeSpan

SIZE = FleetSize(2, 2)
TEXT = "there was a little girl who had a red ball"
CASE = Case(0, "/v1/completions", {}, choices=(RightChoice(TEXT, "length"),), num_tokens=9, kind="greedy")


def piece(text: str, reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def history(end: str = "done", **changes: object) -> ClientRequest:
    """A whole answer, in three pieces."""
    one = ClientRequest(7, 1, 0, CASE, True, 10.0)
    for text in (TEXT[:10], TEXT[10:30], TEXT[30:]):
        one.take(piece(text), 11.0)
    one.take(piece("", "length"), 12.0)
    one.take({"choices": [], "usage": {"completion_tokens": 9}}, 12.0)
    one.take_line(b"data: [DONE]\n", 12.0)
    one.end, one.ended_s, one.status = end, 12.0, 200  # type: ignore[assignment]
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def with_text(text: str, end: str = "done") -> ClientRequest:
    return history(end, texts={0: [text]})


def ended_twice() -> ClientRequest:
    one = history()
    one.take(piece("", "length"), 13.0)
    return one


def goes_on() -> ClientRequest:
    one = history("left")
    one.take(piece(" more"), 13.0)
    return one


def test_a_right_history_violates_nothing():
    left = with_text(TEXT[:12], "left")
    left.finish_reasons, left.num_tokens = {}, None
    assert check_answers([history(), left]) == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: with_text(TEXT[:20] + TEXT[25:]), "has a gap at 20"),
        (lambda: with_text(TEXT[:20] + TEXT[12:]), "repeats itself at 2"),
        (lambda: with_text(TEXT[:-4]), "ends early at 38"),
        (lambda: with_text(TEXT + " more"), "goes on at 42"),
        (lambda: with_text("other", "left"), "differs at 0"),
        (ended_twice, "I1: it ended more than once"),
        (goes_on, "I1: 1 pieces came after an end"),
        (lambda: history("open"), "I1: it has not ended"),
        (lambda: history(finish_reasons={0: ["stop"]}), "ended by"),
        (lambda: history(finish_reasons={}), "ended by None, not length"),
        (lambda: history(num_tokens=10), "it has 10 tokens by its usage"),
    ],
)
def test_a_planted_fault_of_an_answer_is_found(make: Callable[[], ClientRequest], said: str):
    (found, *_) = [one for one in check_answers([make()]) if said in one] or [None]
    assert found is not None, check_answers([make()])
    assert found.startswith("request 7 (greedy): ")


def span(strike: str, began_s: float, healed_s: float | None) -> StrikeSpan:
    return StrikeSpan(parse_strike(f"{strike}@1", SIZE), began_s, healed_s)


def failed(status: int, error: str) -> ClientRequest:
    return history("refused" if status != 200 else "broken", status=status, error=error)


def test_an_error_is_excused_by_a_strike_of_its_front_and_by_no_other():
    died = failed(0, "ServerDisconnectedError")
    for strikes, num in (("kill front0", 0), ("stop front0", 0), ("kill front1", 1), ("kill engine0", 1)):
        assert len(check_errors([died], [span(strikes, 11.0, 12.0)], LinkHistory(), SIZE)) == num, strikes
    assert len(check_errors([died], [span("upgrade front0", 11.0, 12.0)], LinkHistory(), SIZE)) == 1
    assert len(check_errors([died], [span("kill front0", -50.0, -40.0)], LinkHistory(), SIZE)) == 1


def test_a_503_is_excused_while_all_engines_of_its_front_are_away():
    refused = failed(503, "loading")
    both = [span("kill engine0", 5.0, None), span("cut front0-engine1", 11.0, 12.0)]
    assert check_errors([refused], both, LinkHistory(), SIZE) == []
    assert len(check_errors([refused], both[:1], LinkHistory(), SIZE)) == 1
    assert len(check_errors([failed(500, "internal_error")], both, LinkHistory(), SIZE)) == 1
    others = [span("kill engine0", 5.0, None), span("cut front1-engine1", 11.0, 12.0)]
    assert len(check_errors([refused], others, LinkHistory(), SIZE)) == 1


def test_a_503_is_not_excused_by_an_upgrade_whose_engine_was_linked_again():
    refused = failed(503, "loading")  # from 10 to 12
    first, second = span("upgrade engine0", 1.0, 9.0), span("upgrade engine1", 9.8, 20.0)
    assert check_errors([refused], [first, second], LinkHistory(), SIZE) == []
    first.is_linked = True
    assert len(check_errors([refused], [first, second], LinkHistory(), SIZE)) == 1
    first.healed_s = 9.9
    assert check_errors([refused], [first, second], LinkHistory(), SIZE) == [], "the front has just heard of it"


@pytest.mark.parametrize(("due", "found"), [(2, 2), (3, 2)])
def test_the_next_engine_is_struck_once_all_fronts_are_linked_or_after_a_limit(due: int, found: int):
    asked, clock = iter([0, 0, 1]), AwakeClock()

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ready", "fronts": next(asked, 2)})

    async def run() -> tuple[int, float]:
        app = web.Application()
        app.router.add_get("/health", health)
        async with TestServer(app) as server:
            began_s = clock.now()
            return await wait_for_fronts(str(server.make_url("")).rstrip("/"), due, clock, 1.5), clock.now() - began_s

    linked, waited_s = asyncio.run(run())
    assert linked == found and next(asked, None) is None
    assert due == found or waited_s > 1.4


def test_a_request_may_be_given_up_after_two_deaths_of_engines_under_it():
    links = LinkHistory([LinkSpan("front0", "engine0", 0.0, 10.5), LinkSpan("front0", "engine1", 0.0, 11.5)])
    assert check_errors([failed(500, "engine_died")], [], links, SIZE) == []
    links.spans[1].closed_s = 13.0
    assert len(check_errors([failed(500, "engine_died")], [], links, SIZE)) == 1


def test_a_request_at_two_engines_at_once_is_found():
    links = LinkHistory()
    first, second = LinkSpan("front0", "engine0", 0.0), LinkSpan("front0", "engine1", 0.0)
    links.sent(first, "a", 1.0)
    links.sent(first, "b", 1.0)
    links.ended(first, ["b"])
    links.sent(second, "b", 2.0)
    assert links.violations() == [] and len(links.resends) == 1
    links.sent(second, "a", 3.0)
    first.closed_s = 3.1  # the end of the first connection was only read later
    assert links.violations() == []
    first.closed_s = 9.0
    assert [one.partition(":")[0] for one in links.violations()] == ["I15"]


def test_times_to_the_first_text_are_told_of_quiet_streams_and_of_struck_ones():
    def asked(began_s: float, seconds: float, *, is_stream: bool = True) -> ClientRequest:
        one = ClientRequest(0, 0, 0, CASE, is_stream, began_s)
        one.times = [began_s + seconds, began_s + 50.0]
        return one

    requests = [asked(at, 0.1 + at / 1000) for at in range(100)] + [asked(7.0, 5.0, is_stream=False)]
    spans = [span("kill engine0", 50.0, 60.0)]  # those at 50 to 62 are struck
    assert first_tokens(spans, requests) == (
        "first text, p50 and p99: 0.14 s and 0.20 s of 87 quiet, 0.16 s and 0.16 s of 13 struck streams"
    )
    assert "none of 0 struck" in first_tokens([], requests)


def test_a_stack_or_a_line_that_is_none_in_a_log_is_found(tmp_path: Path):
    path = tmp_path / "engine0-0.log"
    member = SimpleNamespace(log_files=[path], killed=set())
    path.write_text('{"event": "engine.ready"}\n')
    assert check_logs([member]) == []  # type: ignore[list-item]
    path.write_text('{"event": "request.failed", "exception": "Traceback: KeyError"}\nTraceback\n')
    assert len(check_logs([member])) == 2  # type: ignore[list-item]
    path.write_text('{"event": "engine.ready"}\n{"event": "eng')
    member.killed.add(5)
    assert check_logs([member]) == []  # type: ignore[list-item]
