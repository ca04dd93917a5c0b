"""Steps that are decided on before the device thread comes to them: all that it and the event loop share.

event loop     offer(5)      offer(6): follows 5, tables written        offer(7): ...
                  |             |
device thread     forward(5): take, begin, wait for 5 .... forward(6): take, wait for 6 ....
step thread                   [ step 5             ][ step 6              ][ step 7
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....kernels.native.slot_step import StepChain
from ...array_checks import num_true
from ...device.device import MOST_IN_FLIGHT
from ...device.step_result import TokenChoice
from ...messages import Ints, Started, StepGrant
from ...params import has_plain_choice

NEVER = -2  # a step; none follows it


@dataclass(frozen=True, slots=True)
class OfferedStep:
    """What was decided on a step when it was offered."""

    step: int
    is_greedy: bool = False  # all its sampled rows take the likeliest token: no logits are needed
    is_link: bool = False  # of a chain: each row is a decode row that needs nothing but logits
    is_handed_over: bool = False  # to the library, which starts it as soon as the previous link ends


NOT_OFFERED = OfferedStep(NEVER)


class StepAhead:
    """Decides, when a step is offered, how its tokens are chosen, and hands links of a chain to the library.

    No Python runs between two links. With more than two steps in flight the loop is further ahead, and links are
    started one by one.

    Two threads use it, without a lock. `offer` alone, on the event loop, writes; a step is offered before its `forward`
    is submitted, so the device thread's `take`, `finish` and `drain` find it written. Its entry in the ring is written
    again MOST_IN_FLIGHT steps later, when it is long done. The slots' block tables belong to the device thread; `offer`
    may still write them, as a step is handed over only directly after a running link that has all of its slots. So its
    sequences were started before, and the entries it writes lie beyond those that the running link reads.
    """

    def __init__(self, num_slots: int, tables: Ints, grow_positions: Callable[[StepGrant], object]) -> None:
        """`tables` [K, num_slots, M] block ids of each kind.

        `grow_positions` is called on the loop before a step with new blocks.
        """
        self.num_handed_over = 0  # steps
        self._tables, self._grow_positions = tables, grow_positions
        self._chain: StepChain | None = None
        self._chooses = False
        self._is_plain = np.zeros(num_slots, np.bool_)  # slots whose choice needs nothing but logits
        self._is_greedy = np.zeros(num_slots, np.bool_)  # plain slots that take the likeliest token
        self._last_link = np.full(num_slots, NEVER, np.int64)  # the last link that each slot was in
        self._ring = [NOT_OFFERED] * MOST_IN_FLIGHT

    def use(self, chain: StepChain | None, *, chooses: bool) -> None:
        """Sets, before the first step, how links are run (None: there are none) and whether tokens are chosen here."""
        self._chain, self._chooses = chain, chooses

    # -- on the event loop

    def offer(self, grant: StepGrant) -> None:
        """Decides on a step, and hands it over if it can follow the one before."""
        for started in grant.started:
            self._is_plain[started.slot] = is_plain = _is_plain(started)
            self._is_greedy[started.slot] = is_plain and started.params.is_greedy
        if not self._chooses:
            return
        is_greedy, is_link = self._is_greedy_step(grant), self._chain is not None and self._is_link(grant)
        if is_greedy or is_link:
            is_handed_over = is_link and self._hand_over(grant)
            offered = OfferedStep(grant.step, is_greedy, is_link, is_handed_over)
            self._ring[grant.step % MOST_IN_FLIGHT] = offered

    def _hand_over(self, grant: StepGrant) -> bool:
        assert self._chain is not None
        step, slots = grant.step, grant.slots
        follows = num_true(self._last_link[slots] == step - 1) == len(slots)
        if follows and (len(grant.table_slots) or grant.more_tables):
            self._grow_positions(grant)
            self._tables[0, grant.table_slots, grant.table_places] = grant.table_blocks
            for entries in grant.more_tables:  # those of a window may come alone, where the others were reserved
                self._tables[entries.kind, entries.slots, entries.places] = entries.blocks
        self._last_link[slots] = step
        is_handed_over = follows and self._chain.follow(step, slots, grant.starts)
        self.num_handed_over += is_handed_over
        return is_handed_over

    def _is_link(self, grant: StepGrant) -> bool:
        if not grant.is_decode or grant.drafts is not None or not len(grant.slots):
            return False
        if grant.started or grant.copies or grant.adapter_loads:
            return False
        return num_true(grant.is_sampled) == num_true(self._is_plain[grant.slots]) == len(grant.slots)

    def _is_greedy_step(self, grant: StepGrant) -> bool:
        slots = grant.slots[grant.is_sampled]
        return grant.drafts is None and 0 < len(slots) == num_true(self._is_greedy[slots])

    # -- on the device thread

    def take(self, step: int) -> OfferedStep:
        """What was decided on `step`; `NOT_OFFERED` if nothing was."""
        offered = self._ring[step % MOST_IN_FLIGHT]
        return offered if offered.step == step else NOT_OFFERED

    def finish(self, grant: StepGrant, offered: OfferedStep) -> TokenChoice | None:
        """Runs a link, or waits for it if it was handed over.

        None if the step is no link, or a row reads a token of its prompt; then nothing was done.
        """
        if not offered.is_link or self._chain is None:
            return None
        if not offered.is_handed_over:
            self._chain.begin(grant.step, grant.slots, grant.starts)
        chosen = self._chain.wait(grant.step, len(grant.slots))
        return None if chosen is None else TokenChoice(*chosen)

    def drain(self) -> None:
        """Waits until no link runs, void ones included."""
        if self._chain is not None:
            self._chain.drain()


def _is_plain(started: Started) -> bool:
    return started.pooling is None and started.params.logprobs is None and has_plain_choice(started.params)
