"""`logits_processors` of a request: which of the server's logits processors it asks for, and with what arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....stages.plugins import near_miss
from ...errors import shorten, wrong_field

if TYPE_CHECKING:
    from ....stages.sample.logits_processor import LogitsProcessor

FIELD = "logits_processors"
MAX_PROCESSORS = 16
NOT_IN_BEAMS = "not supported with use_beam_search; leave one of the two out"


def asked_processors(asked: Any, processors: Sequence[LogitsProcessor]) -> dict[str, dict[str, Any]]:
    """The arguments by name: `asked` is a list of names, or of objects with `name` and `arguments`.

    `ApiError` names what is wrong.
    """
    if not processors:
        problem = "this server has none; leave it out, or start the server with --logits-processor"
        raise wrong_field(FIELD, problem, code="unsupported_parameter")
    if not isinstance(asked, list) or len(asked) > MAX_PROCESSORS:
        raise wrong_field(FIELD, f"must be a list of at most {MAX_PROCESSORS}")
    known, found = {one.name: one for one in processors}, dict[str, dict[str, Any]]()
    for i, one in enumerate(asked):
        path, asks = f"{FIELD}[{i}]", {"name": one} if isinstance(one, str) else one
        if not isinstance(asks, dict) or not isinstance(asks.get("name"), str) or set(asks) - {"name", "arguments"}:
            raise wrong_field(path, "must be a name, or an object with name and arguments")
        name, arguments = asks["name"], asks.get("arguments") or {}
        if name not in known:
            hint = near_miss(name, known)
            raise wrong_field(path, f"must be one of {', '.join(known)}{hint}", shorten(repr(name), 64))
        if not isinstance(arguments, dict):
            raise wrong_field(f"{path}.arguments", "must be an object", code="invalid_type")
        if name in found:
            raise wrong_field(path, f"{name} is named twice; leave one of them out")
        try:
            known[name].validate(arguments)
        except ValueError as error:
            raise wrong_field(f"{path}.arguments", str(error)) from None
        found[name] = arguments
    return found
