"""What is new in a tree of plain data, as a JSON merge patch (RFC 7386). Lists are taken as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What, merged into `before`, gives `after`; empty if they are equal. A member that is None is as one that is not
    there, as the format has no other way to say it."""
    patch: dict[str, Any] = {name: None for name in before if name not in after and before[name] is not None}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif value != old:
            patch[name] = value
    return patch
