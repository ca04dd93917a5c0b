"""Decoding steps and sampling on slot columns, which the library reads directly: one at a time, or chained.

The caller owns the columns and changes them between steps. Each chained step may be queued while the one before it
runs, whose sampled tokens it reads; no Python code runs between the two. Arguments and results are in preallocated
memory, because to allocate an array costs more than the work that a decoding step has on it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layout.sampling_fields import DRAWS
from . import library
from .arrays import address, addresses
from .cache import NativeCache
from .model import NativeModel
from .shape import Array, Bools, Doubles, Floats, Ints, Longs

NO_IDS: Longs = np.zeros(0, np.int64)


class SlotStep:
    """Decoding steps: each row reads its slot's newest token."""

    def __init__(
        self,
        model: NativeModel,
        cache: NativeCache,
        *,
        last_tokens: Longs,  # [S] the newest token
        num_known: Longs,  # [S] leading tokens that belong to the prompt and are not in `last_tokens`
        tables: Ints,  # [S, M] block ids in token order; [K, S, M] for a cache of K kinds
        rope_offsets: Longs | None = None,  # [S] added to positions for rows of the rotary tables; None: not
        adapters: Longs | None = None,  # [S] adapter slot of each sequence, 0: none; None: no sequence has one
    ) -> None:
        model.check_cache(cache)
        self.model = model
        self._cache, self._last_tokens, self._num_known = cache, last_tokens, num_known
        self._tables = tables.reshape(len(cache.data_of), *tables.shape[-2:])
        self._rope_offsets, self._adapters = rope_offsets, adapters
        model.in_library.keep(*cache.parts, last_tokens, num_known, tables)
        model.in_library.keep(*(column for column in (rope_offsets, adapters) if column is not None))
        self._rows = self.rows()

    def rows(self) -> SlotStepRows:
        """Memory for the slots of a step."""
        num_slots, blocks_per_slot = self._tables.shape[1:]
        slots, starts = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
        columns = library.DecodeSlots(
            slots=address(slots, np.int64),
            starts=address(starts, np.int64),
            last_tokens=address(self._last_tokens, np.int64),
            num_known=address(self._num_known, np.int64),
            tables=addresses(self._tables, np.int32),
            num_slots=num_slots,
            blocks_per_slot=blocks_per_slot,
            cache=ctypes.addressof(self._cache.slabs),
            rope_offsets=None if self._rope_offsets is None else address(self._rope_offsets, np.int64),
            adapters=None if self._adapters is None else address(self._adapters, np.int64),
        )
        return SlotStepRows(slots, starts, ctypes.byref(columns))

    def step(self, slots: Longs, starts: Ints) -> Floats | None:
        """Runs a step of at most S slots and returns logits [L, V]. `starts` [L]: tokens of each slot in the cache.

        None if a row reads a token of its prompt; then nothing was done. Otherwise as `NativeModel.step`.
        """
        logits = self.model.logits_buffer(len(slots))
        rows, count = self._rows.of(slots, starts)
        return logits if self.model.decode(rows, count, _place_of(logits), None, None) else None

    def likeliest(self, slots: Longs, starts: Ints) -> tuple[Longs, Bools] | None:
        """Like `step`, but returns argmax tokens and broken rows, [L] each, as `NativeChooser` does for greedy rows."""
        token_ids, is_broken = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.bool_)
        rows, count = self._rows.of(slots, starts)
        is_done = self.model.decode(rows, count, None, _place_of(token_ids), _place_of(is_broken))
        return (token_ids, is_broken) if is_done else None


class SlotStepRows:
    """Arguments of a step, in memory that each `of` overwrites. For one thread."""

    def __init__(self, slots: Longs, starts: Longs, rows: Any) -> None:
        self._slots, self._starts, self._rows = slots, starts, rows

    def of(self, slots: Longs, starts: Ints) -> tuple[Any, int]:
        """(reference to the `library.DecodeSlots`, number of rows)."""
        count = len(slots)
        self._slots[:count] = slots
        self._starts[:count] = starts
        return self._rows, count


class NativeChooser:
    """Samples tokens by inverse CDF in vocabulary order, from what masks and then the cuts keep.

    Ties with the last kept token are kept. The sampling parameters of the slots are in columns, [S] each.
    """

    def __init__(
        self,
        model: NativeModel,
        *,
        is_random: Bools,  # sampled; else argmax, the lowest id among ties
        draws: Doubles,  # [S, D] the numbers of `DRAWS` in `kernels/layout/sampling_fields.py`; temperatures above 0
        seeds: NDArray[np.uint64],  # determine the random number, with the token's absolute position
        num_prompt: Ints,  # tokens before the first generated one
    ) -> None:
        self._model = model
        columns: list[tuple[Array, type[np.generic]]] = [
            (is_random, np.bool_),
            (draws, np.float64),
            (seeds, np.uint64),
            (num_prompt, np.int32),
        ]
        assert draws.shape == (len(is_random), len(DRAWS)), f"draws of {draws.shape}"
        model.in_library.keep(*(column for column, _ in columns))
        self.slot_sampling = ctypes.byref(library.SlotSampling(*(address(column, dtype) for column, dtype in columns)))
        self._choices = library.SamplingRows()
        self._allocate_rows(len(is_random))

    def _allocate_rows(self, num_rows: int) -> None:
        self._slots, self._places = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._token_ids, self._is_broken = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.bool_)
        self._choices.slots, self._choices.positions = self._slots.ctypes.data, self._places.ctypes.data
        self._choices.token_ids, self._choices.is_broken = self._token_ids.ctypes.data, self._is_broken.ctypes.data

    def choose(
        self,
        logits: Floats,  # [L, V]
        slots: Longs,  # [L] slot of each row; may repeat
        places: Longs,  # [L] index of each row's token among the generated ones
        masks: NDArray[np.int32] | None = None,  # [M, W] at least V bits, lowest bit of a word first; 0: hidden
        mask_rows: Longs = NO_IDS,  # [L] mask of each row; negative: none
    ) -> tuple[Longs, Bools]:
        """(token ids, broken rows), [L] each. Overwrites the logits of rows with a mask.

        A row is broken if it has no finite maximum or a NaN; its token is 0. A row's token depends on that row only.
        """
        count, choices = len(slots), self._choices
        if count > len(self._slots):
            self._allocate_rows(count)
        self._slots[:count] = slots
        self._places[:count] = places
        assert logits.dtype.char == "f", f"logits of {logits.dtype}"
        choices.logits = _place_of(logits)
        choices.num_rows, choices.vocab_size = logits.shape
        choices.masks = None
        if masks is not None and count:
            num_masks, choices.num_words = masks.shape
            assert 32 * masks.shape[1] >= logits.shape[1], f"{masks.shape} masks of {logits.shape[1]} tokens"
            assert len(mask_rows) == count and mask_rows.max() < num_masks, f"rows {mask_rows} of {num_masks} masks"
            choices.masks, choices.mask_rows = address(masks, np.int32), address(mask_rows, np.int64)
        assert len(logits) == count, f"{len(logits)} rows of logits for {count} slots"
        self._model.choose(self.slot_sampling, ctypes.byref(choices))
        return self._token_ids[:count].copy(), self._is_broken[:count].copy()


class StepChain:
    """Decoding steps with sampling, on the model's step thread. Step numbers rise, by one where a step follows another.

    Each row reads its slot's newest token and replaces it by the sampled one.
    """

    def __init__(self, decoding: SlotStep, chooser: NativeChooser) -> None:
        self._model, self._slot_sampling = decoding.model, chooser.slot_sampling
        assert self._model.step_thread_id, "a step chain needs a model with a step thread: num_threads > 1"
        self._begun, self._following = decoding.rows(), decoding.rows()

    def begin(self, number: int, slots: Longs, starts: Ints) -> None:
        """Queues a step of these slots behind everything that the model was asked to run.

        `starts` [L]: tokens of each slot in the cache. Raises MemoryError. Call on the thread that calls `wait`.
        """
        rows, count = self._begun.of(slots, starts)
        self._model.begin(number, rows, self._slot_sampling, count)

    def follow(self, number: int, slots: Longs, starts: Ints) -> bool:
        """Like `begin`, but directly behind step `number - 1`.

        Returns false and does nothing if that step has not begun, is over, or is not the last in the queue. Call on any
        one thread, which may be another than the one that waits.
        """
        rows, count = self._following.of(slots, starts)
        return self._model.follow(number, rows, self._slot_sampling, count)

    def wait(self, number: int, num_rows: int) -> tuple[Longs, Bools] | None:
        """Waits for a step: (token ids, broken rows), [L] each. Call once per step.

        None if a row reads a token of its prompt, in this step or the one that it follows; then nothing was done.
        Raises as `NativeModel.decode` does; then the steps that follow have done nothing either.
        """
        token_ids, is_broken = np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_)
        is_done = self._model.wait(number, num_rows, token_ids.ctypes.data, is_broken.ctypes.data)
        return (token_ids, is_broken) if is_done else None

    def drain(self) -> None:
        """Waits until no step runs, including steps without a call of `wait`."""
        self._model.drain()


def _place_of(array: Array) -> int | None:
    """Address of a contiguous, writable array; None if it is empty.

    `array.ctypes.data` takes 35 us with cold caches, because it is implemented in Python.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else None
