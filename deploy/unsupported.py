"""Fields that this server knows of and does not serve. Dropped silently they would change the answer, so they are
refused unless their value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import ApiError

Harmless = Callable[[Any], bool]


def _asks_nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [], "")


def _is_text_only(value: Any) -> bool:
    return value is None or value == ["text"]


def _calls_nothing(value: Any) -> bool:
    return value is None or value in ("none", "auto")


_OFF_WHEN_EMPTY = (
    "tools",
    "functions",
    "audio",
    "echo",
    "chat_template",
    "cache_salt",
    "logits_processors",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "web_search_options",
)

# what more there is to say of some
REASONS = {
    "suffix": "this server does not fill in the middle; leave it out, or write the model's markers into the prompt",
    "echo": "only on /v1/completions; leave it out",
    "functions": "not supported by this server; send tools",
    "function_call": "not supported by this server; send tools and tool_choice",
}

UNSUPPORTED: dict[str, Harmless] = {
    "suffix": _asks_nothing,
    "modalities": _is_text_only,
    "tool_choice": _calls_nothing,
    "function_call": _calls_nothing,
    "parallel_tool_calls": lambda value: isinstance(value, bool) or value is None,
    **dict.fromkeys(_OFF_WHEN_EMPTY, _asks_nothing),
}


def refuse_unsupported(raw: Mapping[str, Any], unknown: list[str]) -> list[str]:
    """`unknown` without the fields that are merely not served. `ApiError` if one of those asks for something."""
    for name in unknown:
        if name in UNSUPPORTED and not UNSUPPORTED[name](raw[name]):
            message = f"{name}: {REASONS.get(name, 'not supported by this server; leave it out')}"
            raise ApiError("unsupported_parameter", message, param=name)
    return [name for name in unknown if name not in UNSUPPORTED]
