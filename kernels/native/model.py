"""A decoder in the native library: weights packed tensor by tensor, the paged cache, and the step.

Arrays in, arrays out. Knows tensors by the names checkpoints give them; refuses to know files, torch and requests.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import library, machine, tensors
from .errors import NativeUnavailableError, NonFiniteError, UnsupportedModelError
from .neighbours import Neighbours, Share
from .reused import ReusedRows

Array = NDArray[Any]
Floats = NDArray[np.float32]
Longs = NDArray[np.int64]
Ints = NDArray[np.int32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
DType = Literal["float32", "bfloat16"]
CacheDType = Literal["float32", "bfloat16", "int8"]
Quantization = Literal["int8", "int4"]

_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
_CACHE_TYPES: dict[CacheDType, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
GROUP_SIZE = 32  # of int4
_MAX_HEAD_DIM = 1024
LARGE_PAGE = 2 << 20  # bytes

_PROBLEMS = {
    1: "an input id is not in the vocabulary",
    2: "a position is past the rotary tables",
    3: "a slot is past the cache",
    4: "query_starts or lengths do not fit the tokens or the block tables",
    5: "a block table names a block that the cache does not have",
    6: "a logits row is not one of the tokens",
    7: "there is no memory for the step's activations",
}
IS_PROMPT = 8  # a step is none of decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeShape:
    """What a decoder computes: Llama 2 and 3, Mistral, Qwen2, Qwen2.5, Qwen3."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rotary_dim: int  # rotated elements of a head, from its start
    rms_norm_eps: float
    sliding_windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    is_tied: bool  # the head is the embedding
    has_head: bool = True

    def check(self) -> None:
        """Raises UnsupportedModelError for sizes that the library does not compute with."""
        even = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_heads * head_dim": self.num_heads * self.head_dim,
            "head_dim": self.head_dim,
        }
        for name, size in even.items():
            if size % 2:
                raise UnsupportedModelError(f"{name} = {size}: the native step needs an even size")
        if self.head_dim > _MAX_HEAD_DIM:
            raise UnsupportedModelError(f"head_dim = {self.head_dim}: the native step has room for {_MAX_HEAD_DIM}")

    def bytes_per_block(self, block_size: int, dtype: CacheDType) -> int:
        """Memory of one block of the cache, all layers, keys and values. Heads are padded to whole vectors; in int8
        each token's head has a scale of two bytes."""
        padded = -(-self.head_dim // 16) * 16
        head = padded * np.dtype(_CACHE_TYPES[dtype]).itemsize + (2 if dtype == "int8" else 0)
        return 2 * self.num_layers * self.num_kv_heads * block_size * head


class NativeCache:
    """The paged cache: `data` [layers, blocks, numbers of a block], uint16 for bfloat16; zero at the start, from pages
    that the system hands out when they are first used. What is inside a block is the library's own."""

    def __init__(self, shape: NativeShape, num_blocks: int, block_size: int, dtype: CacheDType) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        item = np.dtype(_CACHE_TYPES[dtype])
        block_bytes = shape.bytes_per_block(block_size, dtype) // shape.num_layers
        self.blocks_apart = spread_layers(num_blocks, block_bytes, shape.num_layers)
        memory: Array = np.zeros((shape.num_layers, self.blocks_apart, block_bytes // item.itemsize), item)
        self.data = memory[:, :num_blocks]  # the rest is address space

    def copy_blocks(self, sources: Longs, destinations: Longs) -> None:
        """Block `destinations[i]` becomes what block `sources[i]` is, [C] each, all layers; no block is both."""
        self._copy(self.data, sources, self.data, destinations)

    def make_host_blocks(self, num_blocks: int) -> Array:
        """Room for so many blocks, laid out as here. What is never used takes address space and no memory."""
        num_layers, _, numbers = self.data.shape
        apart = spread_layers(num_blocks, numbers * self.data.itemsize, num_layers)
        host: Array = np.empty((num_layers, apart, numbers), self.data.dtype)
        return host[:, :num_blocks]

    def copy_out(self, blocks: Longs, host: Array, places: Longs) -> None:
        """Block `places[i]` of `host` becomes block `blocks[i]`, [C] each."""
        self._copy(self.data, blocks, host, places)

    def copy_in(self, host: Array, places: Longs, blocks: Longs) -> None:
        """Block `blocks[i]` becomes block `places[i]` of `host`, [C] each."""
        self._copy(host, places, self.data, blocks)

    @staticmethod
    def _copy(source: Array, source_ids: Longs, destination: Array, destination_ids: Longs) -> None:
        for source_id, destination_id in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
            destination[:, destination_id] = source[:, source_id]


def spread_layers(num_blocks: int, block_bytes: int, num_layers: int) -> int:
    """Blocks from the beginning of one layer to that of the next, at least `num_blocks`: with so many, layers begin at
    places of the system's large pages that are as far apart as may be.

    The system takes 0.2 ms to hand out such a page, and 5 in a virtual machine whose host does the same. Blocks are
    first used in order, in all layers alike: from the same place in each, all layers would need their next page in one
    step (30 layers: 150 ms).
    """
    if num_blocks * block_bytes < LARGE_PAGE:
        return num_blocks

    def distance(count: int) -> int:
        place = (count * block_bytes - LARGE_PAGE // num_layers) % LARGE_PAGE
        return min(place, LARGE_PAGE - place)

    return min(range(num_blocks, num_blocks + LARGE_PAGE // block_bytes + 1), key=distance)


class NativeModel:
    """A decoder with its weights and its compute threads. Logits of a token do not depend, by one bit, on what else is
    in the step, how a prompt is cut, the size of blocks, or the number of threads."""

    def __init__(
        self,
        shape: NativeShape,
        dtype: DType,
        cos: Floats,
        sin: Floats,
        *,
        quantization: Quantization | None = None,
        group_size: int = GROUP_SIZE,
        cache_dtype: CacheDType | None = None,
        num_threads: int | None = None,
        cpus: Sequence[int] | None = None,
        instruction_set: str | None = None,
        worth_a_thread: int = 2 << 20,
        neighbours: Neighbours | None = None,
    ) -> None:
        """cos, sin [P, rotary_dim / 2]: of the P positions that sequences may have.

        `quantization`: how matrices are kept; None: in `dtype`, in which all is computed. "int8": with a scale for each
        row. "int4": with a scale for each `group_size` numbers of a row, and the head in int8. An embedding that is not
        the head stays in `dtype`. `cache_dtype` None: as `dtype`. `num_threads` None: as many as
        `machine.default_threads` says. The caller of `step` is the first of them, and each other one is pinned to the
        processor of `cpus` in its place; None: all there are, in order; fewer than threads: none is pinned.
        `worth_a_thread`: bytes of weights to read below which another thread does not pay for a token. `neighbours`
        decides how many threads compute where others want the cores, too; None: it is made here.
        Weights come with `set_tensor`; all of them before the first step.

        Raises UnsupportedModelError, and NativeUnavailableError if the library cannot be had.
        """
        shape.check()
        if group_size < 2 or group_size % 2:
            raise ValueError(f"group_size = {group_size}: must be even, as numbers are kept in pairs")
        self.shape, self.dtype, self.quantization = shape, dtype, quantization
        self.cache_dtype = cache_dtype or dtype
        self.instruction_set = library.choose_instruction_set(instruction_set)
        self.num_threads = num_threads or machine.default_threads()
        self._library = library.load(self.instruction_set)
        names = [name for name, _ in library.Shape._fields_]  # type: ignore[misc]
        sizes = {name: getattr(shape, name) for name in names if hasattr(shape, name)}
        c_shape = library.Shape(
            **sizes,
            dtype=_TYPES[dtype],
            linears=_TYPES[quantization or dtype],
            head=_TYPES["int8" if quantization else dtype],
            cache=_TYPES[self.cache_dtype],
            group_size=group_size,
        )
        windows = np.array([window or 0 for window in shape.sliding_windows], np.int64)
        pinned = np.array(machine.cpus() if cpus is None else cpus, np.int32)
        self._model = self._library.millrace_model_new(
            ctypes.byref(c_shape),
            windows.ctypes.data,
            self.num_threads,
            pinned.ctypes.data,
            len(pinned),
            worth_a_thread,
        )
        if not self._model:
            raise NativeUnavailableError(f"threads = {self.num_threads}: the system gives no more threads or memory")
        self._before_step: Callable[[], object] | None = None
        self._logits = ReusedRows(shape.vocab_size)
        self._part_times: Longs | None = None
        self._neighbours = neighbours or Neighbours(self.num_threads)
        self._shares = np.zeros(len(Share), np.int64)
        if self.num_threads > 1:
            self._library.millrace_count_shares(self._model, self._shares.ctypes.data)
        weakref.finalize(self, self._library.millrace_model_delete, self._model)
        self.set_positions(cos, sin)

    def set_positions(self, cos: Floats, sin: Floats) -> None:
        """Takes other rotary tables, [P, rotary_dim / 2] each, for as many positions as they have."""
        cos, sin = np.ascontiguousarray(cos, np.float32), np.ascontiguousarray(sin, np.float32)
        if cos.shape != sin.shape or cos.shape[1] != self.shape.rotary_dim // 2:
            wanted = f"[positions, {self.shape.rotary_dim // 2}]"
            raise ValueError(f"cos {cos.shape}, sin {sin.shape}: must both be {wanted}")
        self.max_positions = len(cos)
        if self._library.millrace_set_positions(self._model, cos.ctypes.data, sin.ctypes.data, len(cos)):
            raise MemoryError(f"no memory for the tables of {len(cos)} positions")

    def set_tensor(self, name: str, data: Array, dtype: str | None = None) -> None:
        """Packs a tensor of the checkpoint, as its row-major array, memory-mapped or not; it is not needed afterwards.

        `dtype` says what uint16 holds: "bfloat16" (if nothing is said) or "float16". Raises NonFiniteError.
        """
        layer, kind = tensors.place(name)
        source = np.ascontiguousarray(data)
        held = dtype or {"uint16": "bfloat16"}.get(str(source.dtype), str(source.dtype))
        done = self._library.millrace_set_tensor(self._model, layer, kind, source.ctypes.data, _TYPES[held])
        if done == 1:
            raise NonFiniteError(f"tensor {name}: holds NaN or infinity as {self.dtype}; fetch the file again")
        if done:
            raise MemoryError(f"tensor {name}: no memory for {source.size} numbers as {self.dtype}")

    def set_tensors(self, names: Sequence[str], read: Callable[[str], Array]) -> None:
        """`set_tensor` for each of `names`, one in memory at a time."""
        for name in names:
            self.set_tensor(name, read(name))

    def type_of(self, name: str) -> str:
        """How a checkpoint's tensor is kept: as `dtype`, int8 or int4."""
        if self.quantization is None or not tensors.is_matrix(name, self.shape.is_tied):
            return self.dtype
        return "int8" if tensors.is_of_model(name) else self.quantization

    def matrix(self, name: str, num_rows: int, num_columns: int) -> Floats:
        """What is computed with in place of a checkpoint's matrix, [rows, columns]: its numbers as they are kept."""
        numbers = np.empty((num_rows, num_columns), np.float32)
        if not self._library.millrace_get_matrix(self._model, *tensors.place(name), numbers.ctypes.data):
            raise ValueError(f"{name}: not a matrix, or not set yet")
        return numbers

    @property
    def weights_bytes(self) -> int:
        """Memory of the packed weights."""
        return int(self._library.millrace_weights_bytes(self._model))

    def step_bytes(self, num_tokens: int, num_logits: int = 0) -> int:
        """Memory of the largest step's activations, its outputs left out."""
        return int(self._library.millrace_step_bytes(self._model, num_tokens, num_logits))

    def step(
        self,
        cache: NativeCache,
        *,
        input_ids: Longs,  # [T]
        positions: Longs,  # [T], from 0 in each sequence
        slot_mapping: Longs,  # [T] block * block_size + offset; -1 = nothing is written
        block_tables: Ints,  # [S, M] block ids in token order
        query_starts: Ints,  # [S + 1] sequence s has the tokens [query_starts[s], query_starts[s + 1])
        lengths: Ints,  # [S] tokens in the cache, the new ones included
        logits_rows: Longs | None = None,  # [L] which of the T tokens
        logits: Floats | None = None,  # [L, V] to write to
        hidden: Floats | None = None,  # [T, hidden_size] to write to
    ) -> None:
        """Runs one step: writes the new tokens' keys and values into the cache, and `logits` and `hidden` where asked.

        All arrays are contiguous. Blocks the tokens; the GIL is released. Raises ValueError, before anything is
        computed, for inputs that point outside what there is.
        """
        self.check_cache(cache)
        inputs = library.StepInputs(
            num_tokens=len(input_ids),
            num_sequences=len(lengths),
            table_width=block_tables.shape[1],
            num_logits=0 if logits is None or logits_rows is None else len(logits_rows),
            input_ids=address(input_ids, np.int64),
            positions=address(positions, np.int64),
            slot_mapping=address(slot_mapping, np.int64),
            block_tables=address(block_tables, np.int32),
            query_starts=address(query_starts, np.int32),
            lengths=address(lengths, np.int32),
            logits_rows=None if logits_rows is None else address(logits_rows, np.int64),
            cache=cache.data.ctypes.data,
            num_blocks=cache.blocks_apart,
            block_size=cache.block_size,
            hidden=None if hidden is None else address(hidden, np.float32),
            logits=None if logits is None else address(logits, np.float32),
        )
        if self._before_step is not None:
            self._before_step()
        self._check(self._library.millrace_step(self._model, ctypes.byref(inputs)))
        self._note_shares()

    def decode(self, rows: Any, num_rows: int, logits: int | None) -> bool:
        """As `step`, by a reference to a `library.Decoding`, to logits at an address: for a `Decoding`. False, and
        nothing was done, if a row reads a token of its prompt."""
        if self._before_step is not None:
            self._before_step()
        problem = self._library.millrace_decode(self._model, rows, num_rows, logits)
        if problem == IS_PROMPT:
            return False
        if problem:
            self._check(problem)
        self._note_shares()
        return True

    def _note_shares(self) -> None:
        if self._neighbours.note(self._shares):
            told = self._neighbours.limit, self._neighbours.is_trying
            self._library.millrace_limit_threads(self._model, *told)

    def room_for_logits(self, num_rows: int) -> Floats:
        """[num_rows, V] for a step to write to; it is not taken again while anybody holds it, or a part of it."""
        return self._logits.take(num_rows)

    def call_before_steps(self, call: Callable[[], object]) -> None:
        """From now on each step calls `call()` when all is ready, right before it lets go of the interpreter lock."""
        self._before_step = call

    def time_parts(self) -> Longs:
        """From now on each step adds to what this returns: nanoseconds of its products with weights, of its attention
        and of the rest, until the last thread was through with each, and 1. A clock is read nine times a layer."""
        if self._part_times is None:
            self._part_times = np.zeros(4, np.int64)
            self._library.millrace_time_parts(self._model, self._part_times.ctypes.data)
        return self._part_times

    def normed(self, hidden: Floats) -> Floats:
        """The final norm of hidden states, [L, hidden_size] both."""
        hidden = np.ascontiguousarray(hidden, np.float32)
        out = np.empty_like(hidden)
        self._library.millrace_norm(self._model, hidden.ctypes.data, len(hidden), out.ctypes.data)
        return out

    def logits(self, hidden: Floats) -> Floats:
        """Logits [L, V] of hidden states [L, hidden_size]: the same bits as `step` gives."""
        hidden = np.ascontiguousarray(hidden, np.float32)
        out = np.empty((len(hidden), self.shape.vocab_size), np.float32)
        self._check(self._library.millrace_head(self._model, hidden.ctypes.data, len(hidden), out.ctypes.data))
        return out

    def choose(self, asked: Any, choices: Any) -> None:
        """Chooses tokens of logits, by references to an `Asked` and to `Choices`: for a `Chooser`."""
        self._check(self._library.millrace_choose(self._model, asked, choices))

    def check_cache(self, cache: NativeCache) -> None:
        """That it is one of this model's."""
        assert cache.dtype == self.cache_dtype, (
            f"a cache of {cache.dtype} for a model whose cache is {self.cache_dtype}"
        )

    def _check(self, problem: int) -> None:
        if problem == 7:
            raise MemoryError(_PROBLEMS[problem])
        if problem:
            raise ValueError(f"native step: {_PROBLEMS[problem]}")


def address(array: Array, dtype: type[np.generic]) -> int:
    """Where the numbers of an array are, that is contiguous and of that type."""
    assert array.dtype == dtype and array.flags.c_contiguous, f"{array.dtype} {array.strides}: not contiguous {dtype}"
    return int(array.ctypes.data)
