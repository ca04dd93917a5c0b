"""The objects that answer `/api/chat` and `/api/generate`, from answer parts: one for a whole answer, or one a line.

Streamed and whole answers use the same code, so they cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from ...errors import ApiError
from ..adapter.answer_parts import AnswerEnd, Part, TextDelta
from ..assistant_turn import ToolCallArguments, ToolCallBegun, is_json_object
from ..openai.logprob_fields import token_logprobs
from ..parsers.interface import Reasoning

OLLAMA_PREFIX = "/api/"  # errors on paths with this prefix have this API's shape

Line = dict[str, Any]


class AnswerLines:
    """Builds one answer. `add` returns the lines of a stream, and keeps what `whole` returns."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._texts: dict[str, list[str]] = {"content": [], "thinking": []}
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._call: tuple[ToolCallBegun, list[str]] | None = None  # begun, and the arguments so far

    def add(self, parts: Iterable[Part], keeps: bool = False) -> list[Line]:
        """The lines of some parts. Text that arrives together is one line; a call is one once it is complete.

        With `keeps`, there are no lines, and `whole` returns the parts.
        """
        lines: list[Line] = []
        for part in parts:
            match part:
                case ToolCallBegun():
                    lines += self._end_call()
                    self._call = (part, [])
                case ToolCallArguments():
                    assert self._call is not None, "arguments without a call"
                    self._call[1].append(part.text)
                case TextDelta():
                    lines += self._end_call()
                    _join(lines, "content", part.text, token_logprobs(part.logprobs))
                case Reasoning():
                    lines += self._end_call()
                    _join(lines, "thinking", part.text, [])
                case AnswerEnd():
                    lines += self._end_call()
        if not keeps:
            return [self._line(line) for line in lines]
        for line in lines:
            for name in self._texts:
                self._texts[name].append(line.get(name, ""))
            self._calls += line.get("tool_calls", ())
            self._logprobs += line.get("logprobs", ())
        return []

    def whole(self, closing: Line) -> Line:
        """The answer as one object; `closing` are the fields of its end."""
        fields: dict[str, Any] = {name: "".join(texts) for name, texts in self._texts.items()}
        fields |= {"tool_calls": self._calls, "logprobs": self._logprobs}
        return self._line({name: value for name, value in fields.items() if value}) | closing

    def last(self, closing: Line) -> Line:
        """The last line of a stream."""
        return self._line({}) | closing

    def _line(self, fields: dict[str, Any]) -> Line:
        line: Line = {"model": self._model, "created_at": now()}
        content = {"thinking": fields["thinking"]} if "thinking" in fields else {}
        if self._is_chat:
            content = {"role": "assistant", "content": fields.get("content", "")} | content
            content |= {"tool_calls": fields["tool_calls"]} if "tool_calls" in fields else {}
            line["message"] = content
        else:
            line |= {"response": fields.get("content", "")} | content
        return line | {"done": False} | ({"logprobs": fields["logprobs"]} if fields.get("logprobs") else {})

    def _end_call(self) -> list[Line]:
        if self._call is None:
            return []
        (begun, texts), self._call = self._call, None
        function = {"index": begun.index, "name": begun.name, "arguments": _as_object("".join(texts))}
        return [{"tool_calls": [{"id": begun.id, "function": function}]}]


def _join(lines: list[Line], name: str, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
    """Adds text to the last line if that is of the same kind, or as a new line."""
    if not text and not logprobs:
        return
    if lines and name in lines[-1]:
        lines[-1][name] += text
    else:
        lines.append({name: text, "logprobs": []})
    lines[-1]["logprobs"] += logprobs


def closing_fields(
    end: AnswerEnd, metrics: Mapping[str, Any], num_prompt: int, num_generated: int, began_ns: int
) -> Line:
    """The fields of an answer's end: its reason, token counts, and durations in nanoseconds.

    `metrics` are those of the request. The model is in memory, so loading takes no time; `total_duration` includes the
    time in the queue. The evaluation of the answer is counted from its first token, and is at least one nanosecond,
    since clients divide by it.
    """
    return {
        "done": True,
        "done_reason": "stop" if end.reason == "tool_calls" else end.reason,
        "total_duration": time.perf_counter_ns() - began_ns,
        "load_duration": 0,
        "prompt_eval_count": num_prompt,
        "prompt_eval_duration": max(1, _ns(metrics["stages"]["prefill"])),
        "eval_count": num_generated,
        "eval_duration": max(1, _ns(metrics["generation_time_ms"])),
    }


def loaded(model: str, is_chat: bool) -> Line:
    """The answer to a request without a prompt, with which Ollama's clients load a model."""
    return AnswerLines(model, is_chat).last({"done": True, "done_reason": "load"})


def framed(lines: Iterable[Line]) -> bytes:
    """Lines of a stream."""
    return b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)


def ollama_error(error: ApiError) -> Line:
    """An error in this API's shape, as a body and as the last line of a stream.

    Clients that would pull a missing model look for the words "not found".
    """
    message = error.message
    if error.code == "model_not_found":
        message = message.replace("not served here", "not found here").replace("GET /v1/models", "GET /api/tags")
    return {"error": message}


def now() -> str:
    """The time of day as this API writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _ns(milliseconds: float | None) -> int:
    return round(1e6 * (milliseconds or 0.0))


def _as_object(text: str) -> dict[str, Any] | orjson.Fragment:
    """The arguments of a call as an object, with all digits of its numbers; empty if they were cut off."""
    return orjson.Fragment(text) if is_json_object(text) else {}
