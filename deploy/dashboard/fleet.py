"""Topic `fleet`: engine processes and fronts of a server, why requests went where they are, and what is warm where."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ..api.service import Service

MAX_CHOICES = 40  # shown
MIN_S, SHARE = 2.0, 0.004  # between two readings of prefixes, and the maximum share of time for them


class WarmPrefixes:
    """Which engine is warm for which prefix: the last reading, shared by all viewers."""

    def __init__(self) -> None:
        self._value: list[dict[str, Any]] = []
        self._due_s = 0.0

    def of(self, engine: Engine) -> list[dict[str, Any]]:
        """Reads it again if that is due: it may take milliseconds."""
        began_s = time.monotonic()
        if began_s >= self._due_s:
            self._value = engine.warm_prefixes()
            now_s = time.monotonic()
            self._due_s = now_s + max(MIN_S, (now_s - began_s) / SHARE)
        return self._value


def fleet(engine: Engine, service: Service, warm: WarmPrefixes, may_see: Callable[[str], bool]) -> dict[str, Any]:
    """Engines, fronts, and the last choices of an engine for requests that the viewer may see, the newest first."""
    fronts = service.fronts
    choices = [choice for choice in engine.choices if may_see(choice["request_id"])][:MAX_CHOICES]
    live = service.live
    return {
        "policy": engine.config.routing_policy,
        "engines": engine.engines,
        "traffic": None if engine.traffic is None else engine.traffic.to_json(),
        "fronts": [] if fronts is None else [dict(state) for state in fronts.states],
        "front": None if fronts is None else fronts.number,
        "prefixes": warm.of(engine),
        "choices": [choice | {"is_live": choice["request_id"] in live} for choice in choices],
    }
