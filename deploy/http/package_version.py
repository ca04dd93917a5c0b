"""The installed version of millrace."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version() -> str:
    """The installed version, or "unknown".

    Call it once at the start: requests must not open files.
    """
    try:
        return version("millrace")
    except PackageNotFoundError:
        return "unknown"
