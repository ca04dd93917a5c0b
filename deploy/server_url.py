"""The address of a server that a command asks, and why nothing answers there."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from ..stages.errors import ConfigError


def server_url(flag: str, url: str) -> str:
    """The root of a server, without /v1 or a slash at its end. Raises `ConfigError` for what is no URL."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, or half an IPv6 address
        is_url = False
    if not is_url:
        raise ConfigError(f"{flag} {url}: must be like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def why_no_answer(error: Exception) -> str:
    """The reason of a failed connection in the system's words, with what to do where nothing listens."""
    cause = getattr(error, "os_error", error)  # aiohttp's errors have one
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused: nothing listens there; start it with millrace serve, or check the address"
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno).lower()
    return str(cause) or type(cause).__name__
