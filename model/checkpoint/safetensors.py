"""Memory-mapped safetensors, whose headers are checked before any tensor is used. No pickle and no torch.

A checkpoint is one `model.safetensors`, or several shards with a `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, quoted, shown
from ..families.wrappers import OTHER_HALVES
from ..files import checkpoint_file, read_json
from ..foreign import describe_folder
from ..gguf.folder import is_gguf_folder
from ..named_tensors import NamedTensors, StoredPiece

HEADER_BYTES = 8 << 20  # largest header read; 126 layers of a decoder take about 0.2 MB
NUM_AXES = 64  # most axes of a tensor
# Private, as torch wants to be able to write; without a reservation of swap, as a file may be larger than the memory
# that its weights take after quantization (0x4000 is Linux's MAP_NORESERVE, which Python names from 3.13 on).
MAP_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
BFLOAT16 = np.dtype(np.uint16)  # stands for bfloat16, which numpy lacks: the upper 16 bits of a float32
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
}
RAW_DTYPES: dict[str, np.dtype[Any]] = DTYPES | {  # of codes and scales, whose numbers a quantized format tells
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
OTHER_BITS = {  # of a number in the format's other dtypes, in which no weight is read
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("U32", "I32"), 32),
    **dict.fromkeys(("U64", "I64", "C64"), 64),
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint(NamedTensors[tuple["Shard", str]]):
    """All tensors of a checkpoint by name, read from the memory map on access.

    The constructor checks all headers and raises CheckpointError naming file and tensor, so later only the disk can
    fail. `warnings` say what is unusual about the files. A tensor in several shards is that of the last.
    """

    def __init__(self, root: Path, files: Sequence[str | Shard] | None = None) -> None:
        """`files`: names of files in `root` that hold it, where they are not those of a model."""
        super().__init__(root)  # places: the shard, and the name in it
        names = _shard_names(root) if files is None else list(files)
        if names == [WHOLE] and checkpoint_file(root, INDEX) is not None:
            self.warnings.append(f"{INDEX} is not used, because {WHOLE} is there")
        for shard in [one if isinstance(one, Shard) else Shard(root, one) for one in names]:
            for tensor in shard.entries:
                if tensor in self._places:
                    before = self._places[tensor][0].name
                    self.warnings.append(f"tensor {shown(tensor)} is in {before} and {shard.name}; the last is used")
                self._places[tensor] = shard, tensor

    def where(self, name: str) -> str:
        """The file that holds a tensor, for error messages."""
        return self._places[name][0].name

    def pieces(self, name: str) -> list[StoredPiece]:
        shard, stored = self._places[name]
        return [StoredPiece(f"{shard.name}/{stored}", shard.name, shard.entries[stored].num_bytes)]

    def dtype(self, name: str) -> str:
        """The dtype by the format's name; weights have one of DTYPES."""
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def is_mapped(self, name: str) -> bool:
        """Whether `array` is a view of the map. The array of a misaligned tensor, or of float64, is a copy."""
        entry = self._entry(name)
        return entry.is_aligned and entry.dtype != "F64"

    def array(self, name: str) -> NDArray[Any]:
        """The tensor as stored; bfloat16 has the dtype `BFLOAT16`, and float64 is converted to float32.

        Do not write to it: it may be a view of the map.
        """
        shard, stored = self._places[name]
        return shard.array(stored)

    def raw(self, name: str) -> NDArray[Any]:
        """The tensor in the type of its storage, of `RAW_DTYPES`: 8-bit floats are bytes. Do not write to it."""
        entry = self._entry(name)
        if entry.dtype not in RAW_DTYPES:
            raise CheckpointError(f"{self.where(name)} ({self.root}): tensor {shown(name)}: {entry.dtype} is not read")
        shard, stored = self._places[name]
        return shard.raw(stored)

    def forget(self, name: str) -> None:
        """Drops the tensor's pages from this process, once it is copied. A later access reads them again."""
        shard, stored = self._places[name]
        shard.forget(stored)

    def _entry(self, name: str) -> TensorEntry:
        shard, stored = self._places[name]
        return shard.entries[stored]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in its file."""

    dtype: str  # by the format's name
    shape: tuple[int, ...]
    begin: int  # in the file
    num_bytes: int

    @property
    def is_aligned(self) -> bool:
        return self.begin % RAW_DTYPES[self.dtype].itemsize == 0


class Shard:
    """One mapped safetensors file: eight bytes of header length, a JSON header, and the tensors back to back."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        path = checkpoint_file(root, name)
        if path is None:
            raise CheckpointError(f"{name} ({root}): {INDEX} names this shard, but there is no such file")
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    self._fail(f"{size} bytes is too short for a safetensors file")
                self._map = mmap.mmap(file.fileno(), 0, flags=MAP_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise CheckpointError(f"{name} ({root}): cannot be mapped into memory: {error.strerror}") from None
        self._read_header(size, lambda begin, end: self._map[begin:end])

    def _read_header(self, size: int, read: Callable[[int, int], bytes]) -> None:
        """Reads and checks the header of a file of `size` bytes; `read` gives a range of them."""
        if size < 8:
            self._fail(f"{size} bytes is too short for a safetensors file")
        header_bytes = int.from_bytes(read(0, 8), "little")
        if not 2 <= header_bytes <= size - 8:
            self._fail(f"its header claims {header_bytes} bytes of a file of {size}")
        if header_bytes > HEADER_BYTES:
            self._fail(f"its header claims {header_bytes} bytes, and at most {HEADER_BYTES} are read")
        self.entries = self._entries(self._header(read(8, 8 + header_bytes)), 8 + header_bytes, size)

    def array(self, name: str) -> NDArray[Any]:
        array = self.raw(name)
        return array.astype(np.float32) if self.entries[name].dtype == "F64" else array

    def raw(self, name: str) -> NDArray[Any]:
        entry = self.entries[name]
        raw = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.begin)
        if not entry.is_aligned:
            raw = raw.copy()
        return raw.view(RAW_DTYPES[entry.dtype]).reshape(entry.shape)

    def forget(self, name: str) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):  # no Linux
            return
        entry = self.entries[name]
        begin = -(-entry.begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages, as other tensors share the ends
        end = (entry.begin + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _header(self, raw: bytes) -> dict[str, Any]:
        try:
            header = json.loads(raw, object_pairs_hook=self._object)
        except (ValueError, RecursionError) as error:
            self._fail(f"its header is not valid JSON: {error}")
        if not isinstance(header, dict):
            self._fail("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object of the header, without twins."""
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                self._fail(f"its header names {shown(key)} twice")
            found[key] = value
        return found

    def _entries(self, header: dict[str, Any], data_begin: int, size: int) -> dict[str, TensorEntry]:
        """The tensors in file order. They must tile the file, without overlap, gap or rest."""
        entries: dict[str, TensorEntry] = {}
        position = 0
        rows = [(*self._offsets(name, value), name, value) for name, value in header.items()]
        rows.sort(key=itemgetter(0, 1))
        for begin, end, name, value in rows:
            dtype, shape = self._dtype(name, value), self._shape(name, value)
            if (end - begin) * 8 != math.prod(shape) * _num_bits(dtype):
                self._fail(f"tensor {shown(name)}: {quoted(list(shape))} of {dtype} does not take {end - begin} bytes")
            if begin != position:
                place = f"begins at byte {begin}, but the tensor before it ends at {position}"
                self._fail(f"tensor {shown(name)}: {place}")
            entries[name] = TensorEntry(dtype, shape, data_begin + begin, end - begin)
            position = end
        if data_begin + position != size:
            self._fail(f"its tensors end at byte {data_begin + position} of {size}; the file is cut or has grown")
        return entries

    def _dtype(self, name: str, value: dict[str, Any]) -> str:
        stored = value.get("dtype")
        if not isinstance(stored, str) or (stored not in DTYPES and stored not in OTHER_BITS):
            known = ", ".join([*DTYPES, *OTHER_BITS])
            self._fail(f"tensor {shown(name)}: dtype {quoted(stored)} is unknown; known: {known}")
        return stored

    def _shape(self, name: str, value: dict[str, Any]) -> tuple[int, ...]:
        shape = value.get("shape")
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            self._fail(f"tensor {shown(name)}: shape {quoted(shape)} is not a list of counts")
        if len(shape) > NUM_AXES:
            self._fail(f"tensor {shown(name)}: its shape has {len(shape)} axes, and at most {NUM_AXES} are read")
        return tuple(shape)

    def _offsets(self, name: str, value: Any) -> tuple[int, int]:
        offsets = value.get("data_offsets") if isinstance(value, dict) else None
        if isinstance(offsets, list) and len(offsets) == 2:
            begin, end = offsets
            if type(begin) is int and type(end) is int and 0 <= begin <= end < 2**63:
                return begin, end
        self._fail(f"tensor {shown(name)}: data_offsets {quoted(offsets)} are not [begin, end)")

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.name}: {problem}; fetch the file again")


def _num_bits(dtype: str) -> int:
    return OTHER_BITS[dtype] if dtype in OTHER_BITS else 8 * DTYPES[dtype].itemsize


def _shard_names(root: Path) -> list[str]:
    """The safetensors files that make up the checkpoint, in order: one whole file, else those that the index names."""
    if checkpoint_file(root, WHOLE) is not None:
        return [WHOLE]
    index = read_json(root, INDEX)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{INDEX} ({root}): weight_map: must map tensors to file names, not {quoted(weight_map)}"
            )
        for tensor, name in weight_map.items():
            if not is_shard_name(name):
                raise CheckpointError(
                    f"{INDEX} ({root}): weight_map: {shown(tensor)}: must be the name of a safetensors file in this "
                    f"folder, not {quoted(name)}"
                )
        return needed_shards(weight_map)
    if (root / "stream.json").is_file():
        raise CheckpointError(
            f"{root}: its weights are left where they are, and models that run through transformers read files; leave "
            "out load_format = stream"
        )
    if is_gguf_folder(root):
        raise CheckpointError(
            f"{root}: stands for a GGUF file, whose weights only the decoders here read; leave out "
            "model_impl = transformers"
        )
    foreign = describe_folder(root)
    if foreign is not None:
        raise CheckpointError(foreign)
    others = sorted(path.name for pattern in PICKLES for path in root.glob(pattern))
    if others:
        raise CheckpointError(
            f"{root}: unsupported weight format: {others[0]}; only safetensors are loaded, as other formats can run "
            "code or lose names; convert the checkpoint, or choose a revision that has model.safetensors"
        )
    raise CheckpointError(f"{root}: no {WHOLE} and no {INDEX}")


def needed_shards(weight_map: Mapping[str, str]) -> list[str]:
    """The shards of an index that hold a tensor of a text model: those of a vision tower alone are left out."""
    needed = {shard for tensor, shard in weight_map.items() if not _is_of_other_half(tensor)}
    return sorted(needed or set(weight_map.values()))


def _is_of_other_half(tensor: str) -> bool:
    return tensor.removeprefix("model.").partition(".")[0] in OTHER_HALVES


def is_shard_name(value: object) -> bool:
    return isinstance(value, str) and value.endswith(".safetensors") and is_plain_name(value)


def is_plain_name(name: str) -> bool:
    """Whether a name of a file stays inside a folder, on any system."""
    if "\\" in name or not name.isprintable() or len(name) > 255:
        return False
    return not any(part in ("", ".", "..") for part in name.split("/"))
