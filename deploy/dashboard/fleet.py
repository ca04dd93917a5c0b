"""Topic `fleet`: the engine processes and fronts of a server, and why requests went where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ..api.service import Service

MAX_CHOICES = 40  # shown


def fleet(engine: Engine, service: Service, may_see: Callable[[str], bool]) -> dict[str, Any]:
    """Engines, fronts, and the last choices of an engine for requests that the viewer may see, the newest first."""
    fronts = service.fronts
    choices = [choice for choice in engine.choices if may_see(choice["request_id"])][:MAX_CHOICES]
    live = service.live
    return {
        "policy": engine.config.routing_policy,
        "engines": engine.engines,
        "fronts": [] if fronts is None else [dict(state) for state in fronts.states],
        "front": None if fronts is None else fronts.number,
        "choices": [choice | {"is_live": choice["request_id"] in live} for choice in choices],
    }
