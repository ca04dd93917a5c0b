"""What a request asks for after the `?`: read by name, and refused by name."""

from __future__ import annotations

from aiohttp import web

from ..errors import ApiError, shorten


def whole_number(request: web.Request, name: str, default: int, *, least: int, most: int) -> int:
    """`ApiError` 400 for what is no whole number in that range."""
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and least <= int(text) <= most):
        message = f"{name} = {shorten(repr(text), 64)}: must be a whole number from {least} to {most}"
        raise ApiError("invalid_value", message, param=name)
    return int(text)


def flag(request: web.Request, name: str) -> bool:
    """False unless it is there. `ApiError` 400 for anything but true and false."""
    text = request.query.get(name, "false").lower()
    if text not in ("true", "false"):
        message = f"{name} = {shorten(repr(text), 64)}: must be true or false"
        raise ApiError("invalid_value", message, param=name)
    return text == "true"
