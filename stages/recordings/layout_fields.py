"""Memory in the header of a recording: the layout of a cache of several kinds, and of recurrent states."""

from __future__ import annotations

from typing import Any, get_args

from ...kernels.layout.kv_layout import KindName, KVKind, KVLayout
from ...kernels.layout.state_layout import StateLayout
from .field_values import InvalidValue, MessageFields, shown

MAX_KINDS, MAX_LAYERS = 16, 4096  # of a layout
MAX_BYTES = 2**40  # of a block or a slab


def layout_fields(layout: KVLayout) -> dict[str, Any]:
    """The fields of a layout."""
    kinds = [
        {
            "name": kind.name,
            "layers": list(kind.layers),
            "window": kind.window,
            "num_kv_heads": kind.num_kv_heads,
            "key_dim": kind.key_dim,
            "value_dim": kind.value_dim,
            "block_bytes": kind.block_bytes,
        }
        for kind in layout.kinds
    ]
    of_one = {"num_blocks": layout.num_blocks[0]} if len(kinds) == 1 else {}  # its last slab may be cut off
    return of_one | {
        "kinds": kinds,
        "block_size": layout.block_size,
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "blocks_per_slab": list(layout.blocks_per_slab),
    }


def read_layout(values: Any) -> KVLayout | None:
    """The layout in these fields; None: there are none. Raises `InvalidValue`."""
    if values is None:
        return None
    given = MessageFields("kv_layout", values if isinstance(values, dict) else {})
    read = given.values.get("kinds")
    if not isinstance(read, list) or not 1 <= len(read) <= MAX_KINDS:
        raise InvalidValue(f"kv_layout.kinds = {shown(read)}: must be 1 to {MAX_KINDS} kinds")
    kinds = tuple(_read_kind(each) for each in read)
    slab_bytes, num_slabs = given.whole("slab_bytes", 1, MAX_BYTES), given.whole("num_slabs", 1, 2**24)
    sizes = given.wholes("blocks_per_slab", 2**24, 1)
    if len(sizes) != len(kinds) or any(
        size * kind.block_bytes > slab_bytes for size, kind in zip(sizes, kinds, strict=True)
    ):
        raise InvalidValue(f"kv_layout.blocks_per_slab = {shown(sizes)}: must be as many of each kind as fit a slab")
    if max(sizes) * num_slabs > 2**24:
        raise InvalidValue(f"kv_layout: {num_slabs} slabs of {max(sizes)} blocks: must be at most {2**24} blocks")
    num_blocks = [num_slabs * size for size in sizes]
    if len(kinds) == 1:
        num_blocks = [given.whole("num_blocks", 1, num_blocks[0])]
    places = {layer: (k, place) for k, kind in enumerate(kinds) for place, layer in enumerate(kind.layers)}
    return KVLayout(
        kinds,
        given.whole("block_size", 1, 2**12),
        slab_bytes,
        num_slabs,
        tuple(sizes),
        tuple(num_blocks),
        tuple(places.get(layer) for layer in range(1 + max(places))),
    )


def _read_kind(values: Any) -> KVKind:
    given = MessageFields("kv_layout.kinds", values if isinstance(values, dict) else {})
    names: dict[Any, KindName] = {name: name for name in get_args(KindName)}
    name = given.text("name")
    if name not in names:
        raise InvalidValue(f"kv_layout.kinds.name = {shown(name)}: must be one of {', '.join(names)}")
    layers = given.wholes("layers", MAX_LAYERS)
    if not layers:
        raise InvalidValue("kv_layout.kinds.layers: must name a layer")
    heads, key_dim, value_dim = (given.whole(each, 1) for each in ("num_kv_heads", "key_dim", "value_dim"))
    window = None if given.values.get("window") is None else given.whole("window", 1)
    return KVKind(
        names[name], tuple(layers), window, heads, key_dim, value_dim, given.whole("block_bytes", 1, MAX_BYTES)
    )


def read_states(values: Any) -> StateLayout:
    """The layout of states in these fields. Raises `InvalidValue`."""
    given = MessageFields("engine.states", values if isinstance(values, dict) else {})
    return StateLayout(
        state_bytes=given.whole("state_bytes", 1, MAX_BYTES),
        num_slots=given.whole("num_slots", 1, 2**16),
        num_on_host=given.whole("num_on_host", 0, 2**16),
        num_snapshots=given.whole("num_snapshots", 0, 2**24),
        num_blocks=given.number("num_blocks"),
    )
