"""The history of each request of a run: what was sent, and what came, with times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from .cases import Case, text_of

End = Literal["open", "done", "refused", "broken", "left"]


@dataclass(eq=False, slots=True)
class ClientRequest:
    """One request of one client.

    end        open: none yet; done: whole; refused: an HTTP status other than 200; broken: an error within the stream,
               or a connection that ended before the answer did; left: the client left, on purpose
    """

    number: int
    client: int
    front: int
    case: Case
    is_stream: bool
    began_s: float
    end: End = "open"
    ended_s: float = 0.0
    status: int = 0
    error: str = ""
    texts: dict[int, list[str]] = field(default_factory=dict)  # by choice
    times: list[float] = field(default_factory=list)  # of the pieces
    finish_reasons: dict[int, list[str]] = field(default_factory=dict)  # by choice
    num_late: int = 0  # pieces of a choice after its end, or of anything after the end of all
    num_ends: int = 0  # of the stream
    num_tokens: int | None = None  # by its usage

    def take(self, answer: dict[str, Any], now_s: float) -> None:
        """An answer, or one event of a stream."""
        if "error" in answer:
            self.error = str(answer["error"].get("code") or answer["error"].get("type"))
            self.num_late += bool(self.num_ends)
            return
        if answer.get("usage"):
            self.num_tokens = answer["usage"]["completion_tokens"]
        for choice in answer.get("choices", ()):
            index, text = choice["index"], text_of(choice)
            self.num_late += index in self.finish_reasons or bool(self.num_ends)
            if text:
                self.texts.setdefault(index, []).append(text)
                self.times.append(now_s)
            if choice.get("finish_reason"):
                self.finish_reasons.setdefault(index, []).append(choice["finish_reason"])

    def take_line(self, line: bytes, now_s: float) -> None:
        """A line of a stream of server-sent events."""
        if not line.startswith(b"data: "):
            return
        if line.strip() == b"data: [DONE]":
            self.num_ends += 1
        else:
            self.take(orjson.loads(line[6:]), now_s)

    def text(self, index: int) -> str:
        return "".join(self.texts.get(index, ()))

    @property
    def longest_gap_s(self) -> float:
        """Between two pieces, from the first on."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "client": self.client,
            "front": self.front,
            "case": self.case.number,
            "kind": self.case.kind,
            "stream": self.is_stream,
            "began_s": round(self.began_s, 4),
            "ended_s": round(self.ended_s, 4),
            "end": self.end,
            "status": self.status,
            "error": self.error,
            "times_s": [round(one, 4) for one in self.times],
            "texts": {str(index): self.text(index) for index in self.texts},
            "finish_reasons": {str(index): reasons for index, reasons in self.finish_reasons.items()},
        }


def to_json_lines(requests: Sequence[ClientRequest]) -> bytes:
    """The history as JSON lines."""
    return b"".join(orjson.dumps(one.to_json(), option=orjson.OPT_APPEND_NEWLINE) for one in requests)
