"""Workloads to simulate: arrival times, lengths, and common prefixes of prompts.

From a recording, or from published traces: a CSV like Azure's (TIMESTAMP, ContextTokens, GeneratedTokens) or JSON lines
like Mooncake's (timestamp in ms, input_length, output_length, hash_ids). None of them holds any text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ..messages import Ints, StepDone, TokenRequest
from .field_values import InvalidValue, MessageFields, shown
from .reader import Recording, RecordingError, ScheduleCall
from .repetition import Repetition

MAX_TOKENS = 2**24  # of a prompt or an answer in a trace
HASH_BLOCK = 512  # tokens per hash id in Mooncake's traces


@dataclass(frozen=True, slots=True, eq=False)
class WorkloadRequest:
    """One prompt and the length of its answer."""

    arrival_s: float  # since the trace began
    num_prompt: int
    num_answer: int  # at least 1
    hash_ids: Sequence[int] = ()  # of its blocks of `hash_block` tokens; equal ids mean equal prefixes
    hash_block: int = HASH_BLOCK
    token_ids: Ints | None = None  # [P] where they are known
    leaves_s: float | None = None  # time from its arrival until its client leaves
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""  # the digest of its adapter; "": the base model
    repeats: Repetition | None = None  # how the answer repeats earlier text; None: nowhere, or unknown
    num_done: int = 0  # tokens of the answer that another engine has made, which was lost
    sent_s: float | None = None  # when it was sent to this one since the trace began; None: on its arrival

    def tokens(self, number: int) -> Ints:
        """Ids [P] that equal another request's as far as the trace says so.

        `number` is the request's own.
        """
        if self.token_ids is not None:
            return self.token_ids
        if not self.hash_ids:
            return np.zeros(self.num_prompt, np.int32)
        blocks = np.array(self.hash_ids, np.int64)[:, None] * self.hash_block + np.arange(self.hash_block)
        alike = blocks.reshape(-1)[: self.num_prompt] & 0x3FFFFFFF
        own = (np.arange(self.num_prompt - len(alike)) + number * 1_000_003) & 0x3FFFFFFF | 0x40000000
        return np.concatenate([alike, own]).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival."""

    requests: Sequence[WorkloadRequest]
    has_prefixes: bool  # whether it has the common prefixes of prompts
    has_repeats: bool = False  # whether it has the repetitions in answers

    def scaled(self, *, times: float = 1.0, lengths: float = 1.0, most: int | None = None) -> Workload:
        """The first `most` requests, with gaps scaled by `times` and lengths by `lengths`."""
        return replace(self, requests=[_scaled(request, times, lengths) for request in self.requests[:most]])


def read_trace(path: Path) -> Workload:
    """Reads a trace in any of these formats.

    Raises `RecordingError`, with the line, for any other file.
    """
    try:
        with path.open("rb") as file:
            first = file.readline(65_536)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}: must name a recording or a trace") from None
    if b"millrace_recording" in first:
        return from_recording(Recording(path))
    read = _read_csv if b"ContextTokens" in first else _read_json_lines
    requests = sorted(read(path), key=lambda request: request.arrival_s)
    if not requests:
        raise RecordingError(f"{path}: it has no requests")
    began_s = requests[0].arrival_s
    has_prefixes = any(request.hash_ids for request in requests)
    return Workload([replace(request, arrival_s=request.arrival_s - began_s) for request in requests], has_prefixes)


def from_recording(recording: Recording) -> Workload:
    """The requests of a recording with their recorded lengths, each choice as its own request.

    A cancelled request leaves after the same time as recorded.
    """
    by_sequence: dict[int, TokenRequest] = {}
    num_answered: dict[int, int] = {}
    over: set[int] = set()
    left_s: dict[int, float] = {}
    repeats: dict[int, Repetition] = {}
    for call in recording:
        if not isinstance(call, ScheduleCall):
            continue
        for message in call.taken:
            if isinstance(message, TokenRequest):
                by_sequence |= {message.first_sequence_id + choice: message for choice in range(message.params.n)}
            elif isinstance(message, StepDone):
                num_answered.update(zip(message.sequence_ids.tolist(), (message.places + 1).tolist(), strict=True))
                over.update(message.sequence_ids[message.is_finished].tolist())
        repeats.update(call.repeats)
        for sequence_id, cause in call.lane:
            if cause == "finish":
                over.add(sequence_id)
            elif cause not in ("park", "unpark"):
                left_s.setdefault(sequence_id, call.time_s)
    requests = []
    began_s = min((request.arrival_s for request in by_sequence.values()), default=0.0)
    for sequence_id, request in sorted(by_sequence.items()):
        is_cut = sequence_id not in over
        answered = num_answered.get(sequence_id, 0)
        leaves_s = left_s.get(sequence_id) if is_cut else None
        requests.append(
            WorkloadRequest(
                arrival_s=request.arrival_s - began_s,
                num_prompt=len(request.token_ids),
                num_answer=max(1, (request.params.max_tokens or answered) if is_cut else answered),
                token_ids=request.token_ids,
                leaves_s=None if leaves_s is None else leaves_s + recording.began_s - request.arrival_s,
                priority=request.priority,
                cache_salt=request.cache_salt,
                adapter="" if request.adapter is None else request.adapter.digest,
                repeats=repeats.get(sequence_id),
            )
        )
    if not requests:
        raise RecordingError(f"{recording.path}: it has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(requests, recording.engine.enable_prefix_caching, recording.has_repeats)


def _read_csv(path: Path) -> Iterator[WorkloadRequest]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.DictReader(file)
        for row in rows:
            try:
                arrival_s = _seconds(row.get("TIMESTAMP") or "")
                counts = {name: _whole(row.get(name)) for name in ("ContextTokens", "GeneratedTokens")}
                given = MessageFields("row", counts)
                num_prompt = given.whole("ContextTokens", 1, MAX_TOKENS)
                yield WorkloadRequest(arrival_s, num_prompt, max(1, given.whole("GeneratedTokens", 0, MAX_TOKENS)))
            except (ValueError, InvalidValue) as error:
                raise RecordingError(f"{path}:{rows.line_num}: {error}") from None


def _seconds(text: str) -> float:
    """A date and time as seconds since 1970. Rejects numpy's words such as now and today."""
    if not text[:4].isdigit():
        raise InvalidValue(f"row.TIMESTAMP = {shown(text)}: must be a date and a time")
    return float(np.datetime64(text, "ns").astype(np.int64)) / 1e9


def _whole(text: str | None) -> Any:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else text


def _read_json_lines(path: Path) -> Iterator[WorkloadRequest]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = orjson.loads(line)
                given = MessageFields("row", row if isinstance(row, dict) else {})
                yield WorkloadRequest(
                    given.number("timestamp") / 1e3,
                    given.whole("input_length", 1, MAX_TOKENS),
                    max(1, given.whole("output_length", 0, MAX_TOKENS)),
                    given.wholes("hash_ids", 2**53) if "hash_ids" in given.values else (),
                )
            except (orjson.JSONDecodeError, InvalidValue) as error:
                raise RecordingError(f"{path}:{number}: {error}") from None


def _scaled(request: WorkloadRequest, times: float, lengths: float) -> WorkloadRequest:
    if lengths != 1.0 and request.token_ids is not None:
        raise RecordingError("lengths: prompts of a recording have fixed lengths; scale a trace without token ids")
    return replace(
        request,
        arrival_s=request.arrival_s * times,
        num_prompt=max(1, round(request.num_prompt * lengths)),
        num_answer=max(1, round(request.num_answer * lengths)),
        hash_block=max(1, round(request.hash_block * lengths)),
    )
