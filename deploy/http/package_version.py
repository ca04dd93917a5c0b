"""Which millrace this is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version() -> str:
    """Of millrace, as installed: read at the start, as no request may open a file."""
    try:
        return version("millrace")
    except PackageNotFoundError:
        return "unknown"
