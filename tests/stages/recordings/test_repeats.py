"""Repetitions in answers: in recordings, and in simulations that draft by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest

from millrace.deploy.cli.main import main
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages import Engine, SamplingParams
from millrace.stages.config import EngineConfig
from millrace.stages.messages import Guess, Prompt, Request, StepDone, TokenRequest
from millrace.stages.recordings.cost_model import CostModel, FittedCostModel, fit
from millrace.stages.recordings.reader import AllocateCall, Recording, RecordingError, ScheduleCall
from millrace.stages.recordings.repetition import MOST_RIGHT, AnswerHistory, GuessOutcome, Repetition, repeats_of
from millrace.stages.recordings.simulation import Simulation
from millrace.stages.recordings.simulation_result import SimulationResult
from millrace.stages.recordings.workloads import Workload, WorkloadRequest, read_trace
from millrace.stages.schedule.ngram_drafter import continuation
from millrace.stages.testing.scripted.engine import Script, ScriptedPipeline, scripted_pipeline
from tests.counts import FULL, count, first_seed
from tests.stages.recorded_runs import ENGINE, TIGHT, record, spoil

CONFIG = EngineConfig(
    max_model_len=256,
    block_size=16,
    num_gpu_blocks=512,
    max_num_seqs=12,  # too many for drafts
    max_num_batched_tokens=64,
    enable_prefix_caching=False,
    speculation="ngram",
    prompt_lookup_min=1,
    prompt_lookup_max=2,
)

DRAFTING = replace(ENGINE, block_size=16, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64, most_drafts=7)


def told_at(repeats: Repetition | None, place: int) -> tuple[GuessOutcome, int]:
    return (GuessOutcome.NOTHING, 0) if repeats is None else repeats.at(place)


def patchwork(prompt: list[int], seed: int) -> list[int]:
    """A text of new tokens and of copies of earlier pieces, in equal parts."""
    dice, answer = Random(f"{prompt[0]}/{len(prompt)}"), list[int]()
    while len(answer) < 200:
        begin = dice.randrange(len(answer)) if answer else 0
        again = answer[begin : begin + dice.randrange(3, 30)]
        answer += again if dice.random() < 0.5 else [dice.randrange(200) for _ in range(dice.randrange(1, 10))]
    return answer


def serve(
    path: Path, config: EngineConfig, script: Script | None = None, renamed: Callable[[int], int] = int
) -> ScriptedPipeline:
    """Twelve answers of many lengths, recorded, each phase of a step of 4 ms; tokens of prompts have other names."""

    async def ask(parts: ScriptedPipeline, number: int, env: SimEnv) -> None:
        await env.sleep(0.0013 * number)
        token_ids = np.array([renamed(number + i) for i in range(5 + number)], np.int32)
        params = SamplingParams(max_tokens=min(20 + 12 * number, 100), ignore_eos=True)
        async for _ in await parts.pipeline.submit(Request(f"r{number}", (Prompt(token_ids=token_ids),), params)):
            pass

    async def live(env: SimEnv) -> ScriptedPipeline:
        parts = scripted_pipeline(config, script or Script(answer=patchwork), env)
        recorder = parts.core.record(path, config, env)
        async with parts.pipeline:
            await asyncio.gather(*(ask(parts, number, env) for number in range(12)))
            await env.sleep(0.1)  # a client may get the end of its answer before schedule does
        await recorder.aclose()
        return parts

    return run(live, seed=0, worker_delay_s={"device": (0.004, 0.004)}, max_callbacks=10**8).value


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without drafts, as too many requests run."""
    path = tmp_path_factory.mktemp("crowded") / "run.jsonl"
    parts = serve(path, CONFIG)
    assert parts.schedule.scheduler.speculation.num_draft_tokens == 0
    return path


# -- what is recorded


def test_each_place_has_what_the_drafter_guesses_there_and_how_much_is_right():
    dice = np.random.default_rng(first_seed())
    num_right = num_sure = 0
    for _ in range(count(60, 2000)):
        num_prompt, num_answer = int(dice.integers(1, 60)), int(dice.integers(1, 150))
        tokens = dice.integers(0, dice.integers(1, 9), num_prompt + num_answer).astype(np.int32)
        begin = int(dice.integers(len(tokens)))
        tokens[begin:] = tokens[: len(tokens) - begin]  # with a long repeat in it
        least = int(dice.integers(1, 4))
        most = least + int(dice.integers(4))
        repeats = repeats_of(tokens, num_prompt, least, most)
        for place in range(num_answer):
            num_known = num_prompt + place
            guess, num_matched = continuation(tokens[:num_known], least, most, MOST_RIGHT)
            found, right = told_at(repeats, place)
            assert found == (num_matched >= least) + (num_matched >= most)
            rest = tokens[num_known:][: len(guess)]
            is_wrong = (rest != guess[: len(rest)]).nonzero()[0]
            assert right == (is_wrong[0] if len(is_wrong) else len(rest))
            num_right, num_sure = num_right + right, num_sure + (found == GuessOutcome.SURE)
    assert num_right > 10_000 and num_sure > 1000


def check_against_what_happened(path: Path) -> tuple[int, int]:
    """Checks that each guess of the run equals the recorded repetition at its place, as does the number of right
    drafts. Returns how many guesses and drafts were checked: those of sequences that ended."""
    calls = list(Recording(path))
    schedule = [call for call in calls if isinstance(call, ScheduleCall)]
    taken = [message for call in schedule for message in call.taken]
    repeats = dict(pair for call in schedule for pair in call.repeats)
    prompts = {
        asked.first_sequence_id + choice: len(asked.token_ids)
        for asked in taken
        if isinstance(asked, TokenRequest)
        for choice in range(asked.params.n)
    }
    done = {message.step: message for message in taken if isinstance(message, StepDone)}
    ended = {int(each) for message in done.values() for each in message.sequence_ids[message.is_finished]}
    guesses = [guess for guess in taken if isinstance(guess, Guess) and guess.sequence_id in ended]
    for guess in guesses:
        found, _ = told_at(repeats.get(guess.sequence_id), guess.num_known - prompts[guess.sequence_id])
        assert (len(guess.token_ids) > 0, guess.is_sure) == (found != GuessOutcome.NOTHING, found == GuessOutcome.SURE)
    num_looked_at = 0
    grants = [grant for call in calls if isinstance(call, AllocateCall) for grant in call.grants if grant is not None]
    for grant in grants:
        outcome = done.get(grant["step"])
        for slot, num_drafts in zip(grant["slots"], grant["num_drafts"] or (), strict=False):
            rows = np.flatnonzero(outcome.slots == slot) if outcome is not None else ()
            if outcome is None or not num_drafts or not len(rows) or int(outcome.sequence_ids[rows[0]]) not in ended:
                continue
            _, right = told_at(repeats.get(int(outcome.sequence_ids[rows[0]])), int(outcome.places[rows[0]]))
            assert len(rows) - 1 == min(num_drafts, right)
            num_looked_at += num_drafts
    return len(guesses), num_looked_at


@pytest.mark.slow
def test_a_recorded_run_guessed_and_accepted_what_is_told_of_it(tmp_path: Path):
    """Alone and together, with choices, preemptions and cancels."""
    serve(tmp_path / "calm.jsonl", replace(CONFIG, max_num_seqs=2))
    num_guesses, num_drafts = check_against_what_happened(tmp_path / "calm.jsonl")
    assert num_guesses > 100 and num_drafts > 100
    lookup: dict[str, Any] = {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 15}
    tight = replace(TIGHT, speculation="ngram", max_num_seqs=4, num_gpu_blocks=25, **lookup)
    parts = record(tmp_path / "tight.jsonl", 30, config=tight, script=Script(eos_probability=0.01, period=3))
    assert parts.schedule.scheduler.num_preemptions > 0
    num_guesses, num_drafts = check_against_what_happened(tmp_path / "tight.jsonl")
    assert num_guesses > 100 and num_drafts > 100


@pytest.mark.slow
def test_a_real_model_guessed_and_accepted_what_is_told_of_it(tmp_path: Path):
    async def live() -> int:
        sizes: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 2}
        lookup: dict[str, Any] = {"speculation": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        config = EngineConfig(**sizes, **lookup, num_speculative_tokens=15, record=str(tmp_path / "run.jsonl"))
        async with Engine(config) as engine:
            for temperature in (0.0, 0.3):
                params = SamplingParams(max_tokens=150, temperature=temperature, seed=3, ignore_eos=True)
                async for _ in engine.generate("a b c d a b c d a b c d a b", params):
                    pass
            return engine.status().core.scheduler.drafts.num_accepted_tokens

    num_accepted = asyncio.run(live())
    num_guesses, num_drafts = check_against_what_happened(tmp_path / "run.jsonl")
    assert num_guesses > 10 and num_drafts >= num_accepted > 10


@pytest.mark.slow
def test_a_run_without_room_for_drafts_tells_the_same_as_one_with(crowded: Path, tmp_path: Path):
    serve(tmp_path / "few.jsonl", replace(CONFIG, max_num_seqs=2))
    crowd, few = read_trace(crowded), read_trace(tmp_path / "few.jsonl")
    assert crowd.has_repeats and few.has_repeats
    told = [[each.repeats and each.repeats.to_fields(0) for each in trace.requests] for trace in (crowd, few)]
    assert told[0] == told[1] and sum(each is not None for each in told[0]) == 12


def test_a_cancelled_sequence_is_recorded_so_far_and_one_that_may_not_draft_is_not():
    answers, prompt = AnswerHistory(1, 2), np.array([5, 6], np.int32)
    answers.take([TokenRequest("r", 0, prompt, SamplingParams(n=2), 7)], ())
    answers.take([TokenRequest("biased", 0, prompt, SamplingParams(logit_bias={1: 1.0}), 9)], ())
    assert len(answers) == 2
    ids, same = np.array([7, 8, 9]), np.zeros(3, np.intp)
    for place, token in enumerate((5, 6, 5)):
        assert answers.take([StepDone(place, same, ids, same + place, same + token, same > 0)], ()) == []
    again = StepDone(3, same, ids, same + 2, same + 99, same > 0)  # the same place once more, which changes nothing
    assert answers.take([again], ()) == []
    last = StepDone(4, same, ids, same + 3, same + 6, np.array([False, True, True]))
    seven, eight = answers.take([last], [7])[::-1]  # 5 6 | nothing; 5: 6 is found; 6: 5 surely, and 6 after it; ...
    assert seven == {"sequence_id": 7, "counts": [1, 1, 2], "found": [0, 1, 2], "right": [0, 3, 2]}
    assert eight == {**seven, "sequence_id": 8} and len(answers) == 0


# -- what is not recorded


def lines_of(path: Path) -> Iterable[Any]:
    return map(orjson.loads, path.read_bytes().splitlines())


@pytest.mark.slow
def test_texts_of_other_tokens_that_repeat_alike_are_told_alike(crowded: Path, tmp_path: Path):
    """So the record of a text depends only on where it repeats itself."""

    def renamed(token: int) -> int:
        return (token * 77 + 13) % 251

    def answer(prompt: list[int], seed: int) -> list[int]:
        back = {renamed(token): token for token in range(251)}
        return [renamed(token) for token in patchwork([back[token] for token in prompt], seed)]

    serve(tmp_path / "renamed.jsonl", CONFIG, Script(answer=answer), renamed)
    told, other = (
        [line["schedule"]["repeats"] for line in lines_of(path) if "repeats" in line.get("schedule", ())]
        for path in (crowded, tmp_path / "renamed.jsonl")
    )
    assert told == other and sum(len(each) for each in told) == 12


def test_an_engine_that_cannot_draft_records_no_repeats(tmp_path: Path):
    serve(tmp_path / "off.jsonl", replace(CONFIG, speculation="off"))
    header, *rest = lines_of(tmp_path / "off.jsonl")
    assert header["repeats"] is None and not any("repeats" in line.get("schedule", ()) for line in rest)
    assert not read_trace(tmp_path / "off.jsonl").has_repeats


# -- reading


def with_repeats(path: Path) -> tuple[list[bytes], int]:
    """Its lines, and the number of the first with repeats."""
    lines = path.read_bytes().splitlines(keepends=True)
    return lines, next(number for number, line in enumerate(lines) if number and b'"repeats"' in line)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("sequence_id", -1, "repeats.sequence_id = -1: must be a whole number from 0"),
        ("counts", [10**9], "repeats.counts = [1000000000]: must be whole numbers from 1 to 256"),
        ("counts", [0], "repeats.counts = [0]: must be whole numbers from 1 to 256"),
        ("counts", [200, 57], "repeats: must have as many counts as found and right, that add up to 256 at most"),
        ("counts", [3], "repeats: must have as many counts as found and right"),
        ("found", [1, 3], "repeats.found = [1, 3]: must be whole numbers from 0 to 2"),
        ("right", [65, 1], "repeats.right = [65, 1]: must be whole numbers from 0 to 64"),
        ("right", None, "repeats.right = None: must be whole numbers"),
    ],
)
def test_repeats_that_no_engine_wrote_are_refused_with_their_line(
    crowded: Path, tmp_path: Path, name: str, value: object, reason: str
):
    lines, number = with_repeats(crowded)
    told = orjson.loads(lines[number])
    told["schedule"]["repeats"] = [{"sequence_id": 0, "counts": [3, 4], "found": [0, 1], "right": [0, 2], name: value}]
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"".join([*lines[:number], orjson.dumps(told) + b"\n", *lines[number + 1 :]]))
    with pytest.raises(RecordingError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{number + 1}: {reason}")


@pytest.mark.slow
def test_with_one_wrong_value_repeats_are_refused_or_simulated(crowded: Path, tmp_path: Path):
    lines, number = with_repeats(crowded)
    seed, path = first_seed(), tmp_path / "hostile.jsonl"
    dice, outcomes = Random(seed), {"refused": 0, "simulated": 0}
    for _ in range(count(60, 2000)):
        told = orjson.loads(lines[number])
        told["schedule"]["repeats"] *= 2
        spoil(told["schedule"]["repeats"], dice)
        path.write_bytes(b"".join([*lines[:number], orjson.dumps(told) + b"\n", *lines[number + 1 :]]))
        try:
            trace = read_trace(path)
        except RecordingError as error:
            assert str(error).startswith(f"{path}:{number + 1}: ")
            outcomes["refused"] += 1
        else:
            result = Simulation(replace(Recording(path).engine, max_num_seqs=2), CostModel(step_s=1.0)).run(trace)
            assert {outcome.how for outcome in result.outcomes} == {"finished"}
            outcomes["simulated"] += 1
    assert min(outcomes.values()) > 5


# -- simulations that draft


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_num_seqs", "steps_in_flight"), list(product([1, 2, 3], [1, 2])) if FULL else [(1, 2), (2, 1), (3, 2)]
)
def test_a_simulation_of_a_run_without_drafts_takes_the_steps_of_one_with_drafts(
    crowded: Path, tmp_path: Path, max_num_seqs: int, steps_in_flight: int
):
    settings = {"max_num_seqs": max_num_seqs, "steps_in_flight": steps_in_flight}
    live = serve(tmp_path / "run.jsonl", replace(CONFIG, **settings)).schedule.scheduler.speculation  # type: ignore[arg-type]
    calls = list(Recording(tmp_path / "run.jsonl"))
    steps = [grant for call in calls if isinstance(call, AllocateCall) for grant in call.grants if grant is not None]
    fitted, trace = fit(Recording(crowded)), read_trace(crowded)
    result = Simulation(replace(fitted.engine, **settings), fitted.model).run(trace)  # type: ignore[arg-type]
    assert live.num_accepted_tokens > 20
    assert result.num_steps == len(steps)
    assert result.num_draft_tokens == live.num_draft_tokens
    assert result.num_accepted_tokens == live.num_accepted_tokens
    assert result.duration_s == pytest.approx(calls[-1].time_s, rel=0.01)
    assert len(result.itl_s) == sum(outcome.num_tokens - 1 for outcome in result.outcomes)


@pytest.mark.slow
def test_drafts_are_simulated_where_memory_runs_out(crowded: Path):
    sizes = {"max_num_seqs": 2, "max_model_len": 128, "num_blocks": 9}
    trace, engine = read_trace(crowded), Recording(crowded).engine
    tight, roomy = (
        Simulation(replace(engine, **changed), CostModel(step_s=1.0)).run(trace)
        for changed in (sizes, {**sizes, "num_blocks": 64})
    )
    assert tight.num_preemptions > 5 > roomy.num_preemptions == 0
    assert [outcome.num_tokens for outcome in tight.outcomes] == [asked.num_answer for asked in trace.requests]
    assert tight.num_accepted_tokens > 100


def repeating(num_answer: int) -> WorkloadRequest:
    """Its answer goes on as it began, from its first token on."""
    return WorkloadRequest(0.0, 4, num_answer, repeats=Repetition([num_answer], [GuessOutcome.SURE], [num_answer]))


def simulate(*requests: WorkloadRequest) -> SimulationResult:
    """Of a step that takes 1 s, and 0.1 s more for each row."""
    return Simulation(DRAFTING, CostModel(step_s=1.0, decode_row_s=0.1)).run(Workload(requests, False, True))


def test_drafts_that_are_right_come_with_their_step_and_count_as_rows_of_it():
    """A prompt; then 4 drafts and one token; then 7 and one; then what is left."""
    result = simulate(repeating(17))
    assert result.itl_s.tolist() == pytest.approx([1.5, 0, 0, 0, 0, 1.8, 0, 0, 0, 0, 0, 0, 0, 1.3, 0, 0])
    assert (result.num_steps, result.num_draft_tokens, result.num_accepted_tokens) == (4, 13, 13)
    assert result.outcomes[0].num_tokens == 17


def test_drafts_that_are_wrong_cost_their_rows_and_bring_nothing():
    wrong = WorkloadRequest(0.0, 4, 3, repeats=Repetition([3], [GuessOutcome.SURE], [0]))
    result = simulate(wrong)
    assert result.itl_s.tolist() == pytest.approx([1.2, 1.1])  # one draft, as two tokens are left; none, as one is
    assert (result.num_draft_tokens, result.num_accepted_tokens) == (1, 0)


# -- the command


def figures(*arguments: str, capsys: pytest.CaptureFixture[str], path: Path) -> tuple[list[dict[str, Any]], str]:
    """Of `millrace simulate`: the runs, and its other output."""
    assert main(["simulate", *arguments, "--save-result", str(path)]) == 0
    return orjson.loads(path.read_bytes()), capsys.readouterr().err


@pytest.mark.slow
def test_the_command_sweeps_drafts(crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["--trace", str(crowded), "--cost-model", "fit-from-recording", "--set", "max_num_seqs=1"]
    path = tmp_path / "result.json"
    rows, said = figures(*asked, "--sweep", "speculation=auto,off,ngram", capsys=capsys, path=path)
    assert [row["draft_tokens"] > 0 for row in rows] == [True, False, True] and "speculation = off" not in said
    assert rows[0]["num_steps"] == rows[2]["num_steps"] < rows[1]["num_steps"]
    rows, _ = figures(*asked, "--sweep", "num_speculative_tokens=1,15", capsys=capsys, path=path)
    assert rows[0]["num_steps"] > rows[1]["num_steps"]
    assert main(["simulate", *asked, "--set", "num_speculative_tokens=65"]) == 3
    assert "num_speculative_tokens = 65: must be at most 64" in capsys.readouterr().err
    assert main(["simulate", *asked, "--set", "speculation=often"]) == 3
    assert "speculation" in capsys.readouterr().err


def test_the_command_says_that_no_drafts_are_made_if_a_trace_has_no_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    csv, model, path = tmp_path / "azure.csv", tmp_path / "model.json", tmp_path / "result.json"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,37,44\n")
    model.write_bytes(FittedCostModel(CostModel(step_s=1.0), DRAFTING).to_json())
    told = "the trace has no repetitions in answers: speculation = off\n"
    asked = ["--trace", str(csv), "--cost-model", str(model)]
    rows, said = figures(*asked, capsys=capsys, path=path)
    assert said.count(told) == 1 and rows[0]["draft_tokens"] == 0
    _, said = figures(*asked, "--set", "speculation=off", capsys=capsys, path=path)
    assert told not in said
