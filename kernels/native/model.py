"""A decoder in the native library: its steps on a paged cache. Its weights are in `weights.py`.

Inputs and outputs are numpy arrays. Does not depend on torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..layout.grouped_codes import GroupedFormat
from . import grouped, library, loading, machine, structs
from .arrays import LogitsBuffers, address, addresses
from .cache import NativeCache
from .errors import NativeUnavailableError
from .library_model import IS_PROMPT, LibraryModel
from .lora import NativeLoraSlice, PackedAdapter
from .shape import Bools, CacheDType, DType, Floats, Ints, Longs, NativeShape, Quantization, RopeTable
from .structs import NUMBER_TYPES
from .thread_throttle import ThreadShare, ThreadThrottle
from .weights import NativeWeights

GROUP_SIZE = 32  # numbers of an int4 row that share a scale


class NativeModel:
    """A decoder with its weights and its compute threads.

    The logits of a token are the same, bit for bit, whatever else is in the step, however a prompt is chunked, and with
    any block size and number of threads.
    """

    def __init__(
        self,
        shape: NativeShape,
        dtype: DType,
        ropes: Sequence[RopeTable],
        num_positions: int,
        *,
        quantization: Quantization | None = None,
        formats: Mapping[str, GroupedFormat] | None = None,
        group_size: int = GROUP_SIZE,
        cache_dtype: CacheDType | None = None,
        num_threads: int | None = None,
        cpus: Sequence[int] | None = None,
        instruction_set: str | None = None,
        worth_a_thread: int = 2 << 20,
        thread_throttle: ThreadThrottle | None = None,
    ) -> None:
        """ropes, num_positions: as in `set_positions`.

        `quantization`: storage of the matrices. None: `dtype`. "int8": one scale per row. "int4": one scale per
        `group_size` numbers of a row, and the head in int8, likewise. An embedding that is not the head stays in
        `dtype`. Computation is in `dtype`; with "int4", products take float32 rows in 16 bits. `cache_dtype` None: as
        `dtype`.
        `formats`: of the matrices that `NativeWeights.set_rows` sets, by tensor name, as `grouped.packable` leaves
        them; the other tensors stay in `dtype`. Their products take float32 rows in 16 bits, whatever the dtype.
        `num_threads` None: `machine.default_threads()`. With several, the model has its own threads, and the caller
        waits for them; with one, the caller computes.
        `cpus`: thread i is pinned to cpus[i]. None: all available, in order. Fewer than threads: no thread is pinned.
        While threads are left out, the others may run on any of these processors.
        `worth_a_thread`: bytes of weights below which another thread does not pay for one token.
        `thread_throttle`: decides how many threads compute while other processes use the cores; None: a new one.

        Set all tensors of `weights` before the first step.
        Raises UnsupportedModelError, and NativeUnavailableError if the library is not available.
        """
        shape.check()
        if group_size < 2 or group_size % 2:
            raise ValueError(f"group_size = {group_size}: must be even, because numbers are stored in pairs")
        self.shape, self.dtype = shape, dtype
        self.cache_dtype = cache_dtype or dtype
        self.num_threads = num_threads or machine.default_threads()
        self.instruction_set, self._library = loading.load_best(instruction_set)
        c_shape = structs.of_shape(
            shape,
            dtype=NUMBER_TYPES[dtype],
            linears=NUMBER_TYPES[quantization or dtype],
            head=NUMBER_TYPES["int8" if quantization else dtype],
            cache=NUMBER_TYPES[self.cache_dtype],
            group_size=group_size,
        )
        pinned = np.array(machine.cpus() if cpus is None else cpus, np.int32)
        self._model = self._library.millrace_model_new(
            ctypes.byref(c_shape),
            structs.of_layers(shape),
            self.num_threads,
            pinned.ctypes.data,
            len(pinned),
            worth_a_thread,
        )
        if not self._model:
            raise NativeUnavailableError(f"threads = {self.num_threads}: no memory or system threads left; try fewer")
        self.in_library = LibraryModel(self._library, self._model)
        self._before_step: Callable[[], object] | None = None
        self._logits = LogitsBuffers(shape.vocab_size)
        self._phase_times: Longs | None = None
        self._thread_throttle = thread_throttle or ThreadThrottle(self.num_threads)
        self._shares = np.zeros(len(ThreadShare), np.int64)
        self.in_library.keep(self._shares)
        if self.num_threads > 1:
            self._library.millrace_count_thread_times(self._model, self._shares.ctypes.data)
        if quantization == "int4" and grouped.takes_groups_of(group_size):
            formats = grouped.own_formats(shape, group_size)
        self.weights = NativeWeights(self.in_library, shape, dtype, quantization, formats or {})
        self.set_positions(ropes, num_positions)

    def set_positions(self, ropes: Sequence[RopeTable], num_positions: int) -> None:
        """Replaces the rotary tables, one for each of `NativeShape.rotary_dims`; sets `max_positions`.

        Arrays of float32 are kept, not copied.
        """
        tables = [tuple(np.ascontiguousarray(table, np.float32) for table in pair) for pair in ropes]
        halves = np.array([dim // 2 for dim in self.shape.rotary_dims], np.int64)
        wanted = [(num_positions, half) for half in halves.tolist()]
        if [cos.shape for cos, _ in tables] != wanted or [sin.shape for _, sin in tables] != wanted:
            sizes = ", ".join(f"{cos.shape} and {sin.shape}" for cos, sin in tables) or "none"
            raise ValueError(f"rotary tables {sizes}: cos and sin must be {', '.join(map(str, wanted)) or 'none'}")
        learned = self.shape.num_learned_positions
        if learned and num_positions + self.shape.position_offset > learned:
            raise ValueError(f"{num_positions} positions: the model has learned {learned - self.shape.position_offset}")
        cos, sin = ((ctypes.c_void_p * len(tables))(*(pair[i].ctypes.data for pair in tables)) for i in (0, 1))
        if self._library.millrace_set_positions(
            self._model, num_positions, len(tables), halves.ctypes.data, ctypes.addressof(cos), ctypes.addressof(sin)
        ):
            raise MemoryError(f"no memory for the rotary tables of {num_positions} positions")
        self.max_positions = num_positions
        self.in_library.keep_positions(tables)  # the library reads them where they are

    def reserve_adapters(self, num_slots: int, max_rank: int) -> None:
        """Lets steps take adapters in slots 1 to `num_slots`, of up to three matrices of `max_rank` for a product."""
        if self._library.millrace_reserve_adapters(self._model, num_slots, max_rank):
            raise MemoryError(f"no memory for {num_slots} adapter slots")

    def pack_adapter(
        self, slices: Sequence[NativeLoraSlice], pause: Callable[[], object] | None = None, dtype: str | None = None
    ) -> PackedAdapter:
        """An adapter for `use_adapter`; see `PackedAdapter`. May run beside steps. Raises MemoryError.

        `dtype`: of the arrays, float32 or bfloat16; that of a model in bfloat16 must be bfloat16. None: the model's.
        """
        return PackedAdapter(self._library, self._model, NUMBER_TYPES[dtype or self.dtype], slices, pause)

    def use_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Puts an adapter into a slot that was reserved, in place of the one there; None: empties it.

        Waits for the step that runs.
        """
        self._library.millrace_use_adapter(self._model, slot, None if adapter is None else adapter.handle)

    def step_bytes(self, num_tokens: int, num_logits: int = 0) -> int:
        """Memory of the activations of a step of this size, without its outputs."""
        return int(self._library.millrace_step_bytes(self._model, num_tokens, num_logits))

    def step(
        self,
        cache: NativeCache,
        *,
        input_ids: Longs,  # [T]
        positions: Longs,  # [T], from 0 in each sequence
        slot_mapping: Longs,  # [T] block * block_size + offset; -1: not written. [K, T] for a cache of K kinds
        block_tables: Ints,  # [S, M] block ids in token order, [K, S, M] likewise; none before a window is read
        query_starts: Ints,  # [S + 1] sequence s has the tokens [query_starts[s], query_starts[s + 1])
        lengths: Ints,  # [S] tokens in the cache, the new ones included
        logits_rows: Longs | None = None,  # [L] which of the T tokens
        logits: Floats | None = None,  # [L, V] to write to
        likeliest: tuple[Longs, Bools] | None = None,  # instead of logits: ids and broken rows, [L] each
        hidden: Floats | None = None,  # [T, hidden_size] to write to
        adapters: Longs | None = None,  # [T] slot of each token's adapter; 0: none
        slots: Longs | None = None,  # [S] of each sequence's state, of a model with recurrent layers; each once
    ) -> None:
        """Runs one step: writes the new tokens' keys and values into the cache, and the requested outputs.

        `likeliest`: argmax token ids, the lowest id among ties, and whether a row is broken, as in `NativeChooser`.
        All arrays must be contiguous. Waits for the step; the GIL is released. Raises ValueError, before anything is
        computed, for indices out of range.
        """
        self.check_cache(cache)
        assert logits is None or likeliest is None, "request logits or likeliest, not both"
        num_kinds = len(cache.data_of)
        inputs = library.StepInputsStruct(
            num_tokens=len(input_ids),
            num_sequences=len(lengths),
            table_width=block_tables.shape[-1],
            num_logits=0 if logits_rows is None or (logits is None and likeliest is None) else len(logits_rows),
            input_ids=address(input_ids, np.int64),
            positions=address(positions, np.int64),
            slot_mapping=addresses(slot_mapping.reshape(num_kinds, -1), np.int64),
            block_tables=addresses(block_tables.reshape(num_kinds, -1), np.int32),
            query_starts=address(query_starts, np.int32),
            lengths=address(lengths, np.int32),
            logits_rows=None if logits_rows is None else address(logits_rows, np.int64),
            cache=ctypes.addressof(cache.slabs),
            hidden=None if hidden is None else address(hidden, np.float32),
            logits=None if logits is None else address(logits, np.float32),
            argmax=None if likeliest is None else address(likeliest[0], np.int64),
            is_broken=None if likeliest is None else address(likeliest[1], np.bool_),
            adapters=None if adapters is None else address(adapters, np.int64),
            slots=None if slots is None else address(slots, np.int64),
        )
        if self._before_step is not None:
            self._before_step()
        self.in_library.check(self._library.millrace_step(self._model, ctypes.byref(inputs)))
        self._note_shares()

    def decode(self, rows: Any, num_rows: int, *wanted: int | None) -> bool:
        """Runs a decoding step, for a `SlotStep`. False if a row reads a token of its prompt; then nothing was done.

        `rows`: reference to a `library.DecodeSlots`. `wanted`: addresses of logits, argmax tokens and broken rows, or
        None. Raises as `step`.
        """
        if self._before_step is not None:
            self._before_step()
        problem = self._library.millrace_decode(self._model, rows, num_rows, *wanted)
        return self._is_done(problem)

    @property
    def step_thread_id(self) -> int:
        """The system's id of the thread that runs the steps; 0: the caller's thread does."""
        return int(self._library.millrace_step_thread_id(self._model))

    def begin(self, number: int, rows: Any, sampling: Any, num_rows: int) -> None:
        """Queues a decoding step with sampling, for a `StepChain`.

        `rows`, `sampling`: references to a `library.DecodeSlots` and a `library.SlotSampling`.
        """
        self.in_library.check(self._library.millrace_begin(self._model, number, rows, sampling, num_rows))

    def follow(self, number: int, rows: Any, sampling: Any, num_rows: int) -> bool:
        """Like `begin`, but only directly behind step `number - 1`; whether the step was queued."""
        return bool(self._library.millrace_follow(self._model, number, rows, sampling, num_rows))

    def wait(self, number: int, num_rows: int, token_ids: int, is_broken: int) -> bool:
        """Waits for a step and writes its results to the addresses `token_ids` and `is_broken`.

        False if a row reads a token of its prompt, in this step or one that it follows; then nothing was done.
        """
        if self._before_step is not None:
            self._before_step()
        problem = self._library.millrace_wait(self._model, number, num_rows, token_ids, is_broken)
        return self._is_done(problem)

    def drain(self) -> None:
        """Waits until no step is queued or running."""
        self._library.millrace_drain(self._model)

    def _is_done(self, problem: int) -> bool:
        """Whether a decoding step was computed; False if a row read a token of its prompt. Raises on errors."""
        if problem == IS_PROMPT:
            return False
        if problem:
            self.in_library.check(problem)
        self._note_shares()
        return True

    def _note_shares(self) -> None:
        if self._thread_throttle.note(self._shares):
            limits = self._thread_throttle.limit, self._thread_throttle.is_trying
            self._library.millrace_limit_threads(self._model, *limits)

    def logits_buffer(self, num_rows: int) -> Floats:
        """A buffer [num_rows, V] for a step's logits. It is reused once no reference to it or a part of it is left."""
        return self._logits.take(num_rows)

    def call_before_steps(self, call: Callable[[], object]) -> None:
        """Sets a function that each step calls right before its caller releases the interpreter lock and waits."""
        self._before_step = call

    def time_phases(self) -> Longs:
        """Starts to time the phases of steps. Each step adds to the returned array: [products, attention, other, 1].

        Times are nanoseconds until the last thread has finished a phase. Norms of few rows count as products. Reads a
        clock up to nine times per layer.
        """
        if self._phase_times is None:
            self._phase_times = np.zeros(4, np.int64)
            self.in_library.keep(self._phase_times)
            self._library.millrace_time_phases(self._model, self._phase_times.ctypes.data)
        return self._phase_times

    def normed(self, hidden: Floats) -> Floats:
        """The final norm of hidden states; both [L, hidden_size]."""
        hidden = np.ascontiguousarray(hidden, np.float32)
        out = np.empty_like(hidden)
        self._library.millrace_norm(self._model, hidden.ctypes.data, len(hidden), out.ctypes.data)
        return out

    def logits(self, hidden: Floats) -> Floats:
        """Logits [L, V] of hidden states [L, hidden_size], the same bits as from `step`."""
        hidden = np.ascontiguousarray(hidden, np.float32)
        out = np.empty((len(hidden), self.shape.vocab_size), np.float32)
        self.in_library.check(
            self._library.millrace_head(self._model, hidden.ctypes.data, len(hidden), out.ctypes.data)
        )
        return out

    def choose(self, sampling: Any, choices: Any) -> None:
        """Samples tokens from logits, for a `NativeChooser`.

        `sampling`, `choices`: references to a `library.SlotSampling` and a `library.SamplingRows`.
        """
        self.in_library.check(self._library.millrace_sample(self._model, sampling, choices))

    def check_cache(self, cache: NativeCache) -> None:
        """Asserts that the cache has this model's cache dtype."""
        assert cache.dtype == self.cache_dtype, f"cache dtype {cache.dtype}: the model's is {self.cache_dtype}"
