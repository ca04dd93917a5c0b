"""The trace by request, as spans: its arrival, the time in each stage, and its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .tracer import EventKind, Records, request_names

OF_REQUESTS = (
    EventKind.REQUEST_ACCEPTED,
    EventKind.REQUEST_TOKENIZED,
    EventKind.REQUEST_STAGE,
    EventKind.REQUEST_ADMITTED,
    EventKind.FIRST_TOKEN,
    EventKind.REQUEST_FINISHED,
)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request's time, [begin_ns, end_ns) on the trace's clock.

    `name` is a stage's, or queue (it waits for admission to a step), prefill or decode.
    """

    name: str
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class RequestSpans:
    """One request. Its spans are in order, do not overlap, and lie within it.

    Gaps between them are waits that belong to no stage.
    """

    number: int  # of its first sequence, its id in records
    request_id: str
    begin_ns: int
    end_ns: int
    cause: str | None = None  # how it ended; None: it has not ended
    num_sequences: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_ns: int | None = None
    is_cut: bool = False  # the trace no longer has its beginning
    spans: list[Span] = field(default_factory=list)


def request_spans(records: Records, names: list[str]) -> list[RequestSpans]:
    """Every request in the records, which are in order of time; sorted by number.

    A request whose beginning was overwritten begins with the records; one that has not ended ends with them.
    """
    if not len(records):
        return []
    first_ns, last_ns = int(records["time_ns"][0]), int(records["time_ns"][-1])
    ids, owners = request_names(records), _owners(records)
    collectors: dict[int, _RequestRecords] = {}
    for record in records[np.isin(records["kind"], OF_REQUESTS)]:
        number = owners.get(int(record["a"]), int(record["a"]))
        if number not in collectors:
            collectors[number] = _RequestRecords(
                RequestSpans(number, ids.get(number, f"request {number}"), first_ns, last_ns)
            )
        collectors[number].add(record, names)
    return [collectors[number].result() for number in sorted(collectors)]


def _owners(records: Records) -> dict[int, int]:
    """Sequence -> request, for requests of several sequences."""
    accepted = records[(records["kind"] == EventKind.REQUEST_ACCEPTED) & (records["b"] > 1)]
    firsts: Iterable[tuple[int, int]] = zip(accepted["a"].tolist(), accepted["b"].tolist(), strict=True)
    return {first + i: first for first, num_sequences in firsts for i in range(num_sequences)}


class _RequestRecords:
    """Collects the records of one request."""

    def __init__(self, request: RequestSpans) -> None:
        self.request = request
        self._was_accepted = False
        self._tokenized_ns: int | None = None
        self._admitted_ns: int | None = None

    def add(self, record: np.void, names: list[str]) -> None:
        request, time_ns = self.request, int(record["time_ns"])
        match record["kind"]:
            case EventKind.REQUEST_ACCEPTED:
                request.begin_ns, request.num_sequences, self._was_accepted = time_ns, int(record["b"]), True
            case EventKind.REQUEST_TOKENIZED:
                request.num_prompt_tokens += int(record["b"])
            case EventKind.REQUEST_STAGE:
                served_ns = 1000 * (int(record["c"]) + int(record["d"]))
                if self._admitted_ns is None:
                    self._tokenized_ns = time_ns
                    request.spans.append(Span(names[record["source"]], time_ns - served_ns, time_ns))
            case EventKind.REQUEST_ADMITTED:
                if self._admitted_ns is None:
                    self._admitted_ns = time_ns
                    request.num_cached_tokens = int(record["b"])
            case EventKind.FIRST_TOKEN:
                request.first_token_ns = time_ns if request.first_token_ns is None else request.first_token_ns
            case EventKind.REQUEST_FINISHED:
                request.end_ns, request.cause = time_ns, names[record["b"]]
                request.num_prompt_tokens, request.num_generated_tokens = int(record["c"]), int(record["d"])

    def result(self) -> RequestSpans:
        """The request, with the spans between its times."""
        request, admitted_ns, first_ns = self.request, self._admitted_ns, self.request.first_token_ns
        request.is_cut = not self._was_accepted
        if self._tokenized_ns is not None:
            request.spans.append(Span("queue", self._tokenized_ns, admitted_ns or request.end_ns))
        if admitted_ns is not None:
            request.spans.append(Span("prefill", admitted_ns, first_ns or request.end_ns))
        if first_ns is not None:
            request.spans.append(Span("decode", first_ns, request.end_ns))
        request.spans = _in_turn(request)
        return request


def _in_turn(request: RequestSpans) -> list[Span]:
    """The spans within the request, without overlap.

    A record is written microseconds after its event.
    """
    end_ns, spans = request.begin_ns, []
    for span in sorted(request.spans, key=lambda span: (span.begin_ns, span.end_ns)):
        begin_ns = max(span.begin_ns, end_ns)
        end_ns = min(max(span.end_ns, begin_ns), request.end_ns)
        if begin_ns < end_ns:
            spans.append(Span(span.name, begin_ns, end_ns))
        end_ns = max(begin_ns, end_ns)
    return spans
