"""Known fields that this server does not support.

Ignoring them would change the answer, so a request is refused unless the field's value has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ApiError

Harmless = Mapping[str, Sequence[Any]]  # field -> values without effect

NOTHING: Sequence[Any] = (None, False, {}, [], "")
_OFF_WHEN_EMPTY = (
    "suffix",
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

# advice for some fields, after their name in the error text
REASONS = {
    "suffix": "this server does not fill in the middle; leave it out, or write the model's markers into the prompt",
    "echo": "only supported on /v1/completions; leave it out",
    "functions": "not supported by this server; send tools instead",
    "function_call": "not supported by this server; send tools and tool_choice instead",
}

UNSUPPORTED: Harmless = {
    "modalities": (None, ["text"]),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    **dict.fromkeys(_OFF_WHEN_EMPTY, NOTHING),
}


def refuse_unsupported(raw: Mapping[str, Any], unknown: list[str], unsupported: Harmless) -> list[str]:
    """Returns `unknown` without the unsupported fields.

    `ApiError` if one of those would have an effect.
    """
    for name in unknown:
        if name in unsupported and not _is_one_of(raw[name], unsupported[name]):
            message = f"{name}: {REASONS.get(name, 'not supported by this server; leave it out')}"
            raise ApiError("unsupported_parameter", message, param=name)
    return [name for name in unknown if name not in unsupported]


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """Membership by JSON equality: 0 is not false."""
    return any(value == one and type(value) is type(one) for one in values)
