"""Which adapter is in which device slot: loading, resident, or draining for another one.

Plain code behind the schedule stage, without a clock. `adapter_lines.py` holds the sequences that wait for a slot.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from .pass_counts import Key


class AdapterState(enum.Enum):
    """The state of a device slot of an adapter."""

    EMPTY = "empty"
    LOADING = "loading"  # a plan loads it, or will; no row may use it
    RESIDENT = "resident"  # rows may use it
    DRAINING = "draining"  # its rows run on, no further ones join, and then it is loaded for another adapter


TRANSITIONS: dict[AdapterState, frozenset[AdapterState]] = {
    AdapterState.EMPTY: frozenset({AdapterState.LOADING}),
    AdapterState.LOADING: frozenset({AdapterState.RESIDENT, AdapterState.EMPTY}),
    AdapterState.RESIDENT: frozenset({AdapterState.LOADING, AdapterState.DRAINING}),
    AdapterState.DRAINING: frozenset({AdapterState.LOADING, AdapterState.RESIDENT}),
}


@dataclass(slots=True, eq=False)
class AdapterSlot:
    """One slot. `number` counts from 1, as 0 stands for the base model."""

    number: int
    state: AdapterState = AdapterState.EMPTY
    digest: str = ""  # of the adapter that it holds or loads
    load_step: int | None = None  # the granted step that loads it; None: in no granted plan
    num_running: int = 0  # sequences that hold it
    last_used_step: int = -1  # the last planned step of a sequence that has left it
    # sequences back in the queue since the adapter is resident, with their places: it is kept until they have run
    promised: dict[int, Key] = field(default_factory=dict)

    def move(self, state: AdapterState) -> None:
        """Changes the state. Asserts that `TRANSITIONS` allows it."""
        assert state in TRANSITIONS[self.state], f"adapter slot {self.number} cannot go {self.state} -> {state}"
        self.state = state

    def is_unread(self, completed_step: int, last_granted: int) -> bool:
        """Whether no sequence holds it, and no step in flight may read it."""
        return not self.num_running and min(self.last_used_step, last_granted) <= completed_step


class AdapterSlots:
    """The device slots of adapters. A slot is overwritten only when no step in flight may read it.

    A load becomes part of the next plan. Rows may use the slot once the step that loads it is done; if that step or
    its plan is void, a later plan loads it again. A load that fails leaves the slot empty.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = [AdapterSlot(number) for number in range(1, num_slots + 1)]
        self.num_loads = 0
        self.pinned: frozenset[str] = frozenset()  # adapters that keep their slots
        self.on_replaced: Callable[[], object] | None = None  # called when an adapter has lost its slot
        self._by_digest: dict[str, AdapterSlot] = {}
        self._loading: list[AdapterSlot] = []
        self._draining: list[AdapterSlot] = []

    @property
    def num_resident(self) -> int:
        """Slots whose adapter rows may use, draining ones included."""
        return sum(slot.state in (AdapterState.RESIDENT, AdapterState.DRAINING) for slot in self.slots)

    @property
    def num_draining(self) -> int:
        return len(self._draining)

    def running_digests(self) -> list[str]:
        """The adapters of running sequences."""
        return [slot.digest for slot in self.slots if slot.num_running]

    def of(self, digest: str) -> AdapterSlot | None:
        """The slot that holds or loads an adapter."""
        return self._by_digest.get(digest)

    def pin(self, digests: Iterable[str]) -> None:
        """Lets these adapters, and no others, keep a slot that they have or get. One slot is for all others."""
        self.pinned = frozenset(sorted(digests)[: len(self.slots) - 1])

    def may_join(self, digest: str) -> bool:
        """Whether a sequence of that adapter may run now."""
        slot = self._by_digest.get(digest)
        return slot is not None and slot.state is AdapterState.RESIDENT

    # -- sequences

    def join(self, digest: str, sequence_id: int) -> int:
        """A sequence of a resident adapter begins to run. Returns the number of the slot."""
        slot = self._by_digest[digest]
        assert slot.state is AdapterState.RESIDENT, f"adapter slot {slot.number} is {slot.state}: no row may join it"
        slot.num_running += 1
        slot.promised.pop(sequence_id, None)
        return slot.number

    def leave(self, number: int, last_step: int) -> None:
        """A sequence stops running; its last planned step was `last_step`."""
        slot = self.slots[number - 1]
        slot.num_running -= 1
        slot.last_used_step = max(slot.last_used_step, last_step)

    def promise(self, digest: str, keys: Iterable[Key]) -> None:
        """Keeps a resident adapter until the sequences of these places have run, or do not want to any more."""
        self._by_digest[digest].promised.update((key[1], key) for key in keys)

    def break_promises(self, behind: Key) -> bool:
        """Keeps no adapter any more for sequences behind a place; returns whether one was kept for any."""
        is_broken = False
        for slot in self.slots:
            for sequence_id in [each for each, key in slot.promised.items() if key > behind]:
                del slot.promised[sequence_id]
                is_broken = True
        return is_broken

    def forget(self, digest: str, sequence_id: int) -> None:
        """A sequence in the queue ended, was parked or waits for the adapter again."""
        slot = self._by_digest.get(digest)
        if slot is not None:
            slot.promised.pop(sequence_id, None)

    # -- loads

    def find_unused(self, completed_step: int, last_granted: int) -> AdapterSlot | None:
        """A slot that may be loaded now: drained, else empty, else idle for the most steps; None if there is none."""
        found = None
        for slot in self.slots:
            if slot.state is AdapterState.LOADING or not slot.is_unread(completed_step, last_granted):
                continue
            if slot.state is AdapterState.RESIDENT and slot.digest in self.pinned:
                continue
            if slot.state is AdapterState.DRAINING:
                return slot
            if slot.state is AdapterState.EMPTY:
                found = slot if found is None or found.state is not AdapterState.EMPTY else found
            elif not slot.promised and (found is None or _is_older(slot, found)):
                found = slot
        return found

    def load(self, slot: AdapterSlot, digest: str) -> None:
        """Loads an adapter into a slot that `find_unused` returned, with the next plan."""
        assert digest not in self._by_digest, "the adapter has a slot already"
        if self._by_digest.pop(slot.digest, None) is not None and self.on_replaced is not None:
            self.on_replaced()
        if slot.state is AdapterState.DRAINING:
            self._draining.remove(slot)
        slot.move(AdapterState.LOADING)
        slot.digest, slot.load_step = digest, None
        slot.promised.clear()
        self._by_digest[digest] = slot
        self._loading.append(slot)

    @property
    def has_loads(self) -> bool:
        """Whether a load is in no granted plan."""
        return any(slot.load_step is None for slot in self._loading)

    def loads(self) -> tuple[tuple[int, str], ...]:
        """(slot, digest) of the loads that are in no granted plan."""
        if not self._loading:
            return ()
        return tuple((slot.number, slot.digest) for slot in self._loading if slot.load_step is None)

    def note_granted(self, loads: Iterable[tuple[int, str]], step: int) -> None:
        """The plan with these loads was granted as `step`."""
        for number, _ in loads:
            self.slots[number - 1].load_step = step

    def note_done(self, step: int) -> None:
        """A step is done: the adapters that it loaded are resident."""
        for slot in [slot for slot in self._loading if slot.load_step == step]:
            slot.move(AdapterState.RESIDENT)
            slot.load_step = None
            self._loading.remove(slot)
            self.num_loads += 1

    def note_failed(self, step: int, digests: Iterable[str]) -> None:
        """A step is done, and could not load these adapters. Call it before `note_done`."""
        for digest in digests:
            slot = self._by_digest.get(digest)
            if slot is not None and slot.load_step == step:
                self._clear(slot)

    def note_void(self, step: int, wanted: Container[str]) -> None:
        """A granted step was void: what it was to load is loaded again, if it is among those `wanted` by now."""
        for slot in [slot for slot in self._loading if slot.load_step == step]:
            if slot.digest in wanted:
                slot.load_step = None
            else:
                self._clear(slot)

    def _clear(self, slot: AdapterSlot) -> None:
        """Ends a load whose adapter is not on the device."""
        slot.move(AdapterState.EMPTY)
        self._loading.remove(slot)
        del self._by_digest[slot.digest]
        slot.digest, slot.load_step = "", None
        if self.on_replaced is not None:
            self.on_replaced()

    # -- drains

    def find_to_drain(self, num_left: Mapping[int, int]) -> AdapterSlot | None:
        """The resident slot whose rows have the fewest tokens left, by its number; None if none may be drained."""
        resident = (slot for slot in self.slots if slot.state is AdapterState.RESIDENT)
        able = [slot for slot in resident if not slot.promised and slot.digest not in self.pinned]
        return min(able, key=lambda slot: (num_left.get(slot.number, 0), slot.number), default=None)

    def drain(self, slot: AdapterSlot) -> None:
        """Lets no further sequence join; `find_unused` returns the slot when its rows are done."""
        slot.move(AdapterState.DRAINING)
        slot.promised.clear()
        self._draining.append(slot)

    def stop_drain(self, slot: AdapterSlot) -> None:
        """Lets sequences join a draining slot again."""
        slot.move(AdapterState.RESIDENT)
        self._draining.remove(slot)

    def stop_drains(self, num_kept: int) -> None:
        """Lets sequences join again in all draining slots but the first `num_kept`."""
        for slot in self._draining[num_kept:]:
            self.stop_drain(slot)

    def check(self) -> None:
        """Raises AssertionError unless the slots agree with each other."""
        held = {slot.digest: slot for slot in self.slots if slot.state is not AdapterState.EMPTY}
        assert held == self._by_digest, "an adapter is in two slots, or in none that it is found in"
        loading = [slot for slot in self.slots if slot.state is AdapterState.LOADING]
        assert {slot.number for slot in loading} == {slot.number for slot in self._loading}
        assert all(not slot.num_running and not slot.promised for slot in loading), "a loading slot is in use"
        assert [slot for slot in self.slots if slot.state is AdapterState.DRAINING] == sorted(
            self._draining, key=lambda slot: slot.number
        )
        assert all(slot.num_running >= 0 for slot in self.slots)


def _is_older(slot: AdapterSlot, found: AdapterSlot) -> bool:
    return found.state is AdapterState.RESIDENT and slot.last_used_step < found.last_used_step
