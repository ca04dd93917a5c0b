"""Which known name was meant by an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_miss(name: str, known: Iterable[str], *, shortest: int = 4) -> str:
    """` (did you mean X?)` with the known name that is most like `name`, or the empty string.

    One letter of four may be wrong, if `shortest` is not above four.
    """
    cutoff = 0.75 if shortest <= len(name) <= 4 else 0.8
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean {found[0]}?)" if found else ""
