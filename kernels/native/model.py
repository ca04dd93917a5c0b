"""A decoder in the native library: packed weights, and the steps on a paged cache.

Inputs and outputs are numpy arrays; tensors go by their checkpoint names. Does not depend on torch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..layout.grouped_codes import GroupedCodes, GroupedFormat
from . import grouped, library, loading, machine, structs, tensors
from .arrays import LogitsBuffers, address, addresses
from .cache import NativeCache
from .errors import NativeUnavailableError, NonFiniteError
from .lora import NativeLoraSlice, PackedAdapter
from .shape import Array, Bools, CacheDType, DType, Floats, Ints, Longs, NativeShape, Quantization, RopeTable
from .thread_throttle import ThreadShare, ThreadThrottle

_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
GROUP_SIZE = 32  # numbers of an int4 row that share a scale

_PROBLEMS = {
    1: "an input id is outside the vocabulary",
    2: "a position is past the rotary tables (max_positions)",
    3: "a slot is past the cache",
    4: "query_starts or lengths do not fit the tokens or the block tables",
    5: "a block table has a block id outside the cache",
    6: "a logits row is not one of the tokens",
    7: "no memory for the step's activations",
    9: "a token's adapter slot is empty, or past those that were reserved",
    10: "a sequence of recurrent layers has no slot, or one past the states of the cache",
}
IS_PROMPT = 8  # a row reads a token of its prompt


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
        `formats`: of the matrices that `set_rows` sets, by tensor name, as `grouped.packable` leaves them; the other
        tensors stay in `dtype`. Their products take float32 rows in 16 bits, whatever the dtype.
        `num_threads` None: `machine.default_threads()`. With several, the model has its own threads, and the caller
        waits for them; with one, the caller computes.
        `cpus`: thread i is pinned to cpus[i]. None: all available, in order. Fewer than threads: no thread is pinned.
        While threads are left out, the others may run on any of these processors.
        `worth_a_thread`: bytes of weights below which another thread does not pay for one token.
        `thread_throttle`: decides how many threads compute while other processes use the cores; None: a new one.

        Set all tensors (`set_tensor`) before the first step, then call `encode_bf16_12bit` if it pays.
        Raises UnsupportedModelError, and NativeUnavailableError if the library is not available.
        """
        shape.check()
        if group_size < 2 or group_size % 2:
            raise ValueError(f"group_size = {group_size}: must be even, because numbers are stored in pairs")
        self.shape, self.dtype, self.quantization = shape, dtype, quantization
        self.cache_dtype = cache_dtype or dtype
        self.num_threads = num_threads or machine.default_threads()
        self.instruction_set, self._library = loading.load_best(instruction_set)
        c_shape = structs.of_shape(
            shape,
            dtype=_TYPES[dtype],
            linears=_TYPES[quantization or dtype],
            head=_TYPES["int8" if quantization else dtype],
            cache=_TYPES[self.cache_dtype],
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
        self._before_step: Callable[[], object] | None = None
        self._logits = LogitsBuffers(shape.vocab_size)
        self._phase_times: Longs | None = None
        self._thread_throttle = thread_throttle or ThreadThrottle(self.num_threads)
        self._shares = np.zeros(len(ThreadShare), np.int64)
        if self.num_threads > 1:
            self._library.millrace_count_thread_times(self._model, self._shares.ctypes.data)
        self._kept: list[object] = []
        self._are_coded = False
        self._factors: dict[str, float] = {}  # of the scales, by product
        self._columns: dict[str, Ints | None] = {}  # their order, by product
        self.formats = dict(formats or {})
        if quantization == "int4" and grouped.takes_groups_of(group_size):
            self.formats = grouped.own_formats(shape, group_size)
        freed = weakref.finalize(self, _delete, self._library, self._model, self._kept)
        freed.atexit = False  # the system frees the memory of a process, and a thread may still be packing weights
        if self.formats:
            grouped.set_formats(self._library, self._model, shape, self.formats)
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
        self._ropes = tables  # the library reads them where they are

    def set_tensor(self, name: str, data: Array, dtype: str | None = None) -> None:
        """Packs a tensor of the checkpoint, a row-major array, which is not needed afterwards.

        `dtype` is the type of a uint16 array: "bfloat16" (the default) or "float16". Raises NonFiniteError.
        """
        self._set_tensors({name: data}, dtype)

    def set_tensor_rows(self, name: str, first_row: int, data: Array) -> None:
        """Packs rows [first_row, first_row + len(data)) of a matrix, or of a table of rows, like `set_tensor`.

        Set them in order: memory is taken with the first row, and the argmax screen is made with the last.
        """
        self._set_tensors({name: data}, rows=(first_row, len(data)))

    def set_mapped_tensors(self, mapped: Mapping[str, Array]) -> None:
        """Packs tensors of a private file mapping like `set_tensor`, and drops each one's pages.

        So there are never two copies of the model. NOTE: arrays in other memory would lose their contents.
        One library call for all, because reacquiring the GIL beside other threads takes up to 5 ms, and a model has
        hundreds of tensors.
        """
        self._set_tensors(mapped, is_mapped=True)

    def _set_tensors(
        self,
        arrays: Mapping[str, Array],
        dtype: str | None = None,
        is_mapped: bool = False,
        rows: tuple[int, int] = (0, 0),  # the first, and how many; 0: all
    ) -> None:
        names = list(arrays)
        if self._are_coded:
            raise RuntimeError(f"tensor {names[0]}: set all tensors before `encode_bf16_12bit`")
        sources = [np.ascontiguousarray(array) for array in arrays.values()]
        described = (library.TensorStruct * len(names))()
        for one, name, source in zip(described, names, sources, strict=True):
            one.layer, one.kind, one.expert = tensors.place(name)
            one.type = _TYPES[dtype or {"uint16": "bfloat16"}.get(str(source.dtype), str(source.dtype))]
            one.data, one.map_bytes = source.ctypes.data, source.nbytes * is_mapped
            one.first_row, one.num_rows = rows
        num_set = ctypes.c_int64()
        done = self._library.millrace_set_tensors(self._model, described, len(names), ctypes.byref(num_set))
        if done == 1:
            name = names[num_set.value]
            raise NonFiniteError(f"tensor {name}: holds NaN or infinity as {self.dtype}; fetch the file again")
        if done:
            name, size = names[num_set.value], sources[num_set.value].size
            raise MemoryError(f"tensor {name}: no memory for {size} numbers as {self.dtype}")

    def set_rows(self, name: str, first_row: int, codes: GroupedCodes) -> None:
        """Packs rows of a matrix that has a format, from `first_row` on. Its arrays are not needed afterwards.

        Rows may come in any order; a step needs all. Raises NonFiniteError, and ValueError for arrays that do not fit:
        all rows of one product must have the same factor and order of columns.
        """
        if codes.format != self.formats.get(name):
            raise ValueError(f"tensor {name}: {codes.format}: must be {self.formats.get(name)}, as the model was made")
        codes.check()
        num_columns = grouped.num_columns(self.shape, name)
        if codes.num_columns != num_columns:
            raise ValueError(f"tensor {name}: {codes.num_columns} columns: must be {num_columns}")
        product = grouped.product_of(name)
        if product not in self._columns:
            self._columns[product] = columns = None if codes.columns is None else codes.columns.copy()
            if columns is not None:
                if columns.dtype != np.int32 or not np.array_equal(np.sort(columns), np.arange(num_columns)):
                    raise ValueError(f"tensor {name}: columns: must be each of {num_columns} once, as int32")
                grouped.set_columns(self._library, self._model, name, columns)
        if not _are_equal(self._columns[product], codes.columns):
            raise ValueError(f"tensor {name}: its columns are in another order than those of its product")
        factor = self._factors.setdefault(product, codes.factor)
        if codes.factor != factor:
            raise ValueError(f"tensor {name}: factor = {codes.factor}: rows of the same product have {factor}")
        done = grouped.set_rows(self._library, self._model, name, first_row, codes)
        if done == 1:
            raise NonFiniteError(f"tensor {name}: a scale is NaN or infinity; fetch the file again")
        if done:
            raise MemoryError(f"tensor {name}: no memory for {codes.num_rows} rows of {codes.num_columns} codes")

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
        return PackedAdapter(self._library, self._model, _TYPES[dtype or self.dtype], slices, pause)

    def use_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Puts an adapter into a slot that was reserved, in place of the one there; None: empties it.

        Waits for the step that runs.
        """
        self._library.millrace_use_adapter(self._model, slot, None if adapter is None else adapter.handle)

    def encode_bf16_12bit(self) -> None:
        """Encodes the bf16 matrices losslessly in 12 bits per number, where that saves memory.

        Applies on machines with bf16 dot products, to matrices whose numbers have similar magnitudes. Steps of few rows
        take up to a quarter less, because they read less. Call after all tensors are set; none can be set afterwards.
        Raises MemoryError after it has tried all: matrices that lacked memory stay as they are, and steps still work.
        """
        self._are_coded = True
        if self.formats:
            return  # what is not in groups of codes is multiplied as it is
        if self._library.millrace_encode_bf16_12bit(self._model):
            raise MemoryError("no memory to encode some of the matrices; these stay in bf16")

    def type_of(self, name: str) -> str:
        """Storage type of a checkpoint's tensor: `dtype`, "int8" or "int4"."""
        if self.quantization is None or not tensors.is_matrix(name, self.shape.is_tied):
            return self.dtype
        return "int8" if tensors.is_of_model(name) else self.quantization

    def has_screen(self, name: str) -> bool:
        """Whether the tensor gets an int8 copy: see `screen_bytes`."""
        is_head = name == ("model.embed_tokens.weight" if self.shape.is_tied else "lm_head.weight")
        return is_head and bool(self._library.millrace_can_screen(self._model))

    @property
    def num_screen_candidates(self) -> int:
        """(row, panel of 32 tokens) pairs that the last step's argmax screen left as candidates.

        -1: the step used no screen, or needed no logits.
        """
        return int(self._library.millrace_screen_candidates(self._model))

    @property
    def num_screen_refined(self) -> int:
        """(row, panel) pairs that the last step's argmax screen refined."""
        return int(self._library.millrace_screen_refined(self._model))

    @property
    def is_split_by_rows(self) -> bool:
        """Whether two threads split the last step's products by rows, each with all weights, and not by columns."""
        return bool(self._library.millrace_is_split_by_rows(self._model))

    @property
    def is_split(self) -> bool:
        """Whether the last step's rows were split between two threads, from the layer before which both had joined."""
        return bool(self._library.millrace_is_split(self._model))

    @property
    def num_layers_before_split(self) -> int:
        """Layers before the last split step was split; -1: the second thread did not join before the last layer."""
        return int(self._library.millrace_num_layers_before_split(self._model))

    @property
    def is_streaming(self) -> bool:
        """Whether the last step had so few rows, in its layers or its head, that it read weights non-temporally."""
        return bool(self._library.millrace_is_streaming(self._model))

    @property
    def kv_prefetched_bytes(self) -> int:
        """Bytes of keys and values that the last step prefetched a layer ahead, beside products."""
        return int(self._library.millrace_kv_prefetched_bytes(self._model))

    def assume_retained(self, num_bytes: int) -> None:
        """For tests: fixes the bytes that the shared cache retains; negative: measures them, as by default.

        Results of steps do not depend on it.
        """
        self._library.millrace_assume_retained(self._model, num_bytes)

    def assume_split(self, is_split: bool | None) -> None:
        """For tests: splits the rows of all steps that allow it, or of none; None: the faster way, as by default.

        Results of steps do not depend on it.
        """
        self._library.millrace_assume_split(self._model, -1 if is_split is None else int(is_split))

    def matrix(self, name: str, num_rows: int, num_columns: int) -> Floats:
        """The numbers that products use for a checkpoint's matrix, [rows, columns]."""
        numbers = np.empty((num_rows, num_columns), np.float32)
        if not self._library.millrace_get_matrix(self._model, *tensors.place(name), numbers.ctypes.data):
            raise ValueError(f"{name}: not a matrix, or not set yet")
        return numbers

    def product(self, name: str, x: Floats, num_outputs: int) -> Floats:
        """The product of rows x [M, k] with a matrix in groups of codes, or with all that are fused with it; for tests.

        `num_outputs`: rows of the matrix, or of all.
        """
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), num_outputs), np.float32)
        place = tensors.place(name)
        self._check(self._library.millrace_product(self._model, *place, x.ctypes.data, len(x), out.ctypes.data))
        return out

    @property
    def weights_bytes(self) -> int:
        """Memory of the packed weights."""
        return int(self._library.millrace_weights_bytes(self._model))

    @property
    def token_weights_bytes(self) -> int:
        """Memory of the packed weights without experts that a token does not go to: what a step of one token reads."""
        return int(self._library.millrace_token_weights_bytes(self._model))

    @property
    def screen_bytes(self) -> int:
        """Memory of the argmax screen: an int8 copy of the head; 0: there is none.

        Steps that return argmax tokens of up to 512 rows multiply the copy, and little of the head.
        """
        return int(self._library.millrace_screen_bytes(self._model))

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
        self._check(self._library.millrace_step(self._model, ctypes.byref(inputs)))
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

    def keep(self, *memory: object) -> None:
        """Keeps memory alive as long as the model, because steps that are not waited for may read it."""
        self._kept.extend(memory)

    def begin(self, number: int, rows: Any, sampling: Any, num_rows: int) -> None:
        """Queues a decoding step with sampling, for a `StepChain`.

        `rows`, `sampling`: references to a `library.DecodeSlots` and a `library.SlotSampling`.
        """
        self._check(self._library.millrace_begin(self._model, number, rows, sampling, num_rows))

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
            self._check(problem)
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
        self._check(self._library.millrace_head(self._model, hidden.ctypes.data, len(hidden), out.ctypes.data))
        return out

    def choose(self, sampling: Any, choices: Any) -> None:
        """Samples tokens from logits, for a `NativeChooser`.

        `sampling`, `choices`: references to a `library.SlotSampling` and a `library.SamplingRows`.
        """
        self._check(self._library.millrace_sample(self._model, sampling, choices))

    def check_cache(self, cache: NativeCache) -> None:
        """Asserts that the cache has this model's cache dtype."""
        assert cache.dtype == self.cache_dtype, f"cache dtype {cache.dtype}: the model's is {self.cache_dtype}"

    def _check(self, problem: int) -> None:
        if problem == 7:
            raise MemoryError(_PROBLEMS[problem])
        if problem:
            raise ValueError(f"native step: {_PROBLEMS[problem]}")


def _delete(library: ctypes.CDLL, model: int, kept: list[object]) -> None:
    """Deletes the model, then releases `kept`, which running steps may read. No caller may be waiting for a step."""
    library.millrace_model_delete(model)


def _are_equal(one: Ints | None, other: Ints | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)
