"""The LoRA adapters on the dashboard: which are in device slots, who waits, and what each request has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.engine.engine_status import AdapterSlotsStatus, EngineStatus
    from ...stages.exit.outboxes import RequestOutbox

MAX_SLOTS = 64  # listed
SHORT = 12  # characters of a digest that has no name


def adapter_slots(adapters: AdapterSlotsStatus | None, names: Mapping[str, str]) -> dict[str, Any]:
    """The part of the overview about adapters, by their names; digests where they have none. {} if none are served."""
    if adapters is None:
        return {}
    rows = [
        {
            "slot": number,
            "state": state,
            "adapter": _name(names, digest) if digest else None,
            "num_running": num_running,
        }
        for number, (state, digest, num_running) in enumerate(adapters.slots[:MAX_SLOTS], 1)
    ]
    waiting = sorted((-count, _name(names, digest)) for digest, count in adapters.waiting.items())
    most = [{"adapter": name, "num_waiting": -num} for num, name in waiting[:MAX_SLOTS]]
    figures = {"num_slots": len(adapters.slots), "num_waiting": adapters.num_waiting, "num_owed": adapters.num_owed}
    return {"adapters": figures | {"num_loads": adapters.num_loads, "slots": rows, "waiting": most}}


def names_of(engine: Engine) -> dict[str, str]:
    """The names of loaded adapters by digest; the first one where several have the same."""
    registry = engine.adapters
    return {} if registry is None else {digest: names[0] for digest, names in registry.names_by_digest().items()}


def adapter_of(status: EngineStatus, outbox: RequestOutbox, state: str) -> dict[str, Any]:
    """The adapter of a request, and whether it waits for it: until it is read, or for a device slot."""
    ref, adapters = outbox.request.adapter, status.front.adapters
    if ref is None or adapters is None:
        return {}
    digest = adapters.digests.get(outbox.request_id)
    if digest is None:
        return {"adapter": ref.name, "waits_for_adapter": state == "arriving"}
    slots = None if status.core is None else status.core.scheduler.adapters
    is_there = slots is not None and slots.state_of(digest) == "resident"
    return {"adapter": ref.name, "waits_for_adapter": state in ("waiting", "swapped") and not is_there}


def _name(names: Mapping[str, str], digest: str) -> str:
    return names.get(digest, digest[:SHORT])
