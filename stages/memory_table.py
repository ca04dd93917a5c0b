"""The memory of an engine by use, as JSON, as log fields and as terminal text.

All sizes are in bytes. `stages/backends/cache_size.py` decides the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..kernels.layout.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """The available memory in bytes, with the weights loaded and no cache allocated."""

    device: str  # "cpu", "cuda:0"
    total_bytes: int  # of the device
    limit_bytes: int  # upper bound of the device rows, in any case
    budget_bytes: int  # upper bound of the device rows if the engine chooses the cache size
    cache_cap_bytes: int | None = None  # upper bound of the cache alone, likewise; None: no bound of its own
    host_free_bytes: int | None = None  # free host memory beside a GPU; None: the device is the host
    limited_by: str = ""  # the limit that determines the free memory of a CPU, if one does

    @property
    def is_host(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.host_free_bytes is None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One use of memory."""

    name: str
    num_bytes: int
    what: str  # shown in the table: how many of what
    place: Literal["device", "host"] = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """All uses of memory, and the capacity of the KV cache.

    On a CPU no row covers the memory of Python, torch and their libraries: it is in use before sizes are chosen.
    """

    machine: MachineMemory
    rows: tuple[MemoryUse, ...]
    max_model_len: int  # tokens
    num_blocks: int  # of the KV cache; of kind 0 with a layout
    block_size: int  # tokens
    bytes_per_block: int  # of all layers
    layout: KVLayout | None = None  # of a cache in which windows free memory; None: all layers keep all tokens

    @property
    def total_bytes(self) -> int:
        """Sum of the device rows; on a CPU, of all rows."""
        return sum(row.num_bytes for row in self.rows if row.place == "device")

    @property
    def host_bytes(self) -> int:
        """Sum of the host rows beside a GPU; 0 on a CPU."""
        return sum(row.num_bytes for row in self.rows if row.place == "host")

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds, with a layout in sequences of `max_model_len`."""
        if self.layout is not None:
            return self.layout.num_tokens_at(self.max_model_len)
        return self.num_blocks * self.block_size

    @property
    def num_longest(self) -> int:
        """Sequences of `max_model_len` tokens that the cache holds at once."""
        if self.layout is not None:
            return self.layout.num_at_once(self.max_model_len)
        return self.num_blocks // -(-self.max_model_len // self.block_size)

    def row(self, name: str) -> MemoryUse:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def with_row(self, name: str, num_bytes: int, what: str) -> MemoryTable:
        """A copy with another size and description in that row."""
        rows = (replace(row, num_bytes=num_bytes, what=what) if row.name == name else row for row in self.rows)
        return replace(self, rows=tuple(rows))

    def to_json(self) -> dict[str, Any]:
        """The table as plain data for JSON."""
        return {
            **self._totals(),
            "rows": [
                {"name": row.name, "bytes": row.num_bytes, "place": row.place, "what": row.what} for row in self.rows
            ],
            "kv_cache": {
                "block_size": self.block_size,
                "bytes_per_block": self.bytes_per_block,
                **self._sizes(),
                **({} if self.layout is None else _to_json(self.layout)),
            },
        }

    def to_event(self) -> dict[str, int | str]:
        """The fields of its log line."""
        return {
            **self._totals(),
            **{f"{row.name}_bytes": row.num_bytes for row in self.rows},
            **self._sizes(),
        }

    def _totals(self) -> dict[str, int | str]:
        return {
            "device": self.machine.device,
            "device_bytes": self.machine.total_bytes,
            "budget_bytes": self.machine.budget_bytes,
            "total_bytes": self.total_bytes,
            "host_bytes": self.host_bytes,
        }

    def _sizes(self) -> dict[str, int]:
        return {
            "num_blocks": self.num_blocks,
            "num_tokens": self.num_tokens,
            "num_longest_sequences": self.num_longest,
        }

    def to_text(self) -> list[str]:
        """Lines for a terminal."""
        machine = self.machine
        budget = f"of {human(machine.budget_bytes)} for this engine; {machine.device} has {human(machine.total_bytes)}"
        budget += f", {machine.limited_by}" if machine.limited_by else ""
        lines = [_line(row.name, row.num_bytes, row.what) for row in self.rows if row.place == "device"]
        lines.append(_line("total", self.total_bytes, budget))
        if machine.host_free_bytes is not None:
            lines += [_line(row.name, row.num_bytes, row.what) for row in self.rows if row.place == "host"]
            lines.append(_line("host total", self.host_bytes, f"of {human(machine.host_free_bytes)} free"))
        return lines


def _to_json(layout: KVLayout) -> dict[str, Any]:
    return {
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "kinds": [
            {
                "name": kind.name,
                "window": kind.window,
                "num_layers": len(kind.layers),
                "bytes_per_block": kind.block_bytes,
                "blocks_per_slab": size,
            }
            for kind, size in zip(layout.kinds, layout.blocks_per_slab, strict=True)
        ],
    }


def _line(name: str, num_bytes: int, what: str) -> str:
    return f"{name:<12}{human(num_bytes):>10}  {what}"


def human(num_bytes: int) -> str:
    """A size with three significant digits and a unit."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
