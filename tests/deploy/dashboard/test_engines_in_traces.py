"""What the dashboard reads from the trace of several engine processes, whose steps come mixed."""

from __future__ import annotations

from millrace.deploy.dashboard.timeline import Timeline
from millrace.deploy.dashboard.trace_log import StepFold
from millrace.runtime.trace.tracer import EventKind, Tracer
from millrace.stages.insight.trace_view import TraceView
from millrace.stages.insight.waterfall import waterfall

OTHER = 1 << 31  # the first step of the second engine process


class Engines:
    """Emits the steps of two engine processes in turns, one each 100 us."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.tracer = Tracer()
        self.tracer._now_ns = lambda: self.time_ns
        self.emit(EventKind.REQUEST_ACCEPTED, 0, 7, 1, 0)

    def emit(self, kind: EventKind, step: int, *values: int) -> None:
        self.tracer.emit(kind, 0, step, *values)

    def step(self, step: int, *row: int) -> None:
        """A step with a row of the request: (start, number of tokens); none: it goes on as before."""
        self.time_ns += 100_000
        self.emit(EventKind.STEP_GRANTED, step, 1, row[-1] if row else 1, 0, 9)
        if row:
            is_decode = row[1] == 1
            values = (7, 0, row[0]) if is_decode else (7, 0, *row)
            self.emit(EventKind.ROW_DECODE if is_decode else EventKind.ROW_EXTEND, step, *values)
        self.emit(EventKind.STEP_DONE, step, 1, 0, 50)


def test_tokens_of_a_request_are_those_of_the_engine_that_has_it_also_when_it_moves() -> None:
    engines = Engines()
    engines.tracer.emit_request_name(0, 7, "r")
    for step, row in ((1, (0, 16)), (2, (16, 1)), (3, ())):  # tokens at 50 us ticks of the first engine
        engines.step(step, *row)
        engines.step(OTHER + step)
    timeline = Timeline(engines.tracer.readers, "r")
    timeline.refresh()
    assert (found := timeline.to_json()) is not None
    assert found["sequences"][0]["ticks_us"] == [100, 300, 500], "and none of the other engine's"
    for step, row in ((OTHER + 4, (0, 19)), (OTHER + 5, (19, 1)), (40, ()), (OTHER + 6, ())):  # the first has died
        engines.step(step, *row)
    timeline.refresh()
    assert (found := timeline.to_json()) is not None
    assert found["sequences"][0]["ticks_us"] == [100, 300, 500, 700, 800, 1_000]


def test_the_waterfall_of_a_request_has_the_steps_of_its_engine_also_when_it_moves() -> None:
    engines = Engines()
    for step, row in ((1, (0, 16)), (2, (16, 1)), (3, ())):
        engines.step(step, *row)
        engines.step(OTHER + step)
    for has_moved in (False, True):
        if has_moved:
            for step, row in ((OTHER + 4, (0, 19)), (OTHER + 5, (19, 1)), (40, ()), (OTHER + 6, ())):
                engines.step(step, *row)
        fall = waterfall(TraceView(engines.tracer.read_all(), engines.tracer.readers()[0].names()), 7)
        assert fall is not None
        expected = [1, 2, 3, *((OTHER + 4, OTHER + 5, OTHER + 6) if has_moved else ())]
        assert [part.step for part in fall.steps] == expected


def test_steps_of_one_engine_keep_their_rows_while_others_end_and_a_move_wastes_no_more_than_it_computes() -> None:
    engines, fold = Engines(), StepFold()
    engines.step(1, 0, 16)
    engines.step(2, 16, 1)
    fold.take(engines.tracer.read_all())
    seen = len(engines.tracer.read_all())
    engines.emit(EventKind.STEP_GRANTED, 3, 1, 8, 0, 9)
    engines.step(OTHER + 1)
    fold.take(engines.tracer.read_all()[seen:])
    seen = len(engines.tracer.read_all())
    engines.emit(EventKind.STEP_DONE, 3, 1, 0, 50)
    engines.step(OTHER + 2, 0, 20)
    third, moved = fold.take(engines.tracer.read_all()[seen:])
    assert (third.step, third.num_rows, third.num_prefill_tokens) == (3, 1, 8)
    assert moved.num_wasted_tokens == 17, "those that the first engine had computed, as far as is known"


def test_a_request_in_one_of_two_lanes_has_every_second_step() -> None:
    engines = Engines()
    engines.tracer.emit_request_name(0, 7, "r")
    engines.step(1, 0, 16)
    for step in range(2, 8):
        engines.time_ns += 100_000
        engines.emit(EventKind.STEP_GRANTED, step, 1, 1, 0, 9)
        if step == 3:
            engines.emit(EventKind.ROW_DECODE, step, 7, 0, 16, 2)
        engines.emit(EventKind.STEP_DONE, step, 1, 0, 50)
    timeline = Timeline(engines.tracer.readers, "r")
    timeline.refresh()
    assert (found := timeline.to_json()) is not None
    assert found["sequences"][0]["ticks_us"] == [100, 300, 500, 700]
    fall = waterfall(TraceView(engines.tracer.read_all(), engines.tracer.readers()[0].names()), 7)
    assert fall is not None and [part.step for part in fall.steps] == [1, 3, 5, 7]
