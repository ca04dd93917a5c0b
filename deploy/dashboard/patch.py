"""Changes of a tree of plain data as a JSON merge patch (RFC 7386). Lists are replaced as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The patch that turns `before` into `after`; empty if they are equal.

    A member that is None counts as missing, as the format cannot express it.
    """
    patch: dict[str, Any] = {name: None for name in before if name not in after and before[name] is not None}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif value != old:
            patch[name] = value
    return patch
