"""The causes of a request's latency in words, the longest first, from its waterfall."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...runtime.trace.tracer import EventKind
from .trace_view import SCHEDULE, TraceView
from .waterfall import StepPart, TimeBar, Waterfall

MIN_NS = 1_000_000  # of a cause worth naming
MIN_SHARE = 0.03

SENTENCES = {
    "queue": "it waited {ms} ms in the queue behind earlier requests",
    "slots": "it waited {ms} ms for a slot, as max_num_seqs sequences were running",
    "blocks": "it waited {ms} ms for KV blocks, which other sequences held",
    "swap-in": "it waited {ms} ms in host memory, to be swapped in",
    "adapter load": "it waited {ms} ms until its LoRA adapter was read from its files",
    "adapter": "it waited {ms} ms for its LoRA adapter, which was not on the device",
    "other adapters": "it waited {ms} ms behind requests whose LoRA adapters were not on the device",
    "rope": "it waited {ms} ms to be computed again, as it got longer than its rotary factors are for",
    "long prefill": "steps shared with other requests' long prompts took {ms} ms longer than usual",
    "slow client": "it was paused for {ms} ms, as its client did not read",
    "grammar": "its grammar took {ms} ms, to compile or to make the masks that a step waited for",
    "tokenizer": "tokenizing its prompt took {ms} ms",
    "prompt": "computing its own prompt took {ms} ms",
    "decoding": "computing its own tokens took {ms} ms, {num_tokens} of them",
    "other stages": "the other stages took {ms} ms",
}
WAITING = {
    "slots": "slots",
    "blocks": "blocks",
    "swapped": "swap-in",
    "adapter": "other adapters",
}  # what the queue waits for -> the cause


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of a request's time. All causes of a request add up to the whole."""

    name: str  # a key of SENTENCES
    ns: int
    share: float  # of the request's whole time
    sentence: str


def causes(view: TraceView, fall: Waterfall) -> list[Cause]:
    """The causes of a request's latency, the longest first."""
    parts: dict[str, int] = defaultdict(int)
    steps = {part.step: part for part in fall.steps}
    for bar in fall.bars:
        for name, ns in _parts(view, bar, steps, fall.sequence_id):
            parts[name] += ns
    total_ns = max(1, fall.end_ns - fall.begin_ns)
    num_tokens = sum(part.num_decodes for part in fall.steps) + fall.num_sequences
    named = [
        Cause(name, ns, ns / total_ns, SENTENCES[name].format(ms=_ms(ns), num_tokens=num_tokens))
        for name, ns in parts.items()
        if ns > 0
    ]
    return sorted(named, key=lambda cause: -cause.ns)


def in_words(fall: Waterfall, found: list[Cause]) -> str:
    """One sentence with the main causes."""
    total_ns = fall.end_ns - fall.begin_ns
    worth = [cause for cause in found if cause.ns >= MIN_NS and cause.share >= MIN_SHARE][:4]
    ended = "took" if fall.cause is not None else "has been running for"
    if not worth:
        return f"The request {ended} {_ms(total_ns)} ms, without a delay."
    return f"The request {ended} {_ms(total_ns)} ms: " + "; ".join(cause.sentence for cause in worth) + "."


def _parts(view: TraceView, bar: TimeBar, steps: dict[int, StepPart], sequence_id: int) -> list[tuple[str, int]]:
    """(Cause, ns) pairs that a bar was spent on."""
    match bar.kind, bar.stage:
        case "client", _:
            return [("slow client", bar.ns)]
        case "preempted", how:
            return [({"swap": "swap-in", "rope": "rope"}.get(how, "blocks"), bar.ns)]
        case "wait", "grammar":
            return [("grammar", bar.ns)]
        case "wait", "adapter":
            return [("adapter load", bar.ns)]
        case "wait", stage if stage == SCHEDULE:
            return [part for piece in _apart(view, bar, sequence_id) for part in piece]
        case "wait", _:
            return [("queue", bar.ns)]
        case _, "tokenize":
            return [("tokenizer", bar.ns)]
        case _, "execute" if bar.step in steps:
            return _of_forward(view, bar, steps[bar.step])
        case _, "sample" if bar.step in steps:
            return _of_sampling(view, bar, steps[bar.step])
    return [("other stages", bar.ns)]


def _apart(view: TraceView, bar: TimeBar, sequence_id: int) -> Iterator[list[tuple[str, int]]]:
    """A wait in the queue, with the times in which it was set aside for its adapter apart."""
    cursor_ns, aside_ns = bar.begin_ns, None
    for record in view.of_request(EventKind.SET_ASIDE, sequence_id):
        time_ns = min(max(int(record["time_ns"]), bar.begin_ns), bar.end_ns)
        if record["b"]:
            yield _waits(view, replace(bar, begin_ns=cursor_ns, end_ns=time_ns))
            aside_ns = time_ns
        elif aside_ns is not None:
            yield [("adapter", time_ns - aside_ns)]
            aside_ns = None
        cursor_ns = time_ns
    if aside_ns is not None:
        yield [("adapter", bar.end_ns - aside_ns)]
    else:
        yield _waits(view, replace(bar, begin_ns=cursor_ns))


def _waits(view: TraceView, bar: TimeBar) -> list[tuple[str, int]]:
    """A wait in the queue, split where the resource that the first request lacked changed."""
    records = view.of(EventKind.WAITING_FOR)
    first, end = np.searchsorted(records["time_ns"], [bar.begin_ns, bar.end_ns], "right").tolist()
    found, cursor_ns = [], bar.begin_ns
    for place in range(first - 1, end):
        end_ns = int(records["time_ns"][place + 1]) if place + 1 < end else bar.end_ns
        name = view.names[int(records["c"][place])] if place >= 0 else ""
        found.append((WAITING.get(name, "queue"), max(0, end_ns - cursor_ns)))
        cursor_ns = max(cursor_ns, end_ns)
    return found


def _of_forward(view: TraceView, bar: TimeBar, part: StepPart) -> list[tuple[str, int]]:
    """Splits a forward pass into the request's own time and the excess from others' prompts."""
    own = "prompt" if part.num_prompt_tokens else "decoding"
    granted = view.of_step(EventKind.STEP_GRANTED, part.step)
    executed = view.of_step(EventKind.STEP_EXECUTED, part.step)
    if granted is None or executed is None:
        return [(own, bar.ns)]
    sampled = view.of_step(EventKind.STEP_SAMPLED, part.step)
    if sampled is not None and sampled["time_ns"] < executed["time_ns"]:  # asynchronous: the bar includes sampling
        grammar_ns = min(int(sampled["c"]) * 1000, bar.ns)
        bar = replace(bar, end_ns=bar.end_ns - grammar_ns)
        return [("grammar", grammar_ns), *_own_and_excess(view, bar, part, granted, executed)]
    return _own_and_excess(view, bar, part, granted, executed)


def _own_and_excess(
    view: TraceView, bar: TimeBar, part: StepPart, granted: np.void, executed: np.void
) -> list[tuple[str, int]]:
    own = "prompt" if part.num_prompt_tokens else "decoding"
    num_prompt_tokens = int(granted["b"]) - int(granted["c"])
    num_of_others = num_prompt_tokens - part.num_prompt_tokens
    if num_of_others <= 0:
        return [(own, bar.ns)]
    forward_ns = int(executed["c"]) * 1000
    usual_ns = view.decode_step_ns
    if usual_ns is None:
        usual_ns = forward_ns * int(granted["c"]) // max(1, int(granted["b"]))
    excess_ns = max(0, forward_ns - usual_ns) * num_of_others // num_prompt_tokens
    excess_ns = min(excess_ns, bar.ns)
    return [("long prefill", excess_ns), (own, bar.ns - excess_ns)]


def _of_sampling(view: TraceView, bar: TimeBar, part: StepPart) -> list[tuple[str, int]]:
    sampled = view.of_step(EventKind.STEP_SAMPLED, part.step)
    grammar_ns = 0 if sampled is None else min(int(sampled["c"]) * 1000, bar.ns)
    own = "prompt" if part.num_prompt_tokens else "decoding"
    return [("grammar", grammar_ns), (own, bar.ns - grammar_ns)]


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.0f}" if ns >= 10_000_000 else f"{ns / 1e6:.1f}"
