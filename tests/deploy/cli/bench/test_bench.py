"""The figures of `millrace bench`, by hand; and that each kind of it measures what it says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.deploy.cli.bench import latency, throughput
from millrace.deploy.cli.bench.load import BenchRequest, arrivals, random_requests, read_requests
from millrace.deploy.cli.bench.measures import RequestRecord, Stopwatch, is_good, parse_goodput, statistics, summarize
from millrace.deploy.cli.bench.offline import run_request
from millrace.deploy.cli.bench.serve import has_text
from millrace.deploy.cli.main import main
from millrace.stages.errors import ConfigError
from millrace.stages.testing.scripted.engine import scripted_engine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.running import RunningServer

# 3 tokens in, 5 out: first after 100 ms, then 200 ms for 4 more
FIRST = RequestRecord(3, 5, 0.1, 0.3, (0.02, 0.08, 0.05, 0.05))
SECOND = RequestRecord(7, 1, 0.3, 0.3)  # one token: nothing between tokens
BROKEN = RequestRecord(error="500: broken")
NAMES = [
    f"{statistic}_{name}_ms"
    for name in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "median", "std", "p99")
]


# -- arithmetic


def test_rates_count_what_was_completed():
    report = summarize([FIRST, SECOND, BROKEN], 2.0)
    assert {name: report[name] for name in report if not name.endswith("_ms")} == {
        "duration": 2.0,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 10,
        "total_output_tokens": 6,
        "request_throughput": 1.0,
        "request_goodput": None,
        "output_throughput": 3.0,
        "total_token_throughput": 8.0,
    }


def test_times_are_in_ms_under_vllms_names():
    report = summarize([FIRST, SECOND, BROKEN], 2.0)
    assert [name for name in report if name.endswith("_ms")] == NAMES
    assert [report[f"{each}_ttft_ms"] for each in ("mean", "median", "std", "p99")] == pytest.approx(
        [200, 200, 100, 298]
    )
    assert report["mean_tpot_ms"] == report["p99_tpot_ms"] == pytest.approx(50)  # only the first has one
    assert (report["mean_itl_ms"], report["median_itl_ms"]) == pytest.approx((50, 50))
    assert report["p99_itl_ms"] == pytest.approx(79.1) and report["std_itl_ms"] == pytest.approx(450**0.5)
    assert (report["mean_e2el_ms"], report["std_e2el_ms"]) == pytest.approx((300, 0))


def test_nothing_completed_gives_zeros():
    report = summarize([BROKEN], 1.0, {"ttft": 1.0})
    assert report["completed"] == 0 and report["request_goodput"] == 0 and {report[name] for name in NAMES} == {0.0}


def test_percentiles_are_named_as_they_are_written():
    names = ["mean_itl_ms", "median_itl_ms", "std_itl_ms", "p50_itl_ms", "p99.9_itl_ms"]
    assert list(statistics("itl", [1.0], [50, 99.9])) == names


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 100}, [True, False]),
        ({"ttft": 99.9}, [False, False]),
        ({"tpot": 49}, [False, True]),  # one token takes no time per further token
        ({"ttft": 300, "tpot": 50.001, "e2el": 300}, [True, True]),
        ({"ttft": 300, "e2el": 299}, [False, False]),
    ],
)
def test_goodput_counts_those_who_keep_to_every_limit(limits, good):
    assert [is_good(FIRST, limits), is_good(SECOND, limits)] == good
    assert summarize([FIRST, SECOND, BROKEN], 2.0, limits)["request_goodput"] == sum(good) / 2


def test_goodput_limits_are_read_or_refused():
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    for text in ("ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "itl:5"):
        with pytest.raises(ConfigError, match=f"--goodput {text}: must be"):
            parse_goodput([text])


def test_a_stopwatch_knows_first_gaps_and_end():
    watch = Stopwatch(10.0)
    for now in (11.0, 11.5, 13.0):
        watch.piece(now)
    watch.end(13.25)
    assert watch.num_pieces == 3
    assert watch.record(4, 3) == RequestRecord(4, 3, 1.0, 3.25, (0.5, 1.5))
    silent = Stopwatch(1.0)
    silent.end(3.0)
    assert silent.num_pieces == 0 and silent.record(4, 1) == RequestRecord(4, 1, 2.0, 2.0)


def test_a_piece_without_text_is_no_token():
    for choice in (
        {"text": "a"},
        {"delta": {"content": "a"}},
        {"delta": {"reasoning": "a"}},
        {"delta": {"tool_calls": [{}]}},
    ):
        assert has_text(choice)
    for choice in (
        {"text": "", "finish_reason": "stop"},
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {}},
    ):
        assert not has_text(choice)


# -- load


def test_random_prompts_have_the_lengths_that_were_asked_for_and_the_seed_decides():
    def draw(seed: int) -> list[BenchRequest]:
        return random_requests(200, 10, 4, 50, np.random.default_rng(seed), 0.5)

    requests = draw(1)
    assert requests == draw(1) != draw(2)
    assert {len(each.prompt or ()) for each in requests} == set(range(5, 16))
    assert {each.num_output for each in requests} == {2, 3, 4, 5, 6}
    assert {token for each in requests for token in each.prompt or ()} == set(range(50))
    assert {len(each.prompt or ()) for each in random_requests(9, 3, 1, 5, np.random.default_rng(0))} == {3}


def test_arrivals_are_a_poisson_process_or_all_at_once():
    times = arrivals(20_000, 4.0, np.random.default_rng(0))
    gaps = np.diff([0.0, *times])
    assert (gaps > 0).all() and gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # of an exponential: as its mean
    assert arrivals(20_000, 4.0, np.random.default_rng(0)) == times
    assert arrivals(2, float("inf"), np.random.default_rng(0)) == [0.0, 0.0]


def test_a_dataset_is_read_as_far_as_needed_and_its_lines_are_checked(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 3}\n{"messages": [{}]}\n{"prompt": [1, 2]}\nno JSON\n')
    requests = [BenchRequest("a", 3), BenchRequest(None, 9, [{}]), BenchRequest([1, 2], 9)]
    assert read_requests(file, 3, 9) == requests and read_requests(file, 1, 9) == requests[:1]
    with pytest.raises(ConfigError, match=r"data\.jsonl:4: must be like"):
        read_requests(file, 4, 9)
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match="must have a prompt or messages"):
        read_requests(file, 4, 9)
    with pytest.raises(ConfigError, match="No such file"):
        read_requests(tmp_path / "none", 4, 9)


# -- in this process


def in_process(monkeypatch: pytest.MonkeyPatch, module: Any, step_s: float = 0.0) -> None:
    monkeypatch.setattr(module, "make_engine", lambda _: scripted_engine(step_s=step_s))


def run(kind: str, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the saved result."""
    saving = ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    code = main(["bench", kind, *saving, *arguments])
    return code, json.loads((folder / "result.json").read_text())


def test_latency_measures_batches_of_full_length(monkeypatch, tmp_path, capfd):
    in_process(monkeypatch, latency, step_s=0.002)
    sizes = [
        "--batch-size",
        "3",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
        "--input-len",
        "9",
        "--output-len",
        "6",
    ]
    code, result = run("latency", tmp_path, *sizes)
    assert code == 0
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (6, 54, 36)
    assert len(result["latencies"]) == 2 and min(result["latencies"]) >= 6 * 0.002
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["mean_ttft_ms"] >= 2 and result["mean_tpot_ms"] >= 1.9
    told = capfd.readouterr().out
    assert "Mean TTFT (ms):" in told and "P99 E2EL (ms):" in told and "Avg latency:" in told


@pytest.mark.slow
def test_throughput_counts_every_token_of_every_request(monkeypatch, tmp_path, capfd):
    in_process(monkeypatch, throughput)
    sizes = ["--num-prompts", "40", "--input-len", "20", "--output-len", "8", "--random-range-ratio", "0.5"]
    code, result = run("throughput", tmp_path, *sizes)
    assert code == 0 and result["completed"] == result["num_requests"] == 40
    requests = random_requests(40, 20, 8, 260, np.random.default_rng(0), 0.5)
    assert result["total_input_tokens"] == sum(len(each.prompt or ()) for each in requests)
    assert result["total_output_tokens"] == sum(each.num_output for each in requests)
    assert result["total_num_tokens"] == result["total_input_tokens"] + result["total_output_tokens"]
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert "requests/s" in capfd.readouterr().out


def test_what_does_not_fit_the_context_is_refused(monkeypatch, capfd):
    in_process(monkeypatch, throughput)
    assert main(["bench", "throughput", "--input-len", "500", "--output-len", "100"]) == 3
    assert "need up to 600 tokens, but the model's context has 512" in capfd.readouterr().err


def test_a_failed_request_is_counted_and_told():
    async def go() -> RequestRecord:
        async with scripted_engine(script=Script()) as engine:
            return await run_request(engine, BenchRequest([1] * 600, 4))

    assert "512" in str(asyncio.run(go()).error)


# -- a server


@pytest.mark.slow
def test_serve_reports_what_clients_see(slow_server: RunningServer, tmp_path, capfd):
    where = ["--base-url", slow_server.url + "/v1/", "--num-prompts", "4", "--input-len", "30", "--output-len", "5"]
    limits = ["--max-concurrency", "1", "--request-rate", "1000", "--goodput", "ttft:60000", "tpot:60000"]
    code, result = run("serve", tmp_path, *where, *limits)
    assert code == 0
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (4, 120, 20)
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(4 / result["duration"])
    assert result["duration"] * 1e3 >= 4 * result["mean_e2el_ms"] * 0.99  # one after the other
    assert result["mean_tpot_ms"] >= 9 and result["mean_ttft_ms"] >= 9  # a step takes 10 ms
    expected_tpot = (result["mean_e2el_ms"] - result["mean_ttft_ms"]) / 4
    assert result["mean_tpot_ms"] == pytest.approx(expected_tpot)
    assert (result["model_id"], result["request_rate"], result["max_concurrency"]) == ("scripted", 1000.0, 1)
    assert "Request goodput (req/s):" in capfd.readouterr().out


def test_serve_reads_a_dataset_and_asks_chats(server: RunningServer, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "Hi"}\n{"messages": [{"role": "user", "content": "Ho"}], "output_tokens": 3}\n')
    where = ["--base-url", server.url, "--endpoint", "/v1/chat/completions", "--dataset-path", str(data)]
    code, result = run("serve", tmp_path, *where, "--output-len", "4", "--ignore-eos")
    assert code == 0 and result["request_rate"] == "inf"
    assert (result["completed"], result["total_output_tokens"]) == (2, 7)


@pytest.mark.slow
def test_serve_says_when_there_is_nothing_to_measure(server: RunningServer, capfd):
    for arguments, told in (
        (["--base-url", "http://127.0.0.1:1"], "lists no model"),
        (["--base-url", server.url, "--model", "other"], "'other': not served here"),
        (["--base-url", server.url, "--endpoint", "/v1/chat/completions"], "set --dataset-path"),
        (["--base-url", server.url, "--request-rate", "0"], "must be above 0, or inf"),
        (["--base-url", server.url, "--num-prompts", "0"], "--num-prompts 0: must be at least 1"),
    ):
        assert main(["bench", "serve", *arguments]) == 3
        assert told in capfd.readouterr().err
