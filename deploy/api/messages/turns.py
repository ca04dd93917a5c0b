"""The messages and tools of Anthropic's API as chat has them. `ApiError` 400 names the wrong field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from ...errors import ApiError, shorten


@dataclass
class ChatMessages:
    """Messages of a chat, and the source field of each."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], source: str) -> None:
        self.messages.append(message)
        self.sources.append(source)


def read_messages(value: Any, turns: ChatMessages) -> None:
    """Adds the messages of a body to `turns`, with their places as sources."""
    if not isinstance(value, list):
        raise _wrong_type("messages", "a list")
    if not value:
        raise ApiError("empty_prompt", "messages: is empty; send at least one message", param="messages")
    for i, message in enumerate(value):
        path = f"messages[{i}]"
        if not isinstance(message, dict):
            raise _wrong_type(path, "an object")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            shown = shorten(repr(role), 64)
            text = f"{path}.role = {shown}: must be user, assistant or system"
            raise ApiError("invalid_value", text, param=f"{path}.role")
        content = message.get("content")
        if isinstance(content, str):
            turns.add({"role": role, "content": content}, path)
        elif role == "assistant":
            turns.add(_assistant(_blocks(content, f"{path}.content", ("text", "tool_use", *THOUGHTS))), path)
        elif role == "user":
            _add_user(_blocks(content, f"{path}.content", ("text", "tool_result")), f"{path}.content", path, turns)
        else:
            turns.add({"role": role, "content": text_content(content, f"{path}.content")}, path)


THOUGHTS = ("thinking", "redacted_thinking")


def is_prefill(message: dict[str, Any]) -> bool:
    """Whether the last message is the beginning of an answer, to be continued: text, and no call after it."""
    return message["role"] == "assistant" and bool(message["content"]) and "tool_calls" not in message


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """One chat message from the reasoning, text and calls of an assistant's turn."""
    message: dict[str, Any] = {"role": "assistant", "content": _joined(blocks)}
    if calls := [_tool_call(block) for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = calls
    if thoughts := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _add_user(blocks: list[dict[str, Any]], path: str, source: str, turns: ChatMessages) -> None:
    """Adds one message per tool result and per run of text blocks, in order.

    Chat has no field for `is_error`; the model sees the error in the text.
    """
    text_blocks: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block["type"] == "text":
            text_blocks.append(block)
            continue
        if text_blocks:
            turns.add({"role": "user", "content": _joined(text_blocks)}, source)
            text_blocks = []
        content = block.get("content")
        text = "" if content is None else text_content(content, f"{path}[{i}].content", "tool_reference")
        turns.add({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}, source)
    if text_blocks or not blocks:
        turns.add({"role": "user", "content": _joined(text_blocks)}, source)


_TEXT_OF = {"text": "text", "tool_reference": "tool_name"}  # type of a block -> the field with its text


def _joined(blocks: list[dict[str, Any]]) -> str | list[dict[str, str]]:
    """The text blocks as content.

    A single one becomes a plain text, as templates differ in how they join parts.
    """
    texts = [block[_TEXT_OF[block["type"]]] for block in blocks if block["type"] in _TEXT_OF]
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def text_content(value: Any, path: str, *more_kinds: str) -> str | list[dict[str, str]]:
    return value if isinstance(value, str) else _joined(_blocks(value, path, ("text", *more_kinds)))


# type of a block -> the fields it must have, and their types
_BLOCKS: dict[str, dict[str, tuple[type, str]]] = {
    "text": {"text": (str, "a text")},
    "thinking": {"thinking": (str, "a text")},
    "redacted_thinking": {},
    "tool_reference": {"tool_name": (str, "a text")},  # all tools are in the prompt, so its name says it all
    "tool_use": {"id": (str, "a text"), "name": (str, "a text"), "input": (dict, "an object")},
    "tool_result": {"tool_use_id": (str, "a text")},
}


def _blocks(value: Any, path: str, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _wrong_type(path, f"a text or a list of blocks of type {', '.join(kinds)}")
    for i, block in enumerate(value):
        at = f"{path}[{i}]"
        if not isinstance(block, dict):
            raise _wrong_type(at, "an object")
        kind = block.get("type")
        if kind not in kinds:
            message = f"{at}.type = {shorten(repr(kind), 64)}: must be one of {', '.join(kinds)} here"
            raise ApiError("unsupported_content_type", message, param=f"{at}.type")
        for name, (needed, called) in _BLOCKS[kind].items():
            if not isinstance(block.get(name), needed):
                raise _wrong_type(f"{at}.{name}", called)
    return value


def _tool_call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": orjson.dumps(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _wrong_type(path: str, right: str) -> ApiError:
    return ApiError("invalid_type", f"{path}: must be {right}", param=path)


# -- tools


def chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = f"{path}.type = {shorten(repr(tool.get('type')), 64)}: must be custom; other tools are not supported"
        raise ApiError("unsupported_parameter", message, param=f"{path}.type")
    function: dict[str, Any] = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    if "input_schema" in tool:
        if tool["input_schema"] is None:  # passed on as parameters, null would mean no schema
            raise ApiError("invalid_type", f"{path}.input_schema: must be an object", param=f"{path}.input_schema")
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}
