"""Builds the events of `POST /v1/responses` and the complete response from answer parts.

Streamed and whole responses use the same code, so they cannot differ. The framing of events is left to the transport.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...errors import ApiError
from ..adapter.answer_parts import AnswerEnd, Part, TextDelta, TokenUsage
from ..assistant_turn import ToolCallArguments, ToolCallBegun, is_json_object
from ..openai.logprob_fields import token_logprobs
from ..parsers.interface import Reasoning
from .bodies import ResponsesBody

if TYPE_CHECKING:
    from ....stages.params import SamplingParams

Event = dict[str, Any]

STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "abort": "cancelled"}
ERROR_CODES = {
    429: "rate_limit_exceeded",
    400: "invalid_prompt",
}  # HTTP status -> code in a failed response; others: server_error


def new_response(response_id: str, model: str, body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """A response without output, with status `in_progress`."""
    reasoning = {"effort": None, "summary": None} | (body.reasoning.model_dump() if body.reasoning else {})
    wanted = body.text.format if body.text is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": body.safety_identifier,
        "store": body.is_stored,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None} | tool for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


class ResponseEvents:
    """Builds one response. Each method returns its events and updates `response`.

    `response["output"]` holds the completed items. The caller owns the events.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._num_events = 0
        self._item: _Item | None = None  # the open item

    def queue(self) -> list[Event]:
        """Marks the response as queued."""
        self.response["status"] = "queued"
        return [self._of_response("response.created"), self._of_response("response.queued")]

    def begin(self) -> list[Event]:
        """Marks the response as in progress."""
        self.response["status"] = "in_progress"
        events = [] if self._num_events else [self._of_response("response.created")]
        return [*events, self._of_response("response.in_progress")]

    def add(self, part: Part) -> list[Event]:
        """Adds a part. An `AnswerEnd` closes the open item only; call `end` afterwards."""
        match part:
            case TextDelta():
                return [*self._enter(_Message), *self._grow(part.text, token_logprobs(part.logprobs))]
            case Reasoning():
                return [*self._enter(_Reasoning), *self._grow(part.text)]
            case ToolCallBegun():
                return [*self._leave(), *self._open(_FunctionCall(self.response["id"], self._place, part))]
            case ToolCallArguments():
                return self._grow(part.text)
            case AnswerEnd():
                is_empty = self._item is None and not self.response["output"]
                opened = self._enter(_Message) if is_empty else []  # an empty answer is a message with empty text
                return [*opened, *self._leave(is_whole=part.reason in ("stop", "tool_calls"))]

    def end(self, end: AnswerEnd, usage: TokenUsage) -> list[Event]:
        """Ends the response, after all parts have been added."""
        self.response["usage"] = response_usage(usage)
        self.response["status"] = status = STATUS[end.reason]
        if status == "completed":
            self.response["completed_at"] = int(time.time())
            return [self._of_response("response.completed")]
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [self._of_response("response.incomplete")]

    def fail(self, error: ApiError) -> list[Event]:
        """Ends the response with an error."""
        events = self._leave(is_whole=False)
        self.response["status"] = "failed"
        code = ERROR_CODES.get(error.status, "server_error")
        self.response["error"] = {"code": code, "message": error.message}
        return [*events, self._of_response("response.failed")]

    # -- items

    @property
    def _place(self) -> int:
        return len(self.response["output"])

    def _enter(self, kind: type[_Message] | type[_Reasoning]) -> list[Event]:
        """Opens an item of that kind, unless one is open."""
        if isinstance(self._item, kind):
            return []
        return [*self._leave(), *self._open(kind(self.response["id"], self._place))]

    def _open(self, item: _Item) -> list[Event]:
        self._item = item
        events = [self._event("response.output_item.added", output_index=self._place, item=item.shape("in_progress"))]
        if item.PART:
            events.append(self._of_item("response.content_part.added", item, part=item.part(is_done=False)))
        return events

    def _grow(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        item = self._item
        assert item is not None, "a part without an open item"
        item.texts.append(text)
        if logprobs:
            item.logprobs += logprobs
        return [self._of_item(f"{item.EVENT}.delta", item, delta=text, **item.extras(logprobs or []))]

    def _leave(self, is_whole: bool = True) -> list[Event]:
        """Closes the open item, if there is one."""
        item, self._item = self._item, None
        if item is None:
            return []
        events = [self._of_item(f"{item.EVENT}.done", item, **item.whole(), **item.extras(item.logprobs))]
        if item.PART:
            events.append(self._of_item("response.content_part.done", item, part=item.part()))
        done = item.shape("completed" if is_whole and item.is_whole else "incomplete")
        events.append(self._event("response.output_item.done", output_index=self._place, item=done))
        self.response["output"].append(done)
        return events

    # -- events

    def _of_response(self, kind: str) -> Event:
        return self._event(kind, response=self.response | {"output": list(self.response["output"])})

    def _of_item(self, kind: str, item: _Item, **fields: Any) -> Event:
        place = {"content_index": 0} if item.PART else {}
        return self._event(kind, item_id=item.id, output_index=self._place, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


class _Item:
    """An output item whose text grows."""

    PREFIX = ""
    EVENT = ""  # prefix of its event types
    PART: str = ""  # type of its one content part; "" if it has none

    def __init__(self, response_id: str, place: int) -> None:
        self.id = f"{self.PREFIX}_{response_id.removeprefix('resp_')}_o{place}"
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_whole(self) -> bool:
        """Whether the text is complete as far as the item can tell."""
        return True

    def part(self, is_done: bool = True) -> dict[str, Any]:
        return {"type": self.PART, "text": self.text if is_done else ""}

    def whole(self) -> dict[str, Any]:
        """The fields with the complete text in its `.done` event."""
        return {"text": self.text}

    def extras(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Further fields of its text events."""
        return {}

    def shape(self, status: str) -> dict[str, Any]:
        """The item as JSON; without content while it is in progress."""
        raise NotImplementedError


class _Message(_Item):
    PREFIX, EVENT, PART = "msg", "response.output_text", "output_text"

    def part(self, is_done: bool = True) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self.logprobs if is_done else []}
        return super().part(is_done) | more

    def extras(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs}

    def shape(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Reasoning(_Item):
    PREFIX, EVENT, PART = "rs", "response.reasoning_text", "reasoning_text"

    def shape(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class _FunctionCall(_Item):
    PREFIX, EVENT = "fc", "response.function_call_arguments"

    def __init__(self, response_id: str, place: int, call: ToolCallBegun) -> None:
        super().__init__(response_id, place)
        self.call = call

    @property
    def is_whole(self) -> bool:
        return is_json_object(self.text)

    def whole(self) -> dict[str, Any]:
        return {"name": self.call.name, "arguments": self.text}

    def shape(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call.id,
            "name": self.call.name,
            "arguments": self.text,
        }


def response_usage(usage: TokenUsage) -> dict[str, Any]:
    """The `usage` object of this API."""
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_completion,
    }
