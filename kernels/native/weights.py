"""The weights of a model in the library: tensors of a checkpoint, packed as products read them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from ..layout.grouped_codes import GroupedCodes, GroupedFormat
from . import grouped, library, tensors
from .errors import NonFiniteError
from .library_model import LibraryModel
from .shape import Array, DType, Floats, Ints, NativeShape, Quantization
from .structs import NUMBER_TYPES


class NativeWeights:
    """The weights of a decoder, by the names that checkpoints give them.

    Set all tensors before the first step, then call `encode_bf16_12bit` if it pays.
    """

    def __init__(
        self,
        model: LibraryModel,
        shape: NativeShape,
        dtype: DType,
        quantization: Quantization | None,
        formats: Mapping[str, GroupedFormat],
    ) -> None:
        """`formats`: of the matrices in groups of codes, those of `set_rows` or of the setting int4."""
        self.dtype, self.quantization, self.formats = dtype, quantization, dict(formats)
        self._owner, self._library, self._model = model, model.library, model.pointer
        self._shape = shape
        self._are_coded = False
        self._factors: dict[str, float] = {}  # of the scales, by product
        self._columns: dict[str, Ints | None] = {}  # their order, by product
        if self.formats:
            grouped.set_formats(self._library, self._model, shape, self.formats)

    # -- tensors

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
            one.type = NUMBER_TYPES[dtype or {"uint16": "bfloat16"}.get(str(source.dtype), str(source.dtype))]
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
        num_columns = grouped.num_columns(self._shape, name)
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

    # -- forms and sizes

    def type_of(self, name: str) -> str:
        """Storage type of a checkpoint's tensor: `dtype`, "int8" or "int4"."""
        if self.quantization is None or not tensors.is_matrix(name, self._shape.is_tied):
            return self.dtype
        return "int8" if tensors.is_of_model(name) else self.quantization

    def has_screen(self, name: str) -> bool:
        """Whether the tensor gets an int8 copy: see `screen_bytes`."""
        is_head = name == ("model.embed_tokens.weight" if self._shape.is_tied else "lm_head.weight")
        return is_head and bool(self._library.millrace_can_screen(self._model))

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        return int(self._library.millrace_weights_bytes(self._model))

    @property
    def num_token_bytes(self) -> int:
        """Memory of the packed weights without experts that a token does not go to: what a step of one token reads."""
        return int(self._library.millrace_token_weights_bytes(self._model))

    @property
    def screen_bytes(self) -> int:
        """Memory of the argmax screen: an int8 copy of the head; 0: there is none.

        Steps that return argmax tokens of up to 512 rows multiply the copy, and little of the head.
        """
        return int(self._library.millrace_screen_bytes(self._model))

    # -- for tests

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
        self._owner.check(self._library.millrace_product(self._model, *place, x.ctypes.data, len(x), out.ctypes.data))
        return out


def _are_equal(one: Ints | None, other: Ints | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)
