"""`metadata`: pairs of text that a client attaches to a request, and that stages of one's own read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512


def metadata_pairs(given: object) -> Mapping[str, str]:
    """The pairs that the API defines, at most 16, of whatever a client has sent; nothing else is kept."""
    if not isinstance(given, dict):
        return {}
    pairs: dict[str, Any] = {key: value for key, value in given.items() if isinstance(value, str)}
    fitting = [key for key, value in pairs.items() if len(key) <= MAX_KEY_CHARS and len(value) <= MAX_VALUE_CHARS]
    return {key: pairs[key] for key in fitting[:MAX_PAIRS]}
