"""The memory of recurrent states: by slot, of cached prefixes behind them, and of swapped sequences on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How many states of recurrent layers there is memory for. All states of a model have one size."""

    state_bytes: int  # of one sequence, all layers
    num_slots: int  # on the device: the state of the sequence in each slot
    num_on_host: int = 0  # of swapped sequences; 0: none is swapped
    num_snapshots: int = 0  # on the device, behind those of slots; 0: no cached prefix has one, so none is found
    num_blocks: float = 0.0  # blocks of keys and values that take as many bytes as a state, to weigh its copies

    def with_host(self, pool_bytes: int, block_bytes: int) -> tuple[StateLayout, int]:
        """Divides a host pool between states and blocks of `block_bytes`: (the layout, blocks).

        States take at most half of it. A sequence is swapped with both or not at all, so without room for a state
        there are no blocks.
        """
        num_on_host = min(self.num_slots, pool_bytes // 2 // self.state_bytes)
        num_blocks = (pool_bytes - num_on_host * self.state_bytes) // block_bytes if num_on_host else 0
        return replace(self, num_on_host=num_on_host, num_blocks=self.state_bytes / block_bytes), num_blocks
