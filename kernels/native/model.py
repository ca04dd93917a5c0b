"""A decoder in the native library: weights packed tensor by tensor, the paged cache, and the step.

Arrays in, arrays out. Knows tensors by the names checkpoints give them; refuses to know files, torch and requests.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import library, machine, tensors
from .cache import NativeCache
from .errors import NativeUnavailableError, NonFiniteError
from .logits_buffers import ReusedRows
from .shape import Array, Bools, CacheDType, DType, Floats, Ints, Longs, NativeShape, Quantization
from .thread_throttle import Neighbours, Share

_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
GROUP_SIZE = 32  # of int4

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
        `machine.default_threads` says. Several are the model's own, who calls waits for them, and each is pinned to the
        processor of `cpus` in its place; None: all there are, in order; fewer than threads: none is pinned. While some
        are left out, those that compute run on any of their processors. A single one is whoever calls.
        `worth_a_thread`: bytes of weights to read below which another thread does not pay for a token. `neighbours`
        decides how many threads compute where others want the cores, too; None: it is made here.
        Weights come with `set_tensor`; all of them before the first step, and then `encode_bf16_12bit` where it pays.

        Raises UnsupportedModelError, and NativeUnavailableError if the library cannot be had.
        """
        shape.check()
        if group_size < 2 or group_size % 2:
            raise ValueError(f"group_size = {group_size}: must be even, as numbers are kept in pairs")
        self.shape, self.dtype, self.quantization = shape, dtype, quantization
        self.cache_dtype = cache_dtype or dtype
        self.num_threads = num_threads or machine.default_threads()
        self.instruction_set, self._library = library.load_best(instruction_set)
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
        self._phase_times: Longs | None = None
        self._neighbours = neighbours or Neighbours(self.num_threads)
        self._shares = np.zeros(len(Share), np.int64)
        if self.num_threads > 1:
            self._library.millrace_count_thread_times(self._model, self._shares.ctypes.data)
        self._kept: list[Array] = []
        self._are_coded = False
        freed = weakref.finalize(self, _delete, self._library, self._model, self._kept)
        freed.atexit = False  # a process that ends has its memory freed, and may have a thread that packs weights
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
        self._set_tensors({name: data}, dtype)

    def set_mapped_tensors(self, mapped: Mapping[str, Array]) -> None:
        """Packs tensors that are of a file's private map, each as `set_tensor` does, and lets its pages go: at no time
        are there two copies of the model. Nothing else may be passed, as its pages would be empty afterwards.

        One call of the library, so that other threads may hold the GIL meanwhile: to get it back takes up to 5 ms, and
        a model has hundreds of tensors."""
        self._set_tensors(mapped, is_mapped=True)

    def _set_tensors(self, arrays: Mapping[str, Array], dtype: str | None = None, is_mapped: bool = False) -> None:
        names = list(arrays)
        if self._are_coded:
            raise RuntimeError(f"tensor {names[0]}: weights are coded; all tensors come before `encode_bf16_12bit`")
        sources = [np.ascontiguousarray(array) for array in arrays.values()]
        described = (library.Tensor * len(names))()
        for one, name, source in zip(described, names, sources, strict=True):
            one.layer, one.kind = tensors.place(name)
            one.type = _TYPES[dtype or {"uint16": "bfloat16"}.get(str(source.dtype), str(source.dtype))]
            one.data, one.map_bytes = source.ctypes.data, source.nbytes * is_mapped
        num_set = ctypes.c_int64()
        done = self._library.millrace_set_tensors(self._model, described, len(names), ctypes.byref(num_set))
        if done == 1:
            name = names[num_set.value]
            raise NonFiniteError(f"tensor {name}: holds NaN or infinity as {self.dtype}; fetch the file again")
        if done:
            name, size = names[num_set.value], sources[num_set.value].size
            raise MemoryError(f"tensor {name}: no memory for {size} numbers as {self.dtype}")

    def encode_bf16_12bit(self) -> None:
        """Keeps matrices of bf16, the layers' and the head, in 12 bits a number from now on, to the bit, where the
        machine multiplies bf16 as such and a matrix's numbers are of like size: few rows' steps take up to a quarter
        less, as what they read is so much smaller. All tensors are set, and none can be set any more. Raises
        MemoryError when it is through: what there was no memory for stays as it is, and steps go on.
        """
        self._are_coded = True
        if self._library.millrace_encode_bf16_12bit(self._model):
            raise MemoryError("no memory for a matrix while it is coded")

    def type_of(self, name: str) -> str:
        """How a checkpoint's tensor is kept: as `dtype`, int8 or int4."""
        if self.quantization is None or not tensors.is_matrix(name, self.shape.is_tied):
            return self.dtype
        return "int8" if tensors.is_of_model(name) else self.quantization

    def has_screen(self, name: str) -> bool:
        """Whether a copy of the tensor in int8 is made beside it: see `screen_bytes`."""
        is_head = name == ("model.embed_tokens.weight" if self.shape.is_tied else "lm_head.weight")
        return is_head and bool(self._library.millrace_can_screen(self._model))

    @property
    def num_screen_candidates(self) -> int:
        """Panels, of 32 tokens, of the head that may have had a row's largest logit as far as the last step's screen
        told, each once for each row; -1: that went without one, or needed no logits."""
        return int(self._library.millrace_screen_candidates(self._model))

    @property
    def num_screen_refined(self) -> int:
        """Those that the last step's screen looked at closer, each once for each row."""
        return int(self._library.millrace_screen_refined(self._model))

    @property
    def is_split_by_rows(self) -> bool:
        """Whether two threads shared the last step's products by rows, each with all weights, not by columns."""
        return bool(self._library.millrace_is_split_by_rows(self._model))

    @property
    def is_split(self) -> bool:
        """Whether each of two threads was to take half of the last step's rows, alone, once both were there."""
        return bool(self._library.millrace_is_split(self._model))

    @property
    def num_layers_before_split(self) -> int:
        """Layers that whoever was there went through with all rows before the last step of which two threads took half
        each; -1: the other one did not come before the last layer."""
        return int(self._library.millrace_num_layers_before_split(self._model))

    @property
    def is_streaming(self) -> bool:
        """Whether the last step's rows were so few, in its layers or its head, that weights passed by the caches."""
        return bool(self._library.millrace_is_streaming(self._model))

    @property
    def kv_prefetched_bytes(self) -> int:
        """Of keys and values: what the last step fetched a layer ahead, beside products."""
        return int(self._library.millrace_kv_prefetched_bytes(self._model))

    def assume_retained(self, num_bytes: int) -> None:
        """From now on the cache behind the cores' own is taken to keep so many bytes; below 0: that is measured, as at
        first. What a step computes does not depend on it."""
        self._library.millrace_assume_retained(self._model, num_bytes)

    def assume_split(self, is_split: bool | None) -> None:
        """From now on the rows of steps that can be taken apart are, or are not; None: it is measured which is faster,
        as at first. What a step computes does not depend on it."""
        self._library.millrace_assume_split(self._model, -1 if is_split is None else int(is_split))

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

    @property
    def screen_bytes(self) -> int:
        """Memory beside the weights that tells where the head's largest logits are: the head in int8, so that steps
        that are asked for the likeliest tokens of up to 512 rows read and multiply that, and little of the head. 0:
        there is none."""
        return int(self._library.millrace_screen_bytes(self._model))

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
        likeliest: tuple[Longs, Bools] | None = None,  # in their place: [L] each, to write to
        hidden: Floats | None = None,  # [T, hidden_size] to write to
    ) -> None:
        """Runs one step: writes the new tokens' keys and values into the cache, and `logits`, `likeliest` and `hidden`
        where asked. `likeliest` are token ids, the lowest one among equals, and whether a row is broken: as a `Chooser`
        tells of rows that are not random.

        All arrays are contiguous. Blocks the tokens; the GIL is released. Raises ValueError, before anything is
        computed, for inputs that point outside what there is.
        """
        self.check_cache(cache)
        assert logits is None or likeliest is None, "logits, and what is told in their place"
        inputs = library.StepInputs(
            num_tokens=len(input_ids),
            num_sequences=len(lengths),
            table_width=block_tables.shape[1],
            num_logits=0 if logits_rows is None or (logits is None and likeliest is None) else len(logits_rows),
            input_ids=address(input_ids, np.int64),
            positions=address(positions, np.int64),
            slot_mapping=address(slot_mapping, np.int64),
            block_tables=address(block_tables, np.int32),
            query_starts=address(query_starts, np.int32),
            lengths=address(lengths, np.int32),
            logits_rows=None if logits_rows is None else address(logits_rows, np.int64),
            cache=cache.data.ctypes.data,
            num_blocks=cache.num_blocks,
            layer_stride_blocks=cache.layer_stride_blocks,
            block_size=cache.block_size,
            hidden=None if hidden is None else address(hidden, np.float32),
            logits=None if logits is None else address(logits, np.float32),
            argmax=None if likeliest is None else address(likeliest[0], np.int64),
            is_broken=None if likeliest is None else address(likeliest[1], np.bool_),
        )
        if self._before_step is not None:
            self._before_step()
        self._check(self._library.millrace_step(self._model, ctypes.byref(inputs)))
        self._note_shares()

    def decode(self, rows: Any, num_rows: int, *wanted: int | None) -> bool:
        """As `step`, by a reference to a `library.Decoding`, to the addresses of what is `wanted`: logits, or None,
        likeliest tokens, and which rows are broken. For a `Decoding`. False, and nothing was done, if a row reads a
        token of its prompt."""
        if self._before_step is not None:
            self._before_step()
        problem = self._library.millrace_decode(self._model, rows, num_rows, *wanted)
        return self._is_done(problem)

    @property
    def step_thread_id(self) -> int:
        """The system's id of the thread that begins each step; 0: that is whoever calls."""
        return int(self._library.millrace_step_thread_id(self._model))

    def keep(self, *arrays: Array) -> None:
        """These are read while steps run that nobody waits for, so they last as long as the model."""
        self._kept.extend(arrays)

    def begin(self, number: int, rows: Any, asked: Any, num_rows: int) -> None:
        """Puts a decoding step with the choice of its tokens in line, by references to a `Decoding` and an `Asked`: for
        a `Chain`."""
        self._check(self._library.millrace_begin(self._model, number, rows, asked, num_rows))

    def follow(self, number: int, rows: Any, asked: Any, num_rows: int) -> bool:
        """The same, but only right behind step `number - 1`: whether it is."""
        return bool(self._library.millrace_follow(self._model, number, rows, asked, num_rows))

    def wait(self, number: int, num_rows: int, token_ids: int, is_broken: int) -> bool:
        """What a step came to, written to those addresses. False, and nothing was done, if a row reads a token of its
        prompt, or one of a step that it follows."""
        if self._before_step is not None:
            self._before_step()
        problem = self._library.millrace_wait(self._model, number, num_rows, token_ids, is_broken)
        return self._is_done(problem)

    def drain(self) -> None:
        """Returns when nothing is in line."""
        self._library.millrace_drain(self._model)

    def _is_done(self, problem: int) -> bool:
        """Whether a decoding step was computed; False if a row reads a token of its prompt."""
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
        """From now on each step calls `call()` when all is ready, right before its caller lets go of the interpreter
        lock to wait for it."""
        self._before_step = call

    def time_phases(self) -> Longs:
        """From now on each step adds to what this returns: nanoseconds of its products with weights, of its attention
        and of the rest, until the last thread was through with each, and 1. Norms of few rows are within products. A
        clock is read up to nine times a layer."""
        if self._phase_times is None:
            self._phase_times = np.zeros(4, np.int64)
            self._library.millrace_time_phases(self._model, self._phase_times.ctypes.data)
        return self._phase_times

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
        self._check(self._library.millrace_sample(self._model, asked, choices))

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


def _delete(library: ctypes.CDLL, model: int, kept: list[Array]) -> None:
    """When nothing runs any more, `kept` may go, too. Nobody may be waiting for a step then."""
    library.millrace_model_delete(model)


def address(array: Array, dtype: type[np.generic]) -> int:
    """Where the numbers of an array are, that is contiguous and of that type."""
    assert array.dtype == dtype and array.flags.c_contiguous, f"{array.dtype} {array.strides}: not contiguous {dtype}"
    return int(array.ctypes.data)
