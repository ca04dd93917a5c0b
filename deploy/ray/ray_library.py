"""Ray itself, imported when something asks for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...stages.errors import ConfigError

EXTRA = "pip install 'millrace-engine[ray]'"


def ray_library(module: str = "ray") -> Any:
    """A module of Ray. Raises `ConfigError` if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"Ray cannot be imported ({error}); try {EXTRA}") from None
