"""The messages of Ollama's API as chat has them. `ApiError` 400 names the wrong field."""

from __future__ import annotations

from typing import Any

import orjson

from ...errors import ApiError, shorten

ROLES = ("system", "user", "assistant", "tool")


def chat_message(message: Any, path: str) -> dict[str, Any]:
    """A message as chat has it."""
    if not isinstance(message, dict):
        raise wrong_type(path, "an object")
    role = message.get("role")
    role = role.lower() if isinstance(role, str) else role
    if role not in ROLES:
        text = f"{path}.role = {shorten(repr(role), 64)}: must be one of {', '.join(ROLES)}"
        raise ApiError("invalid_value", text, param=f"{path}.role")
    content = message.get("content")
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise wrong_type(f"{path}.content", "a text")
    if message.get("images") not in (None, []):
        text = f"{path}.images: this model takes text only; leave images out"
        raise ApiError("unsupported_content_type", text, param=f"{path}.images")
    converted: dict[str, Any] = {"role": role, "content": content}
    texts = {
        "assistant": {"thinking": "reasoning_content"},
        "tool": {"tool_name": "name", "tool_call_id": "tool_call_id"},
    }
    for name, ours in texts.get(role, {}).items():
        value = message.get(name)
        if not isinstance(value, str | None):
            raise wrong_type(f"{path}.{name}", "a text")
        if value:
            converted[ours] = value
    if role == "assistant" and message.get("tool_calls") not in (None, []):
        converted["tool_calls"] = _calls(message["tool_calls"], f"{path}.tool_calls")
    return converted


def _calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong_type(path, "a list")
    converted = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong_type(f"{path}[{i}].function", "an object with a name")
        arguments = function.get("arguments")
        if not isinstance(arguments, dict | None):
            raise wrong_type(f"{path}[{i}].function.arguments", "an object")
        made = {"name": function["name"], "arguments": orjson.dumps(arguments or {}).decode()}
        call_id = call.get("id")
        converted.append(
            {"id": call_id if isinstance(call_id, str) else f"call_{i}", "type": "function", "function": made}
        )
    return converted


def wrong_type(path: str, right: str) -> ApiError:
    return ApiError("invalid_type", f"{path}: must be {right}", param=path)
