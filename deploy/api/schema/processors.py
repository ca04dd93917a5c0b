"""`logits_processors` of a request: which of the server's logits processors it asks for, and with what arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....stages.plugins import near_miss
from ...errors import ApiError, shorten

if TYPE_CHECKING:
    from ....stages.sample.logits_processor import LogitsProcessor

FIELD = "logits_processors"
MAX_PROCESSORS = 16
NOT_IN_BEAMS = f"{FIELD}: not supported with use_beam_search; leave one of the two out"


def asked_processors(asked: Any, processors: Sequence[LogitsProcessor]) -> dict[str, dict[str, Any]]:
    """The arguments by name: `asked` is a list of names, or of objects with `name` and `arguments`.

    `ApiError` names what is wrong.
    """
    if not processors:
        message = f"{FIELD}: this server has none; leave it out, or start the server with --logits-processor"
        raise ApiError("unsupported_parameter", message, param=FIELD)
    if not isinstance(asked, list) or len(asked) > MAX_PROCESSORS:
        raise ApiError("invalid_value", f"{FIELD}: must be a list of at most {MAX_PROCESSORS}", param=FIELD)
    known, found = {one.name: one for one in processors}, dict[str, dict[str, Any]]()
    for i, one in enumerate(asked):
        path, asks = f"{FIELD}[{i}]", {"name": one} if isinstance(one, str) else one
        if not isinstance(asks, dict) or not isinstance(asks.get("name"), str) or set(asks) - {"name", "arguments"}:
            raise ApiError("invalid_value", f"{path}: must be a name, or an object with name and arguments", param=path)
        name, arguments = asks["name"], asks.get("arguments") or {}
        if name not in known:
            hint = near_miss(name, known)
            message = f"{path} = {shorten(repr(name), 64)}: must be one of {', '.join(known)}{hint}"
            raise ApiError("invalid_value", message, param=path)
        if not isinstance(arguments, dict):
            raise ApiError("invalid_type", f"{path}.arguments: must be an object", param=f"{path}.arguments")
        if name in found:
            raise ApiError("invalid_value", f"{path}: {name} is named twice; leave one of them out", param=path)
        try:
            known[name].validate(arguments)
        except ValueError as error:
            raise ApiError("invalid_value", f"{path}.arguments: {error}", param=f"{path}.arguments") from None
        found[name] = arguments
    return found
