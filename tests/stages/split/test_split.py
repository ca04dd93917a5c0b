"""The parts of split mode that need no second process: the table of requests in flight, and the messages."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.runtime.crash_recovery import StageCrashed
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.pipeline import Health, NotServing
from millrace.runtime.processes.type_fields import VersionError
from millrace.runtime.processes.wire import WireError
from millrace.runtime.startup.load_progress import LoadProgress
from millrace.stages.beam_search.algorithm import CandidateParams
from millrace.stages.config import EngineConfig
from millrace.stages.engine.core import EngineSetup
from millrace.stages.engine.engine import Engine
from millrace.stages.engine.engine_status import CoreReport
from millrace.stages.engine.read_status import owners_of, read_core
from millrace.stages.engine.wiring import PortsOnly
from millrace.stages.errors import ConfigError, ErrorText, Failed, Refused, field_text
from millrace.stages.messages import NO_INDICES, FinishReason, StepTokens, TokenRequest
from millrace.stages.params import SamplingParams, ThinkingBudget
from millrace.stages.pipeline import TO_SCHEDULE
from millrace.stages.sample.logits_processor import LogitsProcessor
from millrace.stages.schedule.scheduler import Scheduler, StepLimits
from millrace.stages.split.core_exit import CoreExit
from millrace.stages.split.engine_core import EngineCore
from millrace.stages.split.engine_process import EngineProcess, load
from millrace.stages.split.front import CORE, join_with_loop
from millrace.stages.split.inflight_requests import STEPS_AT_ONCE, InflightRequests
from millrace.stages.split.process_client import EngineDied
from millrace.stages.split.protocol import CODEC, RequestFailed, ServiceTimes, StatusReply
from millrace.stages.split.remote_core import RemoteCore
from millrace.stages.split.split_engine import SplitEngine
from millrace.stages.structured_outputs import StructuredOutputs
from millrace.stages.testing.scripted.engine import SMALL, ScriptedEngine, scripted_engine


def token_request(name: str, first: int, n: int = 1, index: int = 0, **more: Any) -> TokenRequest:
    params = SamplingParams(n=n, seed=3, max_tokens=50)
    return TokenRequest(name, index, np.array([1, 2, 3], np.int32), params, first, **more)


def tokens(step: int, rows: list[tuple[int, int, int]], over: tuple[int, ...] = ()) -> StepTokens:
    """Rows are (sequence id, place, token id)."""
    ids, places, token_ids = (np.array(column) for column in zip(*rows, strict=True))
    finishes = np.where(np.isin(ids, over), FinishReason.LENGTH, FinishReason.NONE).astype(np.int8)
    return StepTokens(step, ids.astype(np.intp), ids.astype(np.int64), places, token_ids, finishes)


def crossed(message: Any) -> Any:
    header, body = CODEC.encode(message)
    return CODEC.decode(header, b"".join(body))


def is_idle(engine: Engine) -> bool:
    """Whether the step loop, wherever it is, has no sequence and no block."""
    core = engine.status(with_sequences=True).core
    assert core is not None and core.sequences is not None
    return not len(core.sequences.ids) and not core.cache.pool.num_in_use


# -- messages that the front process's version cannot get


def test_what_an_older_front_process_cannot_get_fails_only_its_requests_and_questions() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        process, posted = EngineProcess(near, (), load), list[Any]()

        def post(word: Any) -> None:
            if isinstance(word, StatusReply) and word.value:
                raise WireError("a value of later")
            posted.append(word)

        process._link.post = post  # type: ignore[method-assign]
        for name, first in (("a", 0), ("b", 1)):
            process._exit.take(token_request(name, first))
        process._refused(tokens(0, [(1, 0, 7)]), VersionError("StepTokens cannot be sent"))
        process._reply(StatusReply(4, "more"))
        failed, reply = posted
        assert (failed.request_id, failed.code) == ("b", "engine_version") and list(process._exit.live) == ["a"]
        assert (reply.number, reply.value) == (4, None) and "cannot be sent" in reply.error
        await process._env.aclose()
        near.close()
        far.close()

    asyncio.run(main())


# -- requests in flight


def test_another_engine_is_given_each_prompt_with_what_was_told_of_its_answer() -> None:
    table = InflightRequests()
    table.sent(token_request("a", 0, n=3))
    table.sent(token_request("b", 3))
    table.sent(token_request("c", 4))
    table.note(tokens(0, [(0, 0, 10), (1, 0, 20), (3, 0, 30)]))
    table.note(tokens(1, [(0, 1, 11), (0, 2, 12), (1, 1, 21)], over=(1,)))  # two at once: drafts
    table.forget("c")
    assert table.note_death() is None
    resumed = [
        prompt
        for request_id in table.request_ids()
        for prompt in table.prompts_to_resume(request_id, lambda sequence_id: sequence_id != 3)
    ]
    assert [request.request_id for request in resumed] == ["a"] and not table.prompts_to_resume("c", lambda _: True)
    generated = resumed[0].generated
    assert generated is not None and {choice: ids.tolist() for choice, ids in generated.items()} == {
        0: [10, 11, 12],
        2: [],
    }
    assert "c" not in table and "a" in table


def test_what_is_noted_of_sequences_that_are_over_is_thrown_away() -> None:
    table = InflightRequests()
    for number in (0, 1):
        table.sent(token_request(str(number), number))
    for step in range(STEPS_AT_ONCE - 1):
        table.note(tokens(step, [(0, step, step), (1, step, step)]))
    table.forget("1")
    table.note(tokens(STEPS_AT_ONCE - 1, [(0, STEPS_AT_ONCE - 1, 7)]))
    (ids, _, token_ids) = table._columns()
    assert len(table._steps) == 1 and len(ids) == STEPS_AT_ONCE and token_ids[-1] == 7


def test_requests_that_ran_during_two_deaths_are_suspects_and_waiting_ones_are_not() -> None:
    table = InflightRequests()
    for number, name in enumerate(("older", "waits", "younger")):
        table.sent(token_request(name, number))
    for due in ([], ["younger", "older"]):
        table.admit([0, 2])
        assert table.note_death() is None and table.suspects() == due
    assert table.begin_trial("younger") == 0
    table.note(tokens(0, [(2, 0, 7), (0, 0, 8), (2, 1, 9)]))
    assert table.num_trial_tokens("younger") == 2
    table.end_trial("younger")
    assert table.suspects() == ["older"]


def test_the_one_on_trial_is_guilty_unless_another_untried_one_ran() -> None:
    table = InflightRequests()
    for number, name in enumerate("abc"):
        table.sent(token_request(name, number))
    table.begin_trial("a")
    table.admit([1])
    assert table.note_death() is None, "it did not run"
    table.begin_trial("a")
    table.admit([0, 1])
    assert table.note_death() is None, "b ran too, and was not tried"
    table.begin_trial("b")
    table.admit([1])
    table.end_trial("b")
    table.begin_trial("a")
    table.admit([0])
    assert table.note_death() == "a"


def test_tokens_that_came_twice_are_counted_once() -> None:
    table = InflightRequests()
    table.sent(token_request("a", 0))
    for step, rows in enumerate([[(0, 0, 5)], [(0, 1, 6)], [(0, 1, 6)], [(0, 2, 7)]]):
        table.note(tokens(step, rows))
    (resumed,) = table.prompts_to_resume("a", lambda sequence_id: True)
    assert resumed.generated is not None and resumed.generated[0].tolist() == [5, 6, 7]


# -- resuming


def test_the_scheduler_goes_on_with_an_answer_where_another_engine_has_stopped() -> None:
    scheduler = Scheduler(StepLimits(8, 64, 128, 16), first_step=90)
    generated = {0: np.array([7, 8], np.int32), 2: np.array([], np.int32)}
    scheduler.add(token_request("a", 4, n=3, generated=generated))
    assert sorted(scheduler.sequences) == [4, 6], "choice 1 is over"
    plan = scheduler.plan()
    assert plan is not None and plan.step == 90
    first, second = plan.started
    assert first.token_ids.tolist() == [1, 2, 3, 7, 8] and first.num_prompt == 3
    assert second.token_ids.tolist() == [1, 2, 3] and first.seed != second.seed
    assert scheduler.sequences[4].limit == 53, "as many tokens as were asked for, those that there are included"


# -- messages between the processes


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={5: -100.0}, stop=("a", "é"), stop_token_ids=(1,), allowed_token_ids=(1, 2), seed=-1),
        SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"}), bad_words_token_ids=((1, 2),)),
        SamplingParams(thinking_budget=ThinkingBudget(num_tokens=3, start_ids=(1,), end_ids=(2, 3))),
        CandidateParams(logprobs=500, extra_args={"a": [1, {"b": None}]}),
    ],
)
def test_a_prompt_crosses_as_it_is(params: SamplingParams) -> None:
    request = dataclasses.replace(token_request("ä", 3), params=params, arrival_s=1.25)
    back = crossed(request)
    assert back.params == params and type(back.params) is type(params)
    assert (back.token_ids == request.token_ids).all() and back.token_ids.dtype == np.int32
    assert (back.request_id, back.arrival_s, back.first_sequence_id) == ("ä", 1.25, 3)
    if params.structured_outputs is not None:
        assert {back.params.structured_outputs: 1} == {params.structured_outputs: 1}


def test_a_layout_of_kinds_crosses_as_it_is() -> None:
    kinds = [KVKind("full", (1,), None, 2, 8, 8, 512), KVKind("window", (0, 3), 8, 2, 8, 8, 1024)]
    layout = KVLayout.of(kinds, 4, 2**20, [(1, 0), (0, 0), None, (1, 1)])
    assert crossed(layout) == layout


def test_a_step_of_256_rows_crosses_in_few_bytes_a_token() -> None:
    count = np.arange(256)
    step = StepTokens(9, count, count.astype(np.int64), count, count, np.zeros(256, np.int8))
    header, body = CODEC.encode(step)
    assert len(header) + sum(map(len, body)) < 256 * 40
    back = CODEC.decode(header, b"".join(body))
    assert (back.token_ids == count).all() and back.slots.dtype == NO_INDICES.dtype and back.started == ()


@pytest.mark.parametrize(
    "error",
    [
        Failed("the model failed on this request"),
        Refused(field_text("x", ErrorText(("must be less than ", "y", ", which is 3")), "3")),
        StageCrashed("sample", "internal_error", KeyError("secret")),
        RuntimeError("secret"),
    ],
)
def test_a_failure_crosses_with_what_its_client_is_told_and_no_more(error: Exception) -> None:
    told = RequestFailed.of("a", error)
    back = crossed(told).error()
    assert "secret" not in repr(told) and getattr(back, "code", None) == getattr(error, "code", "internal_error")
    if isinstance(error, (Failed, Refused, StageCrashed)):
        assert type(back) is type(error) and str(back) == str(error)
    if isinstance(back, Refused):
        assert str(back.text.named(str.upper)) == "X = 3: must be less than Y, which is 3" and back.param == "x"


def test_a_failure_without_places_for_names_of_fields_keeps_its_text() -> None:
    failed = RequestFailed("a", "Refused", "the prompt is too long", "invalid_value", "prompt").error()
    assert isinstance(failed, Refused) and (failed.message, failed.param) == ("the prompt is too long", "prompt")


# -- the engine's side


def test_the_engine_process_maps_sequences_to_requests_and_reports_failures_once() -> None:
    said: list[Any] = []

    async def main() -> None:
        exit = CoreExit(said.append)
        exit.take(token_request("a", 2, n=2))
        exit.take(token_request("a", 4, n=2, index=1))
        exit.take(token_request("b", 6))
        assert exit.number_of("a") == 2 and exit.is_live("b")
        assert exit.requests_of(tokens(0, [(5, 0, 1), (6, 0, 1), (99, 0, 1)])) == ("a", "b")
        exit.fail("a", Failed("no"))
        exit.fail("a", Failed("no"))
        exit.forget(["b", "never seen"])
        assert not exit.live and not exit._request_ids
        exit.note_service("c", "schedule", 5)
        exit.note_service("c", "schedule", 6)
        await asyncio.sleep(0)

    asyncio.run(main())
    failed, served = said
    assert isinstance(failed, RequestFailed) and (failed.request_id, failed.reason) == ("a", "no")
    assert isinstance(served, ServiceTimes) and served.times_us == {"c": 11}


def report_of(engine: ScriptedEngine) -> CoreReport:
    """What an engine process with the step loop of this engine would tell of it."""
    status = engine.pipeline.status()
    stages = [status.stages[name] for name in CORE]
    core = read_core(engine.parts.core, with_sequences=True, with_blocks=True)
    return CoreReport(core, stages, list(status.channels.values()))


def test_a_status_crosses_to_the_front_process_with_all_its_numbers() -> None:
    async def main() -> None:
        async with ScriptedEngine(dataclasses.replace(SMALL, num_cpu_blocks=4), step_s=0.1) as engine:
            stream = engine.generate("abc", SamplingParams(max_tokens=400, ignore_eos=True), request_id="one")
            await anext(stream)
            told = report_of(engine)
            here, there = engine.status(with_sequences=True, with_blocks=True), crossed(told)
            assert here.core is not None and plain(told.core) == plain(there.core)
            assert plain(here.core) == plain(there.core) and here.core.cache.pool.num_in_use > 0
            assert owners_of(there.core.sequences, lambda number: "one") == here.owners == {0: "one"}
            (number,) = engine.scheduler.sequences
            (row,), own = here.sequences_of(number, 3), engine.scheduler.sequences[number]
            for name in ("sequence_id", "state", "slot", "num_prompt", "limit", "num_preempted", "is_parked"):
                assert getattr(row, name) == getattr(own, name), name
            held = engine.block_tables.num_blocks
            assert (
                here.num_blocks_of([row.slot]) == held[row.slot] and there.core.cache.waste == engine.block_tables.waste
            )
            joined = join_with_loop(engine.pipeline, TO_SCHEDULE, "sample.out->detokenize.in", 2)
            pipeline = joined.join(here.pipeline, there.stages, there.channels)
            assert list(pipeline.stages) == list(here.pipeline.stages)
            assert {name: one.stats.num_sent for name, one in pipeline.channels.items()} == {
                name: channel.stats().num_sent for name, channel in engine.pipeline.channels.items()
            }
            await stream.aclose()

    asyncio.run(main())


def plain(value: Any) -> Any:
    """A form of a status that can be compared: messages and arrays have no equality."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("is_async", [True, False])
def test_how_long_the_device_idled_crosses_where_it_is_known(is_async: bool) -> None:
    async def main() -> None:
        async with scripted_engine(is_async=is_async) as engine:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            assert [output async for output in engine.generate("abc", params, output_kind="final")]
            await engine.check_quiet()
            here, there = crossed(report_of(engine)).core.idle_gaps_us, engine.idle_gaps_us
            if not is_async:
                assert here is None and there is None
                return
            assert here is not None and there is not None and there.num_observed > 10
            assert (tuple(here.bounds), list(here.counts), here.total) == (there.bounds, there.counts, there.total)

    asyncio.run(main())


# -- the front's side


class Nothing(LogitsProcessor):
    def process(self, *args: Any) -> None:
        raise AssertionError


def test_what_would_have_to_be_in_the_engine_process_is_refused_in_a_sentence() -> None:
    engine = SplitEngine(EngineConfig())
    with pytest.raises(ConfigError, match="mode = split: a stage after schedule would be in the step loop"):
        engine.insert(PortsOnly(CORE["schedule"]), after="schedule")
    with pytest.raises(ConfigError, match="sample is in the engine process"):
        engine.replace("sample", PortsOnly(CORE["sample"]))
    with pytest.raises(NotServing):
        engine.status()
    with pytest.raises(ConfigError, match="a logits processor that was made is in the caller's process"):
        SplitEngine(EngineConfig(), logits_processor=Nothing())


class NoReports:
    """Engine processes that have ended, or never report."""

    cores: Sequence[EngineCore] = ()

    def __init__(self, away: Health | None) -> None:
        self.away = away

    def report(self) -> None:
        return None


@pytest.mark.parametrize(
    ("front", "away", "error"),
    [
        (SimpleNamespace(pipeline=SimpleNamespace(watch=None)), Health("dead", reason="signal 9"), EngineDied),
        (None, None, NotServing),  # stopped meanwhile
    ],
)
def test_a_start_does_not_wait_for_reports_that_cannot_come(front: Any, away: Any, error: type[Exception]) -> None:
    async def main() -> None:
        env = LiveEnv()
        setup = EngineSetup(EngineConfig(), env, LoadProgress(env.now), lambda: Health("loading"))
        core = RemoteCore(setup, lambda setup, owner: NoReports(away))  # type: ignore[arg-type,return-value]
        core.front = front
        with pytest.raises(error):
            await asyncio.wait_for(core._wait_for_report(), 60.0)
        await env.aclose()

    asyncio.run(main())


def test_a_front_whose_engine_cannot_be_started_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = SplitEngine(EngineConfig(model="/nowhere/at/all"), env=(env := LiveEnv()))
        with pytest.raises(Exception, match="/nowhere/at/all"):
            await engine.start()
        await env.aclose()
        assert engine.core.processes.cores[0].files == []

    asyncio.run(main())
