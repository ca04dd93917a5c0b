"""Simulation: small runs that one can check by hand, the cost model, traces, and the command."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import orjson
import pytest

from millrace.deploy.cli.main import main
from millrace.stages.recordings.cost_model import CostModel, FittedCostModel, StepContents, fit, fit_steps
from millrace.stages.recordings.reader import Recording, RecordingError
from millrace.stages.recordings.simulated_engine import AdmissionLimits
from millrace.stages.recordings.simulation import Simulation
from millrace.stages.recordings.simulation_result import SimulationResult
from millrace.stages.recordings.workloads import Workload, WorkloadRequest, read_trace
from tests.stages.recorded_runs import ENGINE, TIGHT, record

ONE_A_SECOND = CostModel(step_s=1.0)


def simulate(
    *requests: WorkloadRequest,
    model: CostModel = ONE_A_SECOND,
    admission: AdmissionLimits | None = None,
    **sizes: object,
) -> SimulationResult:
    return Simulation(replace(ENGINE, **sizes), model, admission).run(Workload(requests, False))  # type: ignore[arg-type]


# -- by hand


def test_a_lone_request_takes_a_step_per_chunk_of_its_prompt_and_per_later_token():
    result = simulate(WorkloadRequest(5.0, num_prompt=20, num_answer=3))
    (outcome,) = result.outcomes
    assert outcome.ttft_s == 3.0 and outcome.end_s == 10.0 and outcome.how == "finished"
    assert result.itl_s.tolist() == [1.0, 1.0] and result.num_steps == 5 and result.duration_s == 5.0


def test_rows_of_one_step_share_its_time():
    result = simulate(*[WorkloadRequest(0.0, num_prompt=2, num_answer=10) for _ in range(4)])
    assert {outcome.end_s for outcome in result.outcomes} == {10.0} and result.most_rows == 4
    assert result.summary()["output_tokens_per_s"] == 4.0


def test_a_step_takes_what_the_model_says_of_its_contents():
    model = CostModel(step_s=1.0, prefill_token_s=0.1, prefill_pair_s=0.01, decode_row_s=0.5, decode_context_s=0.001)
    (outcome,) = simulate(WorkloadRequest(0.0, num_prompt=4, num_answer=3), model=model).outcomes
    prompt = 1.0 + 4 * 0.1 + (1 + 2 + 3 + 4) * 0.01
    assert outcome.ttft_s == pytest.approx(prompt)
    assert outcome.end_s == pytest.approx(prompt + 2 * 1.5 + (5 + 6) * 0.001)


def test_two_steps_in_flight_are_planned_ahead_and_change_no_time():
    requests = [WorkloadRequest(0.3 * i, num_prompt=5, num_answer=4 + i) for i in range(6)]
    one, two = (simulate(*requests, steps_in_flight=k) for k in (1, 2))
    assert [outcome.num_tokens for outcome in one.outcomes] == [outcome.num_tokens for outcome in two.outcomes]
    assert two.duration_s == pytest.approx(one.duration_s, abs=2.0)


def test_slots_and_blocks_are_what_they_are_set_to():
    requests = [WorkloadRequest(0.0, num_prompt=4, num_answer=4) for _ in range(4)]
    assert simulate(*requests, max_num_seqs=1).duration_s == 16.0
    crowded = [WorkloadRequest(0.0, num_prompt=8, num_answer=40) for _ in range(4)]
    assert simulate(*crowded).num_preemptions == 0
    tight = simulate(*crowded, num_blocks=16)
    assert tight.num_preemptions > 0 and tight.num_recomputed_tokens > 0
    assert [outcome.num_tokens for outcome in tight.outcomes] == [40] * 4


def test_the_real_intake_turns_away_what_an_engine_would():
    requests = [WorkloadRequest(0.0, num_prompt=4, num_answer=4) for _ in range(5)]
    too_long = WorkloadRequest(0.0, num_prompt=60, num_answer=5)
    result = simulate(*requests, too_long, admission=AdmissionLimits(max_admitted_requests=3))
    assert [outcome.how for outcome in result.outcomes] == ["finished"] * 3 + ["turned away"] * 2 + ["too long"]


def test_a_client_that_leaves_frees_its_slot():
    leaving = WorkloadRequest(0.0, num_prompt=4, num_answer=50, leaves_s=2.5)
    result = simulate(leaving, WorkloadRequest(0.0, num_prompt=4, num_answer=4), max_num_seqs=1)
    assert [outcome.how for outcome in result.outcomes] == ["left", "finished"]
    assert result.outcomes[1].end_s is not None and result.outcomes[1].end_s < 10.0


def test_prompts_whose_blocks_have_the_same_hash_are_found_in_the_cache():
    requests = [WorkloadRequest(10.0 * i, 20, 2, hash_ids=(7, 8, 9 + i), hash_block=8) for i in range(2)]
    result = simulate(*requests, enable_prefix_caching=True)
    first, second = result.outcomes
    assert (first.ttft_s, second.ttft_s) == (3.0, 1.0) and result.cache_hit_rate == 16 / 40


# -- the cost model


def test_a_fit_finds_the_costs_that_steps_were_made_with():
    dice, model = Random(0), CostModel(step_s=3e-3, prefill_token_s=2e-5, decode_row_s=1e-4, decode_context_s=2e-7)
    samples = []
    for _ in range(300):
        num_decode, num_prefill = dice.randrange(20), dice.choice([0, dice.randrange(1, 300)])
        contents = StepContents(num_prefill, num_prefill**2 / 2, num_decode, num_decode * dice.randrange(50, 500))
        samples.append((contents, model.seconds(contents)))
    found = fit_steps(samples)
    for name in CostModel.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(model, name), rel=1e-3, abs=1e-12)


def test_no_cost_is_below_zero_and_the_total_is_right_where_times_are_noise():
    dice = Random(0)
    samples = [(StepContents(num_decode=dice.randrange(9)), dice.uniform(0.001, 0.1)) for _ in range(200)]
    found = fit_steps(samples)
    assert min(getattr(found, name) for name in CostModel.__slots__) >= 0
    assert sum(found.seconds(c) for c, _ in samples) == pytest.approx(sum(took for _, took in samples))


def test_a_cost_model_is_written_and_read_and_a_wrong_one_is_refused(tmp_path: Path):
    path = tmp_path / "model.json"
    path.write_bytes(FittedCostModel(ONE_A_SECOND, ENGINE).to_json())
    assert FittedCostModel.read(path) == FittedCostModel(ONE_A_SECOND, ENGINE)
    told = orjson.loads(path.read_bytes())
    told["seconds"]["step_s"] = -1
    path.write_bytes(orjson.dumps(told))
    with pytest.raises(RecordingError, match=r"model.json: seconds.step_s = -1: must be a finite number"):
        FittedCostModel.read(path)


# -- a recording, simulated


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty requests on a device whose phases take 4 ms each."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    record(path, 20, config=replace(TIGHT, num_gpu_blocks=200, max_unread_tokens=256), device_s=(0.004, 0.004))
    return path


def test_a_recorded_run_simulated_with_its_own_settings_comes_to_the_same(recorded: Path):
    fitted, trace = fit(Recording(recorded)), read_trace(recorded)
    assert fitted.model.seconds(StepContents(num_decode=1)) == pytest.approx(0.008, rel=0.05)
    calls = list(Recording(recorded))
    result = Simulation(fitted.engine, fitted.model).run(trace)
    granted = {grant["step"] for call in calls if hasattr(call, "grants") for grant in call.grants if grant is not None}
    assert result.num_steps == pytest.approx(len(granted), rel=0.05)
    assert result.duration_s == pytest.approx(calls[-1].time_s - 1.0, rel=0.05)
    assert {outcome.how for outcome in result.outcomes} == {"finished", "left"}


@pytest.mark.parametrize(("name", "value"), [("num_tokens", "many"), ("copies", 5), ("starts_less_step", [1, 2, 3])])
def test_a_grant_that_is_none_is_refused_with_its_line(recorded: Path, tmp_path: Path, name: str, value: object):
    lines = recorded.read_bytes().splitlines()
    told = orjson.loads(lines[2])
    told["allocate"]["answers"][0]["grant"][name] = value
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"\n".join([*lines[:2], orjson.dumps(told), *lines[3:], b""]))
    with pytest.raises(RecordingError, match=r"hostile.jsonl:3: grant"):
        fit(Recording(path))


@pytest.mark.slow
def test_the_command_sweeps_settings_and_prints_a_row_for_each(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    save = ["--save-cost-model", str(tmp_path / "model.json"), "--save-result", str(tmp_path / "result.json")]
    sweep = ["--sweep", "max_num_seqs=1,8", "--sweep", "steps_in_flight=1,2"]
    assert main(["simulate", "--trace", str(recorded), "--cost-model", "fit-from-recording", *sweep, *save]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        [f"max_num_seqs={seqs}", f"steps_in_flight={k}"] for seqs in (1, 8) for k in (1, 2)
    ]
    rows = orjson.loads((tmp_path / "result.json").read_bytes())
    assert rows[0]["output_tokens_per_s"] < rows[2]["output_tokens_per_s"] and rows[0]["most_rows"] == 1
    again = ["--cost-model", str(tmp_path / "model.json"), "--set", "max_num_seqs=1", "--set", "steps_in_flight=1"]
    assert main(["simulate", "--trace", str(recorded), *again]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-10:] == lines[1].split()[-10:]


@pytest.mark.slow
def test_the_runs_can_be_drawn(recorded: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    sweep = ["--sweep", "max_num_seqs=1,2,4", "--plot", str(tmp_path / "sweep.png")]
    assert main(["simulate", "--trace", str(recorded), "--cost-model", str(recorded), *sweep]) == 0
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("speed=9", "must be name=value, with one of max_model_len,"),
        ("max_num_seqs=many", "max_num_seqs = 'many': must be a whole number"),
        ("max_num_seqs=0", "max_num_seqs = 0: must be a whole number of at least 1"),
        ("num_gpu_blocks=2", "hold no sequence of max_model_len = 96"),
        ("max_model_len=auto", "must be a number, as a simulation"),
    ],
)
def test_an_impossible_setting_is_refused_as_an_engine_would(
    recorded: Path, setting: str, reason: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", "--trace", str(recorded), "--cost-model", str(recorded), "--set", setting]) == 3
    assert reason in capsys.readouterr().err


# -- traces


def test_azures_and_mooncakes_traces_are_read(tmp_path: Path):
    azure, mooncake = tmp_path / "azure.csv", tmp_path / "mooncake.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
    )
    trace = read_trace(azure)
    assert [(r.num_prompt, r.num_answer) for r in trace.requests] == [(374, 44), (396, 1)]
    assert trace.requests[1].arrival_s == pytest.approx(4.314579) and not trace.has_prefixes
    rows = [{"timestamp": 3000 * i, "input_length": 700, "output_length": 5, "hash_ids": [1, 2 + i]} for i in range(2)]
    mooncake.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    trace = read_trace(mooncake).scaled(times=0.5, lengths=1 / 16)
    one, other = (request.tokens(number) for number, request in enumerate(trace.requests))
    assert len(one) == 44 and trace.has_prefixes and trace.requests[1].arrival_s == 1.5
    assert np.array_equal(one[:32], other[:32]) and not (one[32:] == other[32:]).any()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", ": it has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", ":2: row.TIMESTAMP = 'now': must be a date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-77 18:15:46,1,1\n", ":2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-5,1\n", ":2: row.ContextTokens = '-5'"),
        ('{"timestamp": 0, "input_length": 99999999999, "output_length": 1}\n', ":1: row.input_length = 99999999999"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1}\nimport os\n', ":2: "),
    ],
)
def test_a_trace_that_is_none_is_refused_with_its_line(tmp_path: Path, content: str, reason: str):
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(RecordingError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{reason}")


@pytest.mark.slow
def test_replay_and_simulation_start_without_torch_and_without_a_server():
    modules = ("deploy.cli.replay", "deploy.cli.simulate.sweeps", "stages.recordings.time_machine")
    code = "; ".join(f"import millrace.{module}" for module in modules)
    code += "; import sys; print(sorted({'torch', 'transformers', 'aiohttp'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "[]\n"
