"""The grant checker: tracks the owner of each block, and the steps that may still use it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...messages import NO_INTS, BlockCopy, Direction, Ints, StepGrant


class GrantChecker:
    """Checks each grant when it is issued: block owners, positions and quarantine (I13).

    With several lanes it also checks that no row is in a step while another one that gives it a token is in flight.

    `announce` runs on the event loop, `complete` on the thread that ends the step. Errors go into `violations`.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        num_slots: int,
        blocks_per_slot: int,
        violations: list[str],
        num_lanes: int = 1,
    ) -> None:
        self._num_lanes = num_lanes
        self._awaited: dict[int, NDArray[np.bool_]] = {}  # by step in flight: slots that get a token
        self._num_blocks, self._block_size, self._num_slots = num_blocks, block_size, num_slots
        self._num_host_blocks = num_host_blocks
        self._violations = violations
        self._tables = np.full((num_slots, blocks_per_slot), -1, np.int32)
        self._num_placed = np.zeros(num_slots, np.int32)  # entries of the table that count
        self._num_computed = np.zeros(num_slots, np.int32)
        self._num_drafted = np.zeros(num_slots, np.int32)  # tokens after those, in the last step
        self._owner = np.full(num_blocks, -1, np.int32)  # slot that may write it
        # By step: blocks that it may read or write, on the device and on the host.
        self._in_flight: dict[int, tuple[NDArray[np.bool_], NDArray[np.bool_]]] = {}
        self._last_step = -1

    def announce(self, grant: StepGrant) -> tuple[Ints, Ints]:
        """Checks the grant and records its blocks.

        Returns its new blocks, on the device and on the host. Invalid block ids are left out, and so are blocks from
        the prefix cache, which no step may write.
        """
        if grant.step != self._last_step + 1 and self._last_step >= 0:
            self._complain(grant, f"follows step {self._last_step}: steps have no gaps")
        self._last_step = grant.step
        num_found = np.zeros(self._num_slots, np.int32)  # blocks
        for started in grant.started:
            self._num_placed[started.slot] = 0
            self._num_computed[started.slot] = started.num_cached
            self._num_drafted[started.slot] = 0
            num_found[started.slot] = started.num_shared // self._block_size
        is_block = (grant.table_blocks >= 0) & (grant.table_blocks < self._num_blocks)
        if not is_block.all():
            self._complain(grant, f"names blocks {grant.table_blocks[~is_block].tolist()} of {self._num_blocks}")
        blocks, slots, places = grant.table_blocks[is_block], grant.table_slots[is_block], grant.table_places[is_block]
        self._tables[slots, places] = blocks
        np.maximum.at(self._num_placed, slots, places + 1)
        is_new = places >= num_found[slots]
        blocks, slots = blocks[is_new], slots[is_new]
        if len(np.unique(blocks)) != len(blocks):
            self._complain(grant, f"gives a block twice: {sorted(blocks.tolist())}")
        on_host = [copy.destinations for copy in grant.copies if copy.direction is Direction.OUT]
        host_blocks = np.concatenate([NO_INTS, *on_host])
        for step, (used, host_used) in list(self._in_flight.items()):  # a copy: steps end on the device thread
            if used[blocks].any():
                self._complain(grant, f"reuses blocks {blocks[used[blocks]].tolist()}, which step {step} may still use")
            if host_used[host_blocks].any():
                self._complain(grant, f"reuses host blocks {host_blocks.tolist()}, some of which step {step} may use")
        self._owner[blocks] = slots
        used, host_used = np.zeros(self._num_blocks, np.bool_), np.zeros(self._num_host_blocks, np.bool_)
        self._check_rows(grant, used)
        self._check_copies(grant, used, host_used, blocks)
        self._in_flight[grant.step] = used, host_used
        if self._num_lanes > 1:
            self._check_lanes(grant)
        return blocks, host_blocks

    def _check_copies(self, grant: StepGrant, used: NDArray[np.bool_], host_used: NDArray[np.bool_], new: Ints) -> None:
        host_written = np.zeros_like(host_used)
        for copy in grant.copies:
            if copy.direction is Direction.FORK:
                self._check_fork(grant, copy, used, new)
                continue
            is_out = copy.direction is Direction.OUT
            on_device, on_host = (copy.sources, copy.destinations) if is_out else (copy.destinations, copy.sources)
            if host_written[on_host].any() or (is_out and host_used[on_host].any()):
                self._complain(grant, f"copies to host blocks {on_host.tolist()}, which other copies use")
            host_written[on_host] |= is_out
            if not is_out and not np.isin(on_device, new).all():
                self._complain(grant, f"copies into blocks {on_device.tolist()}, not all of which are new")
            used[on_device] = host_used[on_host] = True

    def _check_fork(self, grant: StepGrant, copy: BlockCopy, used: NDArray[np.bool_], new: Ints) -> None:
        if not np.isin(copy.destinations, new).all():
            self._complain(grant, f"copies into blocks {copy.destinations.tolist()}, not all of which are new")
        if np.isin(copy.sources, new).any():
            self._complain(grant, f"copies from blocks {copy.sources.tolist()}, some of which it gives away")
        used[copy.sources] = used[copy.destinations] = True

    def _check_rows(self, grant: StepGrant, used: NDArray[np.bool_]) -> None:
        if len(np.unique(grant.slots)) != len(grant.slots):
            self._complain(grant, f"has two rows for one slot: {sorted(grant.slots.tolist())}")
        ends = grant.starts + grant.num_tokens
        if (grant.num_tokens < 1).any():
            self._complain(grant, f"has a row of no tokens: {grant.num_tokens.tolist()}")
        due = self._num_computed[grant.slots]
        latest = due + self._num_drafted[grant.slots]  # if all drafts were accepted
        if (grant.starts < due).any() or (grant.starts > latest).any():
            self._complain(grant, f"starts at {grant.starts.tolist()}, not at {due.tolist()} to {latest.tolist()}")
        if (ends > self._num_placed[grant.slots] * self._block_size).any():
            self._complain(grant, f"writes up to {ends.tolist()} in {self._num_placed[grant.slots].tolist()} blocks")
        for slot, start, end in zip(grant.slots.tolist(), grant.starts.tolist(), ends.tolist(), strict=True):
            table = self._tables[slot, : min(-(-end // self._block_size), self._tables.shape[1])]
            written = table[start // self._block_size :]
            if (self._owner[written] != slot).any():
                self._complain(grant, f"writes blocks {written.tolist()} of slot {slot}, which others own")
            used[table] = True
        self._num_computed[grant.slots] = grant.starts + grant.num_certain
        self._num_drafted[grant.slots] = ends - self._num_computed[grant.slots]

    def _check_lanes(self, grant: StepGrant) -> None:
        for step, awaited in list(self._awaited.items()):
            if awaited[grant.slots].any():
                rows = grant.slots[awaited[grant.slots]].tolist()
                self._complain(grant, f"has rows of slots {rows}, whose tokens step {step} in flight chooses")
        awaited = np.zeros(self._num_slots, np.bool_)
        awaited[grant.slots[grant.is_sampled]] = True
        self._awaited[grant.step] = awaited

    def complete(self, step: int) -> None:
        """Records that `step` has ended."""
        self._in_flight.pop(step, None)
        self._awaited.pop(step, None)

    def _complain(self, grant: StepGrant, what: str) -> None:
        self._violations.append(f"step {grant.step} {what}")
