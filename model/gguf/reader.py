"""The header of a GGUF file, checked before any tensor is used; every length is compared with the file first.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Values are ints,
floats, booleans, strings, lists of strings, and numpy arrays of the others. A file may be one of several, whose names
end in -00001-of-00005.gguf.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, quoted, shown
from .blocks import BLOCKS, name_of_type

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9  # types of values
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING_BYTES = 64 << 20  # longest string read
NUM_AXES = 4
KEY_BYTES = 65_535
ALIGNMENT, MOST_ALIGNMENT = 32, 1 << 20
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

LENGTH = struct.Struct("<Q")

Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Where a tensor lies in its file."""

    type: str  # as Q4_K
    shape: tuple[int, ...]  # outermost first; the last axis is packed
    begin: int  # in the file
    num_bytes: int


class GgufFile:
    """One mapped file. Raises CheckpointError naming the file, the key or tensor, and the numbers.

    Without `with_texts`, lists of texts are passed over and empty: that takes a fifth of the time.
    """

    def __init__(self, path: Path, with_texts: bool = True) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    self.fail(f"{self.size} bytes is too short for a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        except OSError as error:
            raise CheckpointError(f"{path.name}: cannot be mapped into memory: {error.strerror}") from None
        header = _Header(self._map, self.size, self.fail, with_texts)
        self.metadata: Metadata = header.metadata
        self.tensors: dict[str, PackedTensor] = header.tensors

    def fail(self, problem: str, instead: str = "fetch the file again") -> NoReturn:
        raise CheckpointError(f"{self.path.name}: {problem}; {instead}")

    def packed(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, a view of the map."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.begin)

    def forget(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Drops a tensor's pages, or those of its bytes [begin, end), from this process; an access reads them again."""
        tensor = self.tensors[name]
        end = tensor.begin + (tensor.num_bytes if end is None else end)
        begin = -(-(tensor.begin + begin) // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages: others share the ends
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def open_files(path: Path) -> list[GgufFile]:
    """The file, or all parts of a model that is split over several, of which any may be named."""
    paths = parts_of(path)
    files = [GgufFile(part) for part in paths]
    for file in files:
        _check_split(file, len(paths))
    names: set[str] = set()
    for file in files:
        if twice := names & file.tensors.keys():
            raise CheckpointError(f"{file.path.name}: tensor {shown(min(twice))} is in another part too")
        names |= file.tensors.keys()
    return files


def part_names(name: str) -> list[str]:
    """The names of all files of the model of which `name` is one, in order."""
    match = SPLIT.fullmatch(name)
    if match is None or not int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def parts_of(path: Path) -> list[Path]:
    """The files of the model of which `path` is one, in order. Raises CheckpointError for a part that is missing."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if not paths:
        raise CheckpointError(f"{path.name}: names itself a part of 0 files")
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.name}: one of {count} files, of which {len(missing)} are missing: {missing[0]}; put all parts "
            "into one folder"
        )
    return paths


def _check_split(file: GgufFile, count: int) -> None:
    told = file.metadata.get("split.count", 1)
    if not isinstance(told, int) or told not in (count, 0):
        raise CheckpointError(
            f"{file.path.name}: split.count = {quoted(told)}, and its name says that it is one of {count} files; keep "
            "the names that the files were published with"
        )


class _Header:
    """The key-value pairs and the table of tensors."""

    def __init__(self, raw: mmap.mmap, size: int, fail: Callable[..., NoReturn], with_texts: bool) -> None:
        self._raw, self._size, self._fail, self._with_texts = raw, size, fail, with_texts
        self.place = 0
        if self._bytes(4) != MAGIC:
            fail("does not begin with GGUF, so it is no GGUF file")
        version = self._number("<I")
        if version not in VERSIONS:
            if version & 0xFFFF == 0 and version:
                fail("a big-endian GGUF file, and only little-endian ones are read")
            fail(f"version {version} of the format, and only 2 and 3 are read")
        num_tensors, num_pairs = self._number("<Q"), self._number("<Q")
        self._check_count(num_pairs, 13, "key-value pairs")
        self._check_count(num_tensors, 28, "tensors")
        self.metadata: Metadata = {}
        for _ in range(num_pairs):
            key = self._text(KEY_BYTES, "a key")
            if key in self.metadata:
                fail(f"its header has the key {shown(key)} twice")
            self.metadata[key] = self._value(self._number("<I"), key)
        self.tensors = self._table(num_tensors)

    def _table(self, num_tensors: int) -> dict[str, PackedTensor]:
        infos: dict[str, tuple[int, tuple[int, ...], int]] = {}  # by name: type, shape, offset
        for _ in range(num_tensors):
            name = self._text(KEY_BYTES, "the name of a tensor")
            if name in infos:
                self._fail(f"its header has the tensor {shown(name)} twice")
            num_axes = self._number("<I")
            if not 1 <= num_axes <= NUM_AXES:
                self._fail(f"tensor {shown(name)} has {num_axes} axes, and 1 to {NUM_AXES} are read")
            axes = [self._number("<Q") for _ in range(num_axes)]
            infos[name] = self._number("<I"), tuple(reversed(axes)), self._number("<Q")
        begin = self._data_begin()
        tensors: dict[str, PackedTensor] = {}
        end_before = 0
        for name, (kind, shape, offset) in sorted(infos.items(), key=lambda item: item[1][2]):
            type_name = name_of_type(kind)
            if type_name not in BLOCKS:
                known = ", ".join(BLOCKS)
                self._fail(
                    f"tensor {shown(name)}: its type {type_name} is not read; read are {known}",
                    "serve a file of the model in another type, as Q4_K_M",
                )
            block = BLOCKS[type_name]
            if shape[-1] % block.size or not all(shape):
                self._fail(f"tensor {shown(name)}: {list(shape)} is not whole blocks of {block.size} of {type_name}")
            num_bytes = math.prod(shape) // block.size * block.num_bytes
            if offset % self._alignment or offset < end_before:
                self._fail(f"tensor {shown(name)} begins at {offset}, inside another or off {self._alignment} bytes")
            end_before = offset + num_bytes
            if begin + end_before > self._size:
                self._fail(f"tensor {shown(name)} ends at byte {begin + end_before} of {self._size}; the file is cut")
            tensors[name] = PackedTensor(type_name, shape, begin + offset, num_bytes)
        return tensors

    def _data_begin(self) -> int:
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        is_power = isinstance(alignment, int) and 0 < alignment <= MOST_ALIGNMENT and alignment & (alignment - 1) == 0
        if not is_power:
            self._fail(f"general.alignment = {quoted(alignment)}: must be a power of two, at most {MOST_ALIGNMENT}")
        self._alignment = int(alignment)
        return -(-self.place // self._alignment) * self._alignment

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._text(STRING_BYTES, shown(key))
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            self._fail(f"{shown(key)}: a value of the unknown type {kind}")
        return self._number(SCALARS[kind])

    def _array(self, key: str) -> list[str] | NDArray[Any]:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == STRING:
            self._check_count(count, 8, shown(key))
            return self._texts(count, key)
        if kind not in SCALARS:
            self._fail(f"{shown(key)}: an array of the type {kind}, and arrays hold numbers, booleans or strings")
        layout = SCALARS[kind]
        self._check_count(count, struct.calcsize(layout), shown(key))
        raw = self._bytes(count * struct.calcsize(layout))
        return np.frombuffer(raw, np.dtype(layout))

    def _texts(self, count: int, key: str) -> list[str]:
        """Texts in a row, as `_text` reads each, without a call for each."""
        raw, size, place, texts, length_at = self._raw, self._size, self.place, [], LENGTH.unpack_from
        for _ in range(count):
            begin = place + 8
            if begin > size:
                break
            (length,) = length_at(raw, place)
            if length > STRING_BYTES or begin + length > size:
                break
            if self._with_texts:
                try:
                    texts.append(raw[begin : begin + length].decode())
                except UnicodeDecodeError:
                    break
            place = begin + length
        else:
            self.place = place
            return texts
        self.place = place
        self._text(STRING_BYTES, shown(key))  # says what is wrong with it
        raise AssertionError("a text that cannot be read was read")

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._size - self.place:
            self._fail(f"{what}: claims {count} items, and {self._size - self.place} bytes are left")

    def _number(self, layout: str) -> Any:
        count = struct.calcsize(layout)
        if self.place + count > self._size:
            self._fail(f"its header ends at byte {self._size}, in the middle of a number; the file is cut")
        (value,) = struct.unpack_from(layout, self._raw, self.place)
        self.place += count
        return value

    def _bytes(self, count: int) -> bytes:
        if self.place + count > self._size:
            self._fail(f"its header claims {count} bytes at {self.place} of {self._size}; the file is cut")
        begin, self.place = self.place, self.place + count
        return self._raw[begin : self.place]

    def _text(self, most: int, what: str) -> str:
        length = self._number("<Q")
        if length > most:
            self._fail(f"{what}: claims a text of {length} bytes, and at most {most} are read")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what}: not valid UTF-8: {error.reason} at byte {error.start}")
