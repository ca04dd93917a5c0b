"""The input of `POST /v1/responses`, normalized and converted to chat messages.

OpenAI allows several spellings of an item. The values in the messages are checked by the chat body.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import ApiError, shorten

Item = dict[str, Any]

MAX_ITEMS_LISTED = 100  # on one page

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def read_items(value: Any, suffix: str) -> list[Item]:
    """Normalizes an input to items with content parts. `ApiError` 400 names the wrong item.

    The id of each item ends in `suffix` and its index.
    """
    if isinstance(value, str):
        if not value:
            raise ApiError("empty_prompt", "input: is empty; send at least one character", param="input")
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise _wrong_type("input", "a text or a list of items")
    if not value:
        raise ApiError("empty_prompt", "input: is an empty list; send at least one item", param="input")
    return [_read_item(item, f"input[{i}]", f"{suffix}_{i}") for i, item in enumerate(value)]


def messages_of(items: Sequence[Item], names: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Converts items to chat messages; returns them with the name of each message's first item.

    The reasoning, text and calls of one assistant turn become one message.
    """
    turns = _Turns()
    for item, name in zip(items, names, strict=True):
        turns.add(item, name)
    turns.end_thoughts()
    return turns.messages, turns.sources


class _Turns:
    """Chat messages from items, with the name of each message's first item."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sources: list[str] = []
        self._thoughts: list[str] = []  # of the assistant's turn that comes next
        self._thoughts_source = ""

    def add(self, item: Item, name: str) -> None:
        """Adds an item: to the assistant's last turn, or as a new turn."""
        match item["type"]:
            case "reasoning":
                self._thoughts_source = self._thoughts_source if self._thoughts else name
                self._thoughts += _texts(item.get("content") or item["summary"])
                return
            case "function_call" if self.messages and self.messages[-1]["role"] == "assistant":
                turn = self.messages[-1]
                if thoughts := self._take_thoughts(turn.get("reasoning_content")):
                    turn["reasoning_content"] = thoughts
                turn.setdefault("tool_calls", []).append(_tool_call(item))
                return
        message = _message(item)
        if message["role"] != "assistant":
            self.end_thoughts()
        elif thoughts := self._take_thoughts():
            message["reasoning_content"] = thoughts
        self._append(message, name)

    def end_thoughts(self) -> None:
        """Adds an assistant's turn that was cut off within its reasoning."""
        if thoughts := self._take_thoughts():
            self._append({"role": "assistant", "content": "", "reasoning_content": thoughts}, self._thoughts_source)

    def _take_thoughts(self, earlier: str | None = None) -> str:
        taken, self._thoughts = self._thoughts, []
        return "\n".join([*([] if earlier is None else [earlier]), *taken])

    def _append(self, message: dict[str, Any], source: str) -> None:
        self.messages.append(message)
        self.sources.append(source)


def num_to_cut(messages: Sequence[dict[str, Any]], fits: Callable[[int], bool]) -> int:
    """The number of messages to drop at the beginning, under `truncation = "auto"`.

    It is the smallest for which the rest fits and begins with a user turn. `fits(n)` says whether the messages fit
    without the first n. If not even the last user turn fits, all messages before it are dropped. 0 for no messages.
    """
    starts = [i for i, message in enumerate(messages) if message["role"] == "user" or i == 0] or [0]
    return starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)]


def _message(item: Item) -> dict[str, Any]:
    match item["type"]:
        case "function_call":
            return {"role": "assistant", "content": "", "tool_calls": [_tool_call(item)]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])}
        case _:
            return {"role": item["role"], "content": _content(item["content"])}


def _tool_call(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _content(parts: str | list[dict[str, Any]]) -> str | list[dict[str, str]]:
    """The parts as content.

    A single one becomes a plain text, as templates differ in how they join parts.
    """
    if isinstance(parts, str):
        return parts
    texts = _texts(parts)
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _texts(parts: Sequence[dict[str, Any]]) -> list[str]:
    return [part["text"] for part in parts]


# -- reading


def _read_item(item: Any, path: str, suffix: str) -> Item:
    if not isinstance(item, dict):
        raise _wrong_type(path, "an object")
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in ID_PREFIXES:
        known = ", ".join(ID_PREFIXES)
        message = f"{path}.type = {shorten(repr(kind), 64)}: must be one of {known}"
        raise ApiError("unsupported_parameter", message, param=f"{path}.type")
    read = {"id": f"{ID_PREFIXES[kind]}_{suffix}", "type": kind, "status": "completed"}
    match kind:
        case "message":
            role = item.get("role")
            if role not in ROLES:
                message = f"{path}.role = {shorten(repr(role), 64)}: must be one of {', '.join(ROLES)}"
                raise ApiError("invalid_value", message, param=f"{path}.role")
            shape = _output_text if role == "assistant" else _input_text
            return read | {"role": role, "content": _read_parts(item, "content", path, shape)}
        case "reasoning":
            summary = _read_parts(item, "summary", path, _summary_text) if item.get("summary") else []
            content = _read_parts(item, "content", path, _reasoning_text) if item.get("content") else []
            return read | {"summary": summary, "content": content}
        case "function_call":
            return read | {name: _text(item, name, path) for name in ("call_id", "name", "arguments")}
        case _:
            output = item.get("output")
            shown = output if isinstance(output, str) else _read_parts(item, "output", path, _input_text)
            return read | {"call_id": _text(item, "call_id", path), "output": shown}


def _read_parts(item: Item, name: str, path: str, shape: Any) -> list[dict[str, Any]]:
    path = f"{path}.{name}"
    value = item.get(name)
    if isinstance(value, str):
        return [shape(value)]
    if not isinstance(value, list):
        raise _wrong_type(path, "a text or a list of parts")
    return [shape(_part_text(part, f"{path}[{i}]")) for i, part in enumerate(value)]


def _part_text(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise _wrong_type(path, "an object")
    kind = part.get("type")
    if kind == "refusal":
        return _text(part, "refusal", path)
    if kind not in (*TEXT_PARTS, "summary_text"):
        message = f"{path}.type = {shorten(repr(kind), 64)}: this model takes text parts only"
        raise ApiError("unsupported_content_type", message, param=f"{path}.type")
    return _text(part, "text", path)


def _text(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong_type(f"{path}.{name}", "a text")
    return value


def _wrong_type(path: str, right: str) -> ApiError:
    return ApiError("invalid_type", f"{path}: must be {right}", param=path)


def _input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_text(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
