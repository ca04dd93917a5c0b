"""The seven stages and the channels between them. Start reading here.

    client -> intake -> tokenize -> schedule -> allocate -> execute -> sample -> detokenize -> exit -> client
                                     ^   ^         |                      |
                                     |   +- report +                      |
                                     +------------- feedback -------------+

Each stage is one task, and has a folder: `intake` is `intake/stage.py`, and so on; `exit` is `exit/outboxes.py`. Stages
do not import each other. This file has every channel between them, and `engine/wiring.py` makes them; besides, the exit
calls intake and detokenize directly when a request starts and ends. A full channel makes its sender wait, so a slow
stage slows down the stages before it. At the head of the pipeline, intake rejects requests while too many wait.

The loop schedule -> allocate -> execute -> sample -> schedule cannot deadlock. At most K steps are in flight: schedule
spends one credit per step and gets it back with the step's outcome. Every channel of the loop holds at least K
messages, so no send inside the loop waits. The path sample -> detokenize -> exit always drains: the exit joins unread
text in the outboxes, so it accepts every message without waiting for a client.

In split mode the loop runs in its own process. Two edges then cross the process boundary: tokenize -> schedule and
sample -> detokenize. With several engine processes each has a loop: tokenize -> dispatch -> the loops -> merge ->
detokenize.
"""

from __future__ import annotations

from typing import Any

from ..runtime.exit import Exit
from ..runtime.graph import Edge, Port
from ..runtime.pipeline import Pipeline
from ..runtime.stage import Stage

ENTRY_CAPACITY = 256  # requests; absorbs a burst, as intake spends microseconds on each
TEXT_CAPACITY = 16  # steps; slack for the time in which the event loop runs other stages
TO_SCHEDULE = ("tokenize.out", "schedule.in")  # the edges into and out of the loop; they cross processes in split mode
TO_DETOKENIZE = ("sample.out", "detokenize.in")
TO_CORES = ("dispatch.out", "schedule.in")  # the same with several engine processes
TO_MERGE = ("sample.out", "merge.in")


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
    """Connects the seven stages and the exit; returns the pipeline, not started.

    `steps_in_flight` is K.
    """
    pipeline = Pipeline()
    names = ("intake", "tokenize", "schedule", "allocate", "execute", "sample", "detokenize", "exit")
    stages = (intake, tokenize, schedule, allocate, execute, sample, detokenize, exit)
    for name, stage in zip(names, stages, strict=True):
        pipeline.add(stage, name)
    pipeline.entry = Port("intake", "in")
    pipeline.lane_reader = "schedule"
    connect = pipeline.connect
    connect("intake", "tokenize", capacity=ENTRY_CAPACITY, reason="a burst of new requests")
    connect(*TO_SCHEDULE, capacity=ENTRY_CAPACITY, reason="a burst of prompts tokenized at once")
    _connect_the_loop(pipeline, steps_in_flight)
    connect(*TO_DETOKENIZE, capacity=TEXT_CAPACITY, reason="steps that wait to become text")
    connect("detokenize", "exit", capacity=TEXT_CAPACITY, reason="slack until the exit's turn; it never blocks")
    return pipeline


def build_front_pipeline(
    intake: Stage[Any, Any], tokenize: Stage[Any, Any], detokenize: Stage[Any, Any], exit: Exit[Any]
) -> Pipeline:
    """Connects the text stages for the front process of split mode.

    Both edges to the loop are open ports.
    """
    pipeline = Pipeline()
    for name, stage in (("intake", intake), ("tokenize", tokenize), ("detokenize", detokenize), ("exit", exit)):
        pipeline.add(stage, name)
    pipeline.entry = Port("intake", "in")
    pipeline.open_ports = {Port("tokenize", "out"), Port("detokenize", "in")}
    connect = pipeline.connect
    connect("intake", "tokenize", capacity=ENTRY_CAPACITY, reason="a burst of new requests")
    connect("detokenize", "exit", capacity=TEXT_CAPACITY, reason="slack until the exit's turn; it never blocks")
    return pipeline


def build_fleet_pipeline(
    intake: Stage[Any, Any],
    tokenize: Stage[Any, Any],
    dispatch: Stage[Any, Any],
    merge: Stage[Any, Any],
    detokenize: Stage[Any, Any],
    exit: Exit[Any],
) -> Pipeline:
    """Connects the text stages for the front process of several engine processes.

    Dispatch sends to their loops by itself, and `merge.in` is an open port.
    """
    pipeline = Pipeline()
    names = ("intake", "tokenize", "dispatch", "merge", "detokenize", "exit")
    for name, stage in zip(names, (intake, tokenize, dispatch, merge, detokenize, exit), strict=True):
        pipeline.add(stage, name)
    pipeline.entry = Port("intake", "in")
    pipeline.open_ports = {Port("merge", "in")}
    connect = pipeline.connect
    connect("intake", "tokenize", capacity=ENTRY_CAPACITY, reason="a burst of new requests")
    connect("tokenize", "dispatch", capacity=ENTRY_CAPACITY, reason="a burst of prompts tokenized at once")
    connect("merge", "detokenize", capacity=TEXT_CAPACITY, reason="steps that wait to become text")
    connect("detokenize", "exit", capacity=TEXT_CAPACITY, reason="slack until the exit's turn; it never blocks")
    return pipeline


def build_core_pipeline(
    schedule: Stage[Any, Any],
    allocate: Stage[Any, Any],
    execute: Stage[Any, Any],
    sample: Stage[Any, Any],
    *,
    steps_in_flight: int = 2,
) -> Pipeline:
    """Connects the step loop for the engine process of split mode.

    Its entry and `sample.out` are open ports.
    """
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
    connect("schedule", "allocate", capacity=k, when_full="never", credits=1, reason="one plan outstanding")
    connect("allocate.report", "schedule.report", capacity=k, when_full="never", credits=1, reason="the plan's report")
    connect("allocate", "execute", capacity=k, when_full="never", credits=k, reason="K steps in flight")
    connect("execute", "sample", capacity=k, when_full="never", credits=k, reason="K steps in flight")
    connect("execute.rates", "allocate.rates", capacity=k, when_full="never", credits=1, reason="sent once, at start")
    connect(
        "sample.feedback", "schedule.feedback", capacity=2 * k, when_full="never", credits=k, reason="K outcomes, slack"
    )


def build_encoder_pipeline(
    intake: Stage[Any, Any], tokenize: Stage[Any, Any], encode: Stage[Any, Any], exit: Exit[Any]
) -> Pipeline:
    """Connects the stages of an encoder model: `encode` takes the place of the loop."""
    pipeline = Pipeline()
    for name, stage in (("intake", intake), ("tokenize", tokenize), ("encode", encode), ("exit", exit)):
        pipeline.add(stage, name)
    pipeline.entry = Port("intake", "in")
    pipeline.lane_reader = "encode"
    connect = pipeline.connect
    connect("intake", "tokenize", capacity=ENTRY_CAPACITY, reason="a burst of new requests")
    connect("tokenize", "encode", capacity=ENTRY_CAPACITY, reason="prompts to batch")
    connect("encode", "exit", capacity=TEXT_CAPACITY, reason="slack until the exit's turn; it never blocks")
    return pipeline


def edges_to_loop(pipeline: Pipeline, requests: str, tokens: str) -> tuple[Edge, Edge]:
    """The edges from a pipeline of split mode to the step loop, and back, by the names of their channels.

    A stage of one's own may have the open end of the pipeline.
    """
    (a, b), (c, d) = requests.split("->"), tokens.split("->")
    source, target = _port(a), _port(d)
    for port in pipeline.open_ports:
        if port.port in pipeline.stages[port.stage].outputs:
            source = port
        else:
            target = port
    return (
        Edge(source, _port(b), ENTRY_CAPACITY, "wait", "a burst of prompts tokenized at once"),
        Edge(_port(c), target, TEXT_CAPACITY, "wait", "steps that wait to become text"),
    )


def _port(text: str) -> Port:
    stage, _, port = text.partition(".")
    return Port(stage, port)
