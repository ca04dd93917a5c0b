"""Reads typed query parameters; errors name the parameter."""

from __future__ import annotations

from aiohttp import web

from ..errors import ApiError, shorten


def whole_number(request: web.Request, name: str, default: int, *, least: int, most: int) -> int:
    """The parameter as a whole number in [least, most]; `default` if it is missing.

    `ApiError` 400 for other values.
    """
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and least <= int(text) <= most):
        message = f"{name} = {shorten(repr(text), 64)}: must be a whole number from {least} to {most}"
        raise ApiError("invalid_value", message, param=name)
    return int(text)


def flag(request: web.Request, name: str) -> bool:
    """The parameter as a boolean; False if it is missing.

    `ApiError` 400 for values other than true and false.
    """
    text = request.query.get(name, "false").lower()
    if text not in ("true", "false"):
        message = f"{name} = {shorten(repr(text), 64)}: must be true or false"
        raise ApiError("invalid_value", message, param=name)
    return text == "true"
