"""What `python -m tests.bench.cpu.arrivals` offers, how it counts what came of it, and what the page says of that."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.deploy.cli.bench.load import BenchRequest
from millrace.deploy.cli.bench.measures import RequestRecord
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages.recordings.workloads import Workload, WorkloadRequest, read_trace
from tests.bench.cpu import arrivals, report
from tests.bench.cpu.arrivals import UNFINISHED, drive
from tests.bench.cpu.contenders import Served, start
from tests.bench.cpu.peers import OUR_SERVER
from tests.bench.cpu.sustained import Bounds, Window, highest, summary, window
from tests.deploy.sockets import until

SECONDS = (0.0, 4.0, 5.0, 10.0, 12.0)
BOUNDS = Bounds(ttft_ms=1_000.0, itl_ms=50.0, p99_ttft_ms=4_000.0, share=0.95, settle_s=2.0)


@pytest.fixture
def trace() -> Workload:
    """Five requests in 12 s; the last prompt is long."""
    return Workload(
        [WorkloadRequest(at_s, 10 + n, 3) for n, at_s in enumerate(SECONDS[:4])] + [WorkloadRequest(12.0, 50, 3)], False
    )


def cut(trace: Workload, rate: float, duration_s: float, **told: Any) -> Window:
    return window(trace, rate, duration_s, **{"from_s": 0.0, "max_model_len": 100, "seed": "s", **told})


def test_as_many_requests_come_as_the_rate_says_and_the_shape_of_their_gaps_stays(trace: Workload):
    offered = cut(trace, 0.2, 20.0)
    assert offered.times_s == [0.0, 20 / 3, 25 / 3, 50 / 3]  # the fifth, after 12 s of the trace, would come at 20
    assert offered.stretched == pytest.approx(20 / 12) and offered.duration_s == 20.0
    assert [(len(asked.prompt or ()), asked.num_output) for asked in offered.asks] == [
        (10, 3),
        (11, 3),
        (12, 3),
        (13, 3),
    ]


def test_a_window_begins_with_the_first_request_from_its_second_on(trace: Workload):
    offered = cut(trace, 1.0, 2.0, from_s=4.5)
    assert [len(asked.prompt or ()) for asked in offered.asks] == [12, 13]
    assert offered.times_s == [0.0, pytest.approx(2 * 5 / 7)]


def test_the_seed_alone_decides_the_prompts(trace: Workload):
    asks = cut(trace, 0.2, 20.0).asks
    assert asks == cut(trace, 0.4, 10.0).asks != cut(trace, 0.2, 20.0, seed="t").asks
    assert asks[0].prompt != (asks[1].prompt or [])[:10]


def test_prompts_are_cut_to_fit_the_context_with_their_answers_and_counted(trace: Workload):
    offered = cut(trace, 1.0, 3.0, from_s=0.0, max_model_len=14)
    assert [len(asked.prompt or ()) for asked in offered.asks] == [10, 11, 11] and offered.num_cut == 1
    with pytest.raises(ValueError, match="an answer of 3 tokens does not fit a context of 3"):
        cut(trace, 1.0, 3.0, max_model_len=3)


def test_a_trace_with_too_few_requests_is_no_window(trace: Workload):
    with pytest.raises(ValueError, match=r"5 requests from 0 s on, and one more: the trace has 5 there"):
        cut(trace, 5.0, 1.0)


def test_a_csv_like_azures_becomes_a_window(tmp_path: Path):
    path = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:15:4{second}.5000000,{7 + second},2\n" for second in (6, 7, 9))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    offered = cut(read_trace(path), 0.5, 4.0)
    assert offered.times_s == [0.0, pytest.approx(4 / 3)] and len(offered.asks[1].prompt or ()) == 14


# -- what came of it


def offered(*times_s: float, duration_s: float = 10.0) -> Window:
    return Window([BenchRequest([1, 2], 3) for _ in times_s], times_s, duration_s, 1.0, 0)


def record(ttft_s: float, gap_s: float) -> RequestRecord:
    """An answer of three tokens."""
    return RequestRecord(2, 3, ttft_s, ttft_s + 2 * gap_s, (gap_s, gap_s))


def test_the_summary_counts_finished_refused_and_failed_requests_and_goodput():
    records = [
        record(0.5, 0.04),
        record(0.5, 0.06),  # its tokens come too slowly
        record(3.0, 0.04),  # and the first of these too late
        RequestRecord(error="429: all that may wait"),
        RequestRecord(error="500: a fault"),
        RequestRecord(2, 2, 0.1, 0.2, (0.1,)),  # a token too few
    ]
    found = summary(offered(0.0, 1.0, 2.0, 3.0, 4.0, 9.5), records, BOUNDS)
    assert (found["offered"], found["finished"], found["refused"], found["failed"]) == (6, 3, 1, 2)
    assert found["errors"] == ["429: all that may wait", "500: a fault"]
    assert found["goodput"] == 1 / 10 and found["good"] == 1 / 6
    assert found["output_tok_s"] == 9 / 10 and found["last_answer_s"] == 10.0
    assert (found["median_ttft_ms"], found["median_itl_ms"]) == pytest.approx((500.0, 40.0))
    assert found["p99_ttft_ms"] == pytest.approx(500 + 0.98 * 2500)
    assert found["finished_in_time"] == 3 / 5 and not found["keeps_up"]  # who came at 9.5 is not asked for


def test_answers_that_end_after_the_requests_stopped_take_their_time_from_the_rate_of_tokens():
    found = summary(offered(0.0, 9.0), [record(0.5, 0.04), record(10.0, 0.5)], BOUNDS)
    assert found["last_answer_s"] == 20.0 and found["output_tok_s"] == 6 / 20


@pytest.mark.parametrize(
    ("ttft_s", "keeps_up"),
    [
        ([0.5] * 20, True),
        ([0.5] * 19 + [3.9], True),  # the last, of 6.65, is not finished at 10: 95 % are
        ([0.5] * 18 + [3.9] * 2, False),  # nor is that of 6.3
        ([9.0] + [0.5] * 19, False),  # p99 is above 4 s
    ],
)
def test_a_server_keeps_up_if_it_finishes_in_time_and_first_tokens_come_soon(ttft_s: list[float], keeps_up: bool):
    times_s = [number * 0.35 for number in range(20)]
    found = summary(offered(*times_s), [record(each, 0.04) for each in ttft_s], BOUNDS)
    assert found["keeps_up"] == keeps_up and found["finished"] == 20


def test_who_refuses_all_does_not_keep_up():
    found = summary(offered(0.0, 1.0), [RequestRecord(error="429: full")] * 2, BOUNDS)
    assert not found["keeps_up"] and found["goodput"] == found["output_tok_s"] == 0 and found["refused"] == 2


@pytest.mark.parametrize(
    ("limit", "first", "num_probes", "expected", "asked"),
    [
        (1.0, 0.8, 2, 1.0, [0.8, 1.0]),
        (1.0, 0.8, 5, 1.0, [0.8, 1.0, 1.25, 1.118, 1.0573]),
        (0.5, 0.8, 4, 0.4096, [0.8, 0.64, 0.512, 0.4096]),
        (0.1, 0.8, 3, None, [0.8, 0.64, 0.512]),
    ],
)
def test_the_search_goes_up_or_down_and_then_halves_what_is_in_doubt(
    limit: float, first: float, num_probes: int, expected: float | None, asked: list[float]
):
    tried: list[float] = []

    async def keeps_up(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = asyncio.run(highest(keeps_up, first, num_probes))
    assert found == (None if expected is None else pytest.approx(expected))
    assert tried == pytest.approx(asked, rel=1e-3)


def test_the_search_ends_when_little_is_in_doubt():
    tried: list[float] = []

    async def keeps_up(rate: float) -> bool:
        tried.append(rate)
        return rate <= 0.7

    found = asyncio.run(highest(keeps_up, 0.6, 20))
    assert found is not None and 0.7 / 1.08 < found <= 0.7 and len(tried) == 4


# -- driving


class Slow:
    """Answers after so many seconds as the request has tokens to come."""

    def __init__(self, env: SimEnv) -> None:
        self.env = env
        self.asked_s: list[float] = []

    async def run_request(self, asked: BenchRequest) -> RequestRecord:
        began_s = asyncio.get_running_loop().time()
        self.asked_s.append(began_s)
        await asyncio.sleep(asked.num_output)
        waited_s = asyncio.get_running_loop().time() - began_s
        return RequestRecord(1, asked.num_output, waited_s, waited_s)


@sim_test(seeds=1)
async def test_requests_are_sent_when_they_are_due_and_wait_for_no_answer(env: SimEnv):
    client = Slow(env)
    began_s = asyncio.get_running_loop().time()
    records = await drive(
        client,
        Window([BenchRequest([1], 5), BenchRequest([1], 7), BenchRequest([1], 2)], [0.0, 1.0, 9.0], 10.0, 1.0, 0),
        3.0,
    )
    assert [at_s - began_s for at_s in client.asked_s] == pytest.approx([0.0, 1.0, 9.0], abs=1e-3)
    assert [each.e2el_s for each in records] == pytest.approx([5.0, 7.0, 2.0], abs=1e-3)


@sim_test(seeds=1)
async def test_who_is_not_finished_when_waiting_is_given_up_has_failed(env: SimEnv):
    began_s = asyncio.get_running_loop().time()
    records = await drive(
        Slow(env), Window([BenchRequest([1], 5), BenchRequest([1], 60)], [0.0, 1.0], 10.0, 1.0, 0), 3.0
    )
    assert [each.error for each in records] == [None, UNFINISHED]
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(13.0, abs=1e-3)


# -- one server after the other

ANSWERS = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(json.dumps({"data": [{"id": "model"}]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pieces = [{"choices": [{"text": "a"}]}] * asked["max_tokens"]
        pieces += [{"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}]
        self.say(b"".join(b"data: " + json.dumps(piece).encode() + b"\\n\\n" for piece in pieces))

    def say(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
OPTIONS = argparse.Namespace(
    rate=None,
    first_rate=40.0,
    probes=1,
    probe_s=0.2,
    search_peers=False,
    minutes=0.3 / 60,
    from_minute=0.0,
    max_model_len=100,
    drain_s=600.0,
)


def served(label: str, code: str) -> Served:
    return Served(label, [sys.executable, "-c", code, "{port}"], version="1.0")


@pytest.fixture
def busy() -> Workload:
    """A request every second, more of them than are asked for."""
    return Workload([WorkloadRequest(float(at_s), 5, 3) for at_s in range(30)], False)


@pytest.mark.slow
def test_a_peer_that_does_not_come_up_is_left_out_and_nothing_else_is_lost(
    busy: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(arrivals, "read_bandwidth_gb_s", lambda: 1.0)  # which reads a GiB ten times a server
    servers = [served(OUR_SERVER, ANSWERS), served("broken", "raise SystemExit(3)"), served("peer", ANSWERS)]
    bounds = Bounds(p99_ttft_ms=20_000.0, settle_s=0.0, share=0.0)
    found = asyncio.run(arrivals.compare(servers, busy, OPTIONS, bounds, tmp_path))
    assert found["rate"] == 40.0 and list(found["sustained"]) == [OUR_SERVER]
    assert list(found["engines"]) == list(found["versions"]) == list(found["peak_mib"]) == [OUR_SERVER, "peer"]
    for figures in found["engines"].values():
        assert figures["finished"] == figures["offered"] == 12 and 0 < figures["busy_cores"] < 64


def test_without_our_own_server_nothing_is_compared(busy: Workload, tmp_path: Path):
    servers = [served(OUR_SERVER, "raise SystemExit(3)"), served("peer", ANSWERS)]
    with pytest.raises(RuntimeError, match=f"{OUR_SERVER} did not come up"):
        asyncio.run(arrivals.compare(servers, busy, OPTIONS, BOUNDS, tmp_path))


@pytest.mark.slow
def test_a_server_whose_start_is_cut_short_is_ended(tmp_path: Path):
    process_id = tmp_path / "pid"
    write = f"import os, pathlib, time; pathlib.Path({str(process_id)!r}).write_text(str(os.getpid())); time.sleep(60)"

    async def cut_short() -> None:
        starting = asyncio.create_task(start(served("peer", write), tmp_path / "log"))
        await until(lambda: process_id.exists() and bool(process_id.read_text()))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: not _runs(int(process_id.read_text())))

    asyncio.run(cut_short())


@pytest.mark.slow
def test_a_server_that_was_killed_between_two_turns_is_named_with_how_it_ended(tmp_path: Path):
    async def use_it() -> None:
        running = await start(served("peer", ANSWERS), tmp_path / "log")
        os.killpg(running._process.pid, signal.SIGKILL)
        await running._process.wait()
        with pytest.raises(RuntimeError, match=r"peer is gone \(killed"), running.awake():
            pass

    asyncio.run(use_it())


def _runs(process_id: int) -> bool:
    status = Path(f"/proc/{process_id}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


# -- deploy/docs/performance-cpu.md


@pytest.fixture
def results() -> dict[str, Any]:
    """Two servers, of which ours has more goodput and longer waits."""
    ours = summary(offered(0.0, 1.0), [record(0.9, 0.04), record(0.9, 0.04)], BOUNDS)
    theirs = summary(offered(0.0, 1.0), [record(0.5, 0.2), RequestRecord(error="429: full")], BOUNDS)
    return {
        "shape": "smollm2-135m",
        "dtype": "bfloat16",
        "measured_on": "2026-11-22",
        "note": "A quiet machine.",
        "cpu": "A fast one",
        "instructions": "AVX512",
        "threads": 2,
        "python": "3.11.7",
        "asked": {"trace": "azure.csv", "from_minute": 20.0, "minutes": 10.0, "stretched": 12.34, "requests": 2}
        | {"mean_prompt": 1207.6, "mean_answer": 224.4, "greatest_prompt": 4092, "cut": 0, "max_model_len": 8192},
        "bounds": {"ttft_ms": 2000.0, "itl_ms": 100.0, "p99_ttft_ms": 10_000.0, "share": 0.95, "settle_s": 30.0},
        "rate": 0.4,
        "versions": {"millrace server": "0.1", "other server": "7.5"},
        "sustained": {"millrace server": {"rate": 0.4, "probes": []}},
        "engines": {
            "millrace server": ours | {"read_bandwidth_gb_s": [33.0, 34.0]},
            "other server": theirs | {"read_bandwidth_gb_s": [35.0, 36.0]},
        },
    }


def test_the_section_has_a_table_of_the_arrivals_and_says_where_millrace_loses(results: dict[str, Any], tmp_path: Path):
    (tmp_path / "arrivals-shape-machine.json").write_text(json.dumps(results))
    made = report.section(tmp_path)
    assert (
        "minute 20: 2 requests in 10 minutes, 0.4 a second (gaps 12.3 times the trace's), on average 1,208 tokens"
        in made
    )
    for words in ("p99 TTFT below 10 s", "TTFT below 2 s and mean ITL below 100 ms", "other 7.5", "A quiet machine."):
        assert words in made
    title = "Arrivals of a trace, 0.4 a second, smollm2-135m, bfloat16, A fast one (AVX512)"
    ends = "finished by the end millrace 100%, other 50%; goodput millrace 0.2, other 0"
    assert f"<summary>{title}: {ends}</summary>" in made
    row = "| millrace | up to 0.4 | 2 of 2 | 100% | 0 | 0 | 1 | 0.9 / 0.9 | 40 / 40 | 0.2 (100%) | 33.0 / 34.0 |"
    assert row in made
    assert "| other | no | 1 of 2 | 50% | 1 | 0 | 0 | 0.5 / 0.5 | 200 / 200 | 0 (0%) | 35.0 / 36.0 |" in made
    losses = [line for line in made.splitlines() if line.startswith("- ")]
    assert losses == [f"- time to the first token, {which}: other is 1.80 times as good" for which in ("p50", "p99")]
    assert "W4" not in made and report.found(tmp_path) == []  # no chart is drawn of these


def test_where_the_rate_was_given_the_table_says_whether_it_was_kept_up_with(results: dict[str, Any], tmp_path: Path):
    results["sustained"] = {}
    (tmp_path / "arrivals-shape-machine.json").write_text(json.dumps(results))
    assert "| millrace | yes | 2 of 2" in report.section(tmp_path)


def test_a_server_that_finished_nothing_was_not_faster(results: dict[str, Any], tmp_path: Path):
    nothing = summary(offered(0.0, 1.0), [RequestRecord(error="429: full")] * 2, BOUNDS)
    results["engines"]["other server"] = nothing | {"read_bandwidth_gb_s": [35.0, 36.0]}
    (tmp_path / "arrivals-shape-machine.json").write_text(json.dumps(results))
    assert "Where millrace loses: in none of these figures, against other." in report.section(tmp_path)


def test_arrivals_without_a_peer_have_no_losses(results: dict[str, Any], tmp_path: Path):
    del results["engines"]["other server"], results["versions"]["other server"]
    (tmp_path / "arrivals-shape-machine.json").write_text(json.dumps(results))
    assert "Where millrace loses: there was no peer to compare with." in report.section(tmp_path)
