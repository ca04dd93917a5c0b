"""The seven stages and the channels between them. Start reading here.

    client -> intake -> tokenize -> schedule -> allocate -> execute -> sample -> detokenize -> exit -> client
                                     ^   ^         |                      |
                                     |   +- report +                      |
                                     +------------- feedback -------------+

Each stage is a task of its own and meets the others only here. A full channel makes its sender wait; that is how a slow
stage holds back the ones before it, up to the door, where intake refuses what would wait too long.

The loop schedule -> allocate -> execute -> sample -> schedule can not deadlock: at most K steps are in flight, schedule
spends a credit for each and gets it back with the step's outcome, and every channel of the loop holds K. So no send
inside the loop ever waits. The way out of the loop, sample -> detokenize -> exit, waits for nobody either: outboxes
coalesce, so the exit takes all it is given.

In split mode the loop is in a process of its own, and two edges, to schedule and to detokenize, reach across.
"""

from __future__ import annotations

from typing import Any

from ..runtime.exit import Exit
from ..runtime.graph import Port
from ..runtime.pipeline import Pipeline
from ..runtime.stage import Stage

ENTRY_CAPACITY = 256  # requests that arrive in one burst; intake looks at each for microseconds
TEXT_CAPACITY = 16  # steps' worth of tokens on their way to text: slack for a loop that is busy elsewhere
TO_SCHEDULE = ("tokenize.out", "schedule.in")  # the edges between text and the loop, which may reach across processes
TO_DETOKENIZE = ("sample.out", "detokenize.in")


def build_pipeline(
    intake: Stage[Any, Any],
    tokenize: Stage[Any, Any],
    schedule: Stage[Any, Any],
    allocate: Stage[Any, Any],
    execute: Stage[Any, Any],
    sample: Stage[Any, Any],
    detokenize: Stage[Any, Any],
    exit: Exit[Any],
    *,
    steps_in_flight: int = 2,
) -> Pipeline:
    """Joins seven stages and an exit into an engine's pipeline, not yet started. `steps_in_flight` is K."""
    pipeline = Pipeline()
    names = ("intake", "tokenize", "schedule", "allocate", "execute", "sample", "detokenize", "exit")
    stages = (intake, tokenize, schedule, allocate, execute, sample, detokenize, exit)
    for name, stage in zip(names, stages, strict=True):
        pipeline.add(stage, name)
    pipeline.entry = Port("intake", "in")
    pipeline.lane_reader = "schedule"
    connect = pipeline.connect
    connect("intake", "tokenize", capacity=ENTRY_CAPACITY, reason="as many as a burst at the door")
    connect(*TO_SCHEDULE, capacity=ENTRY_CAPACITY, reason="a burst of prompts tokenized at once")
    _connect_the_loop(pipeline, steps_in_flight)
    connect(*TO_DETOKENIZE, capacity=TEXT_CAPACITY, reason="steps that wait to become text")
    connect("detokenize", "exit", capacity=TEXT_CAPACITY, reason="the exit takes all; this is slack for its turn")
    return pipeline


def build_front_pipeline(
    intake: Stage[Any, Any], tokenize: Stage[Any, Any], detokenize: Stage[Any, Any], exit: Exit[Any]
) -> Pipeline:
    """The part of an engine's pipeline that knows text, for a process of its own: both ends of the loop are open."""
    pipeline = Pipeline()
    for name, stage in (("intake", intake), ("tokenize", tokenize), ("detokenize", detokenize), ("exit", exit)):
        pipeline.add(stage, name)
    pipeline.entry = Port("intake", "in")
    pipeline.open_ports = {Port("tokenize", "out"), Port("detokenize", "in")}
    connect = pipeline.connect
    connect("intake", "tokenize", capacity=ENTRY_CAPACITY, reason="as many as a burst at the door")
    connect("detokenize", "exit", capacity=TEXT_CAPACITY, reason="the exit takes all; this is slack for its turn")
    return pipeline


def build_core_pipeline(
    schedule: Stage[Any, Any],
    allocate: Stage[Any, Any],
    execute: Stage[Any, Any],
    sample: Stage[Any, Any],
    *,
    steps_in_flight: int = 2,
) -> Pipeline:
    """The loop alone, for a process of its own."""
    pipeline = Pipeline()
    names = ("schedule", "allocate", "execute", "sample")
    for name, stage in zip(names, (schedule, allocate, execute, sample), strict=True):
        pipeline.add(stage, name)
    pipeline.entry = Port("schedule", "in")
    pipeline.open_ports = {Port("sample", "out")}
    pipeline.lane_reader = "schedule"
    _connect_the_loop(pipeline, steps_in_flight)
    return pipeline


def _connect_the_loop(pipeline: Pipeline, k: int) -> None:
    connect = pipeline.connect
    connect("schedule", "allocate", capacity=k, when_full="never", credits=1, reason="one plan awaits its report")
    connect("allocate.report", "schedule.report", capacity=k, when_full="never", credits=1, reason="its report")
    connect("allocate", "execute", capacity=k, when_full="never", credits=k, reason="K steps in flight")
    connect("execute", "sample", capacity=k, when_full="never", credits=k, reason="K steps in flight")
    connect("execute.rates", "allocate.rates", capacity=k, when_full="never", credits=1, reason="told once, at first")
    connect(
        "sample.feedback", "schedule.feedback", capacity=2 * k, when_full="never", credits=k, reason="K outcomes, slack"
    )


def build_encoder_pipeline(
    intake: Stage[Any, Any], tokenize: Stage[Any, Any], encode: Stage[Any, Any], exit: Exit[Any]
) -> Pipeline:
    """Joins the stages of a model that reads and generates nothing: one stage stands where the loop is above."""
    pipeline = Pipeline()
    for name, stage in (("intake", intake), ("tokenize", tokenize), ("encode", encode), ("exit", exit)):
        pipeline.add(stage, name)
    pipeline.entry = Port("intake", "in")
    pipeline.lane_reader = "encode"
    connect = pipeline.connect
    connect("intake", "tokenize", capacity=ENTRY_CAPACITY, reason="as many as a burst at the door")
    connect("tokenize", "encode", capacity=ENTRY_CAPACITY, reason="what batches are made of")
    connect("encode", "exit", capacity=TEXT_CAPACITY, reason="the exit takes all; this is slack for its turn")
    return pipeline
