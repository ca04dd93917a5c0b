"""The trace as a Perfetto document: well-formed, one track a stage, one a request, and the times are the trace's."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from millrace.runtime.trace.format import RECORD_DTYPE
from millrace.runtime.trace.perfetto import chrome_trace
from millrace.runtime.trace.request_spans import request_spans
from millrace.runtime.trace.tracer import EventKind, Records
from millrace.stages import SamplingParams
from millrace.stages.testing.scripted.engine import Script, scripted_engine
from tests.runtime.trace_events import check_trace_events

STAGES = ("intake", "tokenize", "schedule", "allocate", "execute", "sample", "detokenize", "exit")


def traced(num_requests: int = 6, **engine: Any) -> tuple[Records, list[str]]:
    """Of a run with a cancelled request and a live one."""

    async def run() -> tuple[Records, list[str]]:
        async with scripted_engine(script=Script(eos_probability=0.0), step_s=0.001, **engine) as scripted:

            async def ask(i: int, num_tokens: int) -> None:
                params = SamplingParams(max_tokens=num_tokens, n=1 + i % 2)
                async for _ in scripted.generate([97 + i] * (5 + i), params, request_id=f"request {i}"):
                    if num_tokens == 400:
                        return

            await asyncio.gather(*(ask(i, 400 if i == 2 else 12) for i in range(num_requests)))
            under_way = asyncio.ensure_future(ask(50, 300))
            await asyncio.sleep(0.05)
            records = scripted.pipeline.tracer.read_all()
            names = scripted.pipeline.tracer.readers()[0].names()
            under_way.cancel()
            await asyncio.gather(under_way, return_exceptions=True)
            return records, names

    return asyncio.run(run())


@pytest.fixture(scope="module")
def run() -> tuple[Records, list[str]]:
    return traced()


def test_the_document_is_well_formed_with_a_track_a_stage_and_one_a_request(run: tuple[Records, list[str]]):
    document = chrome_trace(*run)
    check_trace_events(document)
    events = document["traceEvents"]
    titles = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {*STAGES, "device"} <= titles
    begun = [event for event in events if event["ph"] == "b" and event["name"].startswith("request")]
    assert [event["name"] for event in begun] == [f"request {i}" for i in (*range(6), 50)]
    assert len({event["id"] for event in begun}) == 7
    causes = {event["name"]: event["args"]["cause"] for event in begun}
    assert causes["request 0"] == "finish" and causes["request 2"] == "cancel" and causes["request 50"] == "under way"
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"sequences", "tokens of a step"}
    num_steps = len(run[0][run[0]["kind"] == EventKind.STEP_DONE])
    assert len([event for event in events if event["ph"] == "s"]) >= 0.5 * num_steps > 5


def test_each_batch_is_a_slice_as_long_as_it_took(run: tuple[Records, list[str]]):
    records, names = run
    events = chrome_trace(records, names)["traceEvents"]
    batches = records[records["kind"] == EventKind.STAGE_BATCH]
    slices = [event for event in events if event["ph"] == "X" and event["name"] == "batch"]
    assert len(slices) == len(batches)
    took_us = int(batches["c"].astype(np.int64).sum() + batches["d"].astype(np.int64).sum())
    shown_us = sum(event["dur"] for event in slices)
    assert 0 <= took_us - shown_us < 0.05 * took_us + 10 * len(slices)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.95])
def test_what_is_left_of_an_overwritten_ring_is_well_formed_too(run: tuple[Records, list[str]], keep: float):
    records, names = run
    check_trace_events(chrome_trace(records[int((1 - keep) * len(records)) :], names))


def test_spans_of_a_request_are_in_order_and_leave_no_gap_once_it_is_queued(run: tuple[Records, list[str]]):
    requests = request_spans(*run)
    assert [request.request_id for request in requests] == [f"request {i}" for i in (*range(6), 50)]
    for request in requests:
        ends = [request.begin_ns, *(moment for span in request.spans for moment in (span.begin_ns, span.end_ns))]
        assert ends == sorted(ends) and ends[-1] <= request.end_ns
        assert [span.name for span in request.spans][-3:] == ["queue", "prefill", "decode"]
        line, prefill, decode = request.spans[-3:]
        assert (line.end_ns, prefill.end_ns, decode.end_ns) == (prefill.begin_ns, decode.begin_ns, request.end_ns)
    done = requests[1]
    assert (done.num_sequences, done.num_prompt_tokens, done.num_generated_tokens) == (2, 6, 24)


def test_nothing_makes_an_empty_document():
    document = chrome_trace(np.empty(0, RECORD_DTYPE), [""])
    check_trace_events(document)
    assert {event["ph"] for event in document["traceEvents"]} == {"M"}


def _without_an_end(events: list[dict[str, Any]]) -> None:
    del events[max(i for i, event in enumerate(events) if event["ph"] == "e")]


def _overlapping(events: list[dict[str, Any]]) -> None:
    first = max((event for event in events if event["ph"] == "X"), key=lambda event: event["dur"])
    events.append(first | {"ts": first["ts"] + first["dur"] / 2})


def _without_a_flows_end(events: list[dict[str, Any]]) -> None:
    del events[next(i for i, event in enumerate(events) if event["ph"] == "f")]


def _off_its_slice(events: list[dict[str, Any]]) -> None:
    next(event for event in events if event["ph"] == "f")["ts"] += 10_000_000


def _no_number(events: list[dict[str, Any]]) -> None:
    next(event for event in events if event["ph"] == "C")["args"]["waiting"] = "3"


@pytest.mark.parametrize("spoil", [_without_an_end, _overlapping, _without_a_flows_end, _off_its_slice, _no_number])
def test_the_validator_notices(run: tuple[Records, list[str]], spoil: Callable[[list[dict[str, Any]]], None]):
    document = copy.deepcopy(chrome_trace(*run))
    spoil(document["traceEvents"])
    with pytest.raises(AssertionError):
        check_trace_events(document)
