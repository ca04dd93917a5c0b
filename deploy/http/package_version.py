"""The installed version of millrace: of the distribution `millrace-engine`, which has the package `millrace`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "millrace-engine"  # `millrace` on PyPI is another project


@cache
def package_version() -> str:
    """The installed version, or "unknown".

    Call it once at the start: requests must not open files.
    """
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
