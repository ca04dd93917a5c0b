"""What limits a pipeline now, in one sentence, from the records of the last few seconds.

Situations are checked in order. What comes before the device (clients, memory, slots, tokenizer, grammars) is named
first: a faster device alone would not help there.

Of several engine processes, shares of the stages of the step loop are averages over those that planned a step in the
window. Counts are sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...runtime.trace.format import ENGINE_STEPS
from ...runtime.trace.tracer import EventKind, Records
from .trace_view import TraceView

WINDOW_S = 5.0
MAX_NS = 2**63
STEP_LOOP = ("schedule", "allocate", "execute", "sample")  # of which each engine process has its own
LARGE, SOME = 0.5, 0.2  # shares of the window from which a situation counts

Situation = Literal[
    "idle", "slow client", "kv full", "slots full", "tokenizer", "grammar", "long prefill", "execute", "none"
]


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """Shares of a window of time, [0, 1], and counts in it."""

    window_s: float
    busy: dict[str, float]  # by stage
    blocked: dict[str, float]  # by stage
    device: float  # in forward passes and in sampling
    full: dict[str, float]  # by edge: its senders had to wait, or would have had to
    waiting_for: dict[str, float]  # by what the first request in the queue lacked
    prefill: float  # the device's time in steps with mostly prompt tokens
    grammar: float  # the device's time waiting for masks, as a share of its time in steps
    grammar_gate: float  # requests that waited for their grammars to be compiled; each counts for itself
    num_steps: int
    num_rows: float  # of a step, on average
    num_waiting: int  # in the queue, by the last plan
    num_preempted: int
    num_parked: int  # at the end
    num_prompt_tokens: int
    num_decode_tokens: int


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What limits the pipeline, or that nothing does."""

    situation: Situation
    stage: str | None  # the one to improve
    sentence: str


def bottleneck(view: TraceView, now_ns: int | None = None, window_s: float = WINDOW_S) -> Bottleneck:
    """The bottleneck in the last `window_s` seconds before `now_ns` (default: the last record)."""
    return judge(load_of(view, now_ns, window_s))


def judge(load: WindowLoad) -> Bottleneck:
    """The bottleneck of a load: the first situation that applies."""
    device = load.device
    short = load.waiting_for.get("blocks", 0.0) + load.waiting_for.get("swapped", 0.0)
    full = load.waiting_for.get("slots", 0.0)
    if load.num_parked and device < LARGE and short < SOME and full < SOME:
        return Bottleneck(
            "slow client",
            "exit",
            f"Clients limit it: {load.num_parked} sequences are parked, as their clients do not read, and the device"
            f" is busy {_percent(device)} of the time.",
        )
    if short >= SOME or (load.num_preempted and short + full > 0 and short >= full):
        return Bottleneck(
            "kv full",
            "allocate",
            f"KV memory is full: for {_percent(short)} of the time the next request waited for blocks, and"
            f" {load.num_preempted} sequences were preempted. More blocks, or shorter contexts, would help.",
        )
    if full >= SOME:
        return Bottleneck(
            "slots full",
            "schedule",
            f"All slots are taken: {load.num_waiting} sequences wait while {load.num_rows:.0f} run. A higher"
            " max_num_seqs would admit more, if memory allows.",
        )
    if load.busy.get("tokenize", 0.0) >= LARGE and device < LARGE:
        return Bottleneck(
            "tokenizer",
            "tokenize",
            f"The tokenizer limits it: it is busy {_percent(load.busy['tokenize'])} of the time, the device"
            f" {_percent(device)}. More tokenizer_workers, or prompts as token ids, would help.",
        )
    if load.grammar >= SOME or (load.grammar_gate >= LARGE and device < LARGE):
        return Bottleneck(
            "grammar",
            "sample",
            f"Grammars limit it: the device waits for their masks {_percent(load.grammar)} of its time in steps, and"
            f" {load.grammar_gate:.1f} requests at a time wait for their grammars to be compiled.",
        )
    if load.prefill >= LARGE and load.prefill >= 0.6 * device:
        return Bottleneck(
            "long prefill",
            "execute",
            f"Prompts limit it: steps that compute them take {_percent(load.prefill)} of the time,"
            f" {load.num_prompt_tokens} prompt tokens to {load.num_decode_tokens} of answers.",
        )
    if device >= LARGE:
        return Bottleneck(
            "execute",
            "execute",
            f"The model limits it: the device is busy {_percent(device)} of the time with"
            f" {load.num_steps / load.window_s:.0f} steps a second of {load.num_rows:.1f} rows.",
        )
    if not load.num_steps and not load.num_waiting and max(load.busy.values(), default=0.0) < 0.01:
        return Bottleneck("idle", None, "It is idle: there are no requests.")
    return Bottleneck("none", None, f"Nothing limits it: the device is busy {_percent(device)} of the time.")


def load_of(view: TraceView, now_ns: int | None = None, window_s: float = WINDOW_S) -> WindowLoad:
    """The load in the last `window_s` seconds before `now_ns`. Default: the last record's time.

    The window begins with the first record if that is later.
    """
    end_ns = view.end_ns if now_ns is None else now_ns
    if len(view.records) and view.begin_ns > end_ns - window_s * 1e9:
        window_s = max(end_ns - view.begin_ns, 1) / 1e9  # the records begin later
    begin_ns = end_ns - round(window_s * 1e9)
    executed, sampled = (_since(view.of(kind), begin_ns) for kind in (EventKind.STEP_EXECUTED, EventKind.STEP_SAMPLED))
    planned, granted = (_since(view.of(kind), begin_ns) for kind in (EventKind.STEP_PLANNED, EventKind.STEP_GRANTED))
    num_engines = _num_engines(planned)
    busy, blocked = _shares(view, begin_ns, window_s, num_engines)
    of_prompts = granted["step"][granted["b"] > 2 * granted["c"]]  # steps with mostly prompt tokens
    prefill_s = _sum_s(executed["c"][np.isin(executed["step"], of_prompts)])
    prefill_s += _sum_s(sampled["b"][np.isin(sampled["step"], of_prompts)])
    in_steps_s = _sum_s(executed["c"]) + _sum_s(sampled["b"])
    num_decodes, num_tokens = int(granted["c"].sum()), int(granted["b"].sum())
    return WindowLoad(
        window_s=window_s,
        busy=busy,
        blocked=blocked,
        device=min(1.0, busy.get("execute", 0.0) + _sum_s(sampled["b"]) / window_s / num_engines),
        full=_full_shares(view, begin_ns, window_s, num_engines),
        waiting_for=_waiting_shares(view, begin_ns, end_ns),
        prefill=prefill_s / window_s / num_engines,
        grammar=_sum_s(sampled["c"]) / in_steps_s if in_steps_s else 0.0,
        grammar_gate=_sum_s(_since(view.of(EventKind.REQUEST_GRAMMAR), begin_ns)["b"]) / window_s,
        num_steps=len(executed),
        num_rows=float(executed["a"].mean()) if len(executed) else 0.0,
        num_waiting=_num_waiting(planned),
        num_preempted=len(_since(view.of(EventKind.PREEMPTED), begin_ns)),
        num_parked=_num_parked(view),
        num_prompt_tokens=num_tokens - num_decodes,
        num_decode_tokens=num_decodes,
    )


def _num_engines(planned: Records) -> int:
    """Engine processes that planned these steps; 1 if there are none."""
    return max(1, len(_last_of_engines(planned)))


def _num_waiting(planned: Records) -> int:
    """In the queues of all engine processes, by the last plan of each."""
    return int(planned["d"][_last_of_engines(planned)].sum(dtype=np.int64))


def _last_of_engines(planned: Records) -> np.ndarray:
    """The place of the last plan of each engine process: their steps have numbers far apart."""
    order = np.argsort(planned["step"], kind="stable")
    is_next = np.diff(planned["step"][order].astype(np.int64)) >= ENGINE_STEPS
    return np.array([part.max() for part in np.split(order, 1 + np.flatnonzero(is_next)) if len(part)], np.intp)


def _shares(
    view: TraceView, begin_ns: int, window_s: float, num_engines: int
) -> tuple[dict[str, float], dict[str, float]]:
    """(busy, blocked) by stage.

    A record that begins before the window counts for the part of it that lies in the window.
    """
    records = _since(view.of(EventKind.STAGE_TIME), begin_ns)
    us = np.stack([records[column].astype(np.int64) for column in "abc"])
    lasted_us = np.maximum(1, us.sum(axis=0))
    inside_us = np.minimum(lasted_us, (records["time_ns"].astype(np.int64) - begin_ns) // 1000)
    parts_s = us[:2] * (inside_us / lasted_us) / 1e6
    busy, blocked = {}, {}
    for source in np.unique(records["source"]).tolist():
        name, shares = view.names[source], parts_s[:, records["source"] == source].sum(axis=1) / window_s
        busy_share, blocked_share = (shares / _num_of(name, num_engines)).tolist()
        busy[name] = min(1.0, busy_share)
        blocked[name] = min(1.0 - busy[name], blocked_share)
    return busy, blocked


def _num_of(name: str, num_engines: int) -> int:
    """How many there are of the stage or edge of this name."""
    return num_engines if name.partition(".")[0] in STEP_LOOP else 1


def _full_shares(view: TraceView, begin_ns: int, window_s: float, num_engines: int) -> dict[str, float]:
    records = _since(view.of(EventKind.EDGE_DEPTH), begin_ns)
    sources = np.unique(records["source"]).tolist()
    seconds = {view.names[source]: _sum_s(records["d"][records["source"] == source]) for source in sources}
    return {name: min(1.0, one_s / window_s / _num_of(name, num_engines)) for name, one_s in seconds.items()}


def _waiting_shares(view: TraceView, begin_ns: int, end_ns: int) -> dict[str, float]:
    """The share of time in which the first request in the queue lacked each resource."""
    records = view.of(EventKind.WAITING_FOR)
    begins = np.clip(records["time_ns"].astype(np.int64), begin_ns, end_ns)
    lasted = np.diff(np.append(begins, end_ns)) / max(1, end_ns - begin_ns)
    shares: dict[str, float] = {}
    for name, share in zip(records["c"].tolist(), lasted.tolist(), strict=True):
        if view.names[name]:
            shares[view.names[name]] = shares.get(view.names[name], 0.0) + share
    return shares


def _num_parked(view: TraceView) -> int:
    """Sequences parked now: those that neither were unparked nor ended since."""
    accepted = view.of(EventKind.REQUEST_ACCEPTED)
    num_sequences = dict(zip(accepted["a"].tolist(), accepted["b"].tolist(), strict=True))
    last = {int(record["c"]): int(record["time_ns"]) for record in view.of(EventKind.PARKED)}
    for record in view.of(EventKind.UNPARKED):
        if last.get(int(record["c"]), MAX_NS) <= int(record["time_ns"]):
            del last[int(record["c"])]
    for first in view.of(EventKind.REQUEST_FINISHED)["a"].tolist():
        for sequence_id in range(first, first + num_sequences.get(first, 1)):
            last.pop(sequence_id, None)
    return len(last)


def _since(records: Records, begin_ns: int) -> Records:
    since: Records = records[np.searchsorted(records["time_ns"], max(0, begin_ns)) :]
    return since


def _sum_s(column: np.ndarray) -> float:
    return float(column.sum(dtype=np.int64)) / 1e6


def _percent(share: float) -> str:
    return f"{min(1.0, share):.0%}"
