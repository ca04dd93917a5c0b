"""The LoRA adapters on the dashboard: which are in device slots, who waits, and what each request has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import RequestOutbox
    from ...stages.schedule.adapter_lines import AdapterLines

MAX_SLOTS = 64  # listed
SHORT = 12  # characters of a digest that has no name


def adapter_slots(lines: AdapterLines | None, names: Mapping[str, str]) -> dict[str, Any]:
    """The part of the overview about adapters, by their names; digests where they have none. {} if none are served."""
    if lines is None:
        return {}
    slots = lines.slots.slots
    rows = [
        {
            "slot": slot.number,
            "state": slot.state.value,
            "adapter": _name(names, slot.digest) if slot.digest else None,
            "num_running": slot.num_running,
        }
        for slot in slots[:MAX_SLOTS]
    ]
    waiting = sorted((-lines.num_waiting(each), _name(names, each)) for each in lines.digests())
    most = [{"adapter": name, "num_waiting": -num} for num, name in waiting[:MAX_SLOTS]]
    figures = {"num_slots": len(slots), "num_waiting": len(lines), "num_owed": lines.num_owed}
    return {"adapters": figures | {"num_loads": lines.slots.num_loads, "slots": rows, "waiting": most}}


def names_of(engine: Engine) -> dict[str, str]:
    """The names of loaded adapters by digest; the first one where several have the same."""
    gate = engine.adapters
    return {} if gate is None else {digest: names[0] for digest, names in gate.registry.names_by_digest().items()}


def adapter_of(engine: Engine, outbox: RequestOutbox, state: str) -> dict[str, Any]:
    """The adapter of a request, and whether it waits for it: until it is read, or for a device slot."""
    ref, gate = outbox.request.adapter, engine.adapters
    if ref is None or gate is None:
        return {}
    digest = gate.digest_of(outbox.request_id)
    if digest is None:
        return {"adapter": ref.name, "waits_for_adapter": state == "arriving"}
    lines = engine.scheduler.adapters
    slot = None if lines is None else lines.slots.of(digest)
    is_there = slot is not None and slot.state.value == "resident"
    return {"adapter": ref.name, "waits_for_adapter": state in ("waiting", "swapped") and not is_there}


def _name(names: Mapping[str, str], digest: str) -> str:
    return names.get(digest, digest[:SHORT])
