"""Builds the events of `POST /v1/messages` and the complete message from answer parts.

Streamed and whole messages use the same code, so they cannot differ. The framing of events is left to the transport.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson

from ...errors import ApiError
from ..adapter.answer_parts import AnswerEnd, Part, TextDelta, TokenUsage
from ..assistant_turn import ToolCallArguments, ToolCallBegun, is_json_object
from ..parsers.interface import Reasoning

MESSAGES_PATH = "/v1/messages"  # errors on paths with this prefix have this API's shape

Event = dict[str, Any]

PING: Event = {"type": "ping"}

# HTTP status -> error type of Anthropic's API
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageEvents:
    """Builds one message. Each method returns its events and updates `message`."""

    def __init__(self, message_id: str, model: str, stop_sequences: Collection[str]) -> None:
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(TokenUsage(0, 0, 0)),
        }
        self._stop_sequences = stop_sequences
        self._texts: list[str] | None = None  # text of the open block; None if no block is open

    def begin(self, usage: TokenUsage) -> list[Event]:
        """Starts the message, after the prefill."""
        self.message["usage"] = message_usage(usage)
        return [{"type": "message_start", "message": self.message | {"content": []}}, PING]

    def add(self, part: Part) -> list[Event]:
        """Adds a part. An `AnswerEnd` closes the open block only; call `end` afterwards."""
        match part:
            case TextDelta():
                opened = self._enter({"type": "text", "text": ""})
                return [*opened, *self._grow("text_delta", "text", part.text)]
            case Reasoning():
                opened = self._enter({"type": "thinking", "thinking": "", "signature": ""})
                return [*opened, *self._grow("thinking_delta", "thinking", part.text)]
            case ToolCallBegun():
                return self._open({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            case ToolCallArguments():
                return self._grow("input_json_delta", "partial_json", part.text)
            case AnswerEnd():
                return self._leave()

    def end(self, end: AnswerEnd, usage: TokenUsage) -> list[Event]:
        """Ends the message, after all parts have been added."""
        self.message["stop_reason"] = self._stop_reason(end)
        if self.message["stop_reason"] == "stop_sequence":
            self.message["stop_sequence"] = end.stop_reason
        self.message["usage"] = message_usage(usage)
        stop_fields = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        return [
            {"type": "message_delta", "delta": stop_fields, "usage": self.message["usage"]},
            {"type": "message_stop"},
        ]

    def _stop_reason(self, end: AnswerEnd) -> str:
        match end.reason:
            case "stop" if end.stop_reason in self._stop_sequences:
                return "stop_sequence"
            case "tool_calls":
                return "tool_use"
            case "length":
                return "max_tokens"
            case "abort":
                return "pause_turn"  # aborted from outside; the client may send it back to be continued
            case _:
                return "end_turn"

    # -- blocks

    @property
    def _content(self) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = self.message["content"]
        return content

    def _enter(self, block: dict[str, Any]) -> list[Event]:
        """Opens a block of that type, unless one is open."""
        is_open = self._texts is not None and self._content[-1]["type"] == block["type"]
        return [] if is_open else self._open(block)

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._leave()
        self._content.append(dict(block))
        self._texts = []
        return [*events, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}]

    def _grow(self, kind: str, name: str, text: str) -> list[Event]:
        assert self._texts is not None, "a part without an open block"
        self._texts.append(text)
        delta = {"type": kind, name: text}
        return [{"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}]

    def _leave(self) -> list[Event]:
        """Closes the open block, if there is one."""
        if self._texts is None:
            return []
        block, text = self._content[-1], "".join(self._texts)
        self._texts = None
        if block["type"] == "tool_use":
            block["input"] = _as_object(text)
        else:
            block["text" if block["type"] == "text" else "thinking"] = text
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]


def message_usage(usage: TokenUsage) -> dict[str, Any]:
    """The `usage` object of this API: `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_read_input_tokens": usage.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.num_completion,
    }


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """An error in this API's shape, as a body and as an event."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def _as_object(text: str) -> dict[str, Any] | orjson.Fragment:
    """The arguments of a call as an object, with all digits of its numbers.

    They may be missing or cut off; then the object is empty.
    """
    return orjson.Fragment(text) if is_json_object(text) else {}
