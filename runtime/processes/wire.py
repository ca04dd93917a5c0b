"""The encoding of messages between processes.

A message is a dataclass of a type that both ends have listed. It contains plain values, containers and numpy arrays. It
is encoded as a JSON header, in which every container is a list that begins with a tag, followed by the arrays' bytes.
Decoding builds listed types only and runs no code of the sender: no pickle, no module names.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self, cast

import numpy as np
import orjson

Buffer = bytes | memoryview

LIST, TUPLE, DICT, SET, ARRAY, BYTES, FLOAT = range(7)  # tags; those of listed types follow
FIRST_TYPE = 16
ALIGNMENT = 8  # of arrays behind the header: numpy and native code read them in place

_DTYPES = ("<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "<f8", "<f4", "<f2", "|b1")
_DTYPES_BY_CODE = [np.dtype(name) for name in _DTYPES]
_CODES = {np.dtype(char).num: _DTYPES_BY_CODE.index(np.dtype(char)) for char in "?bBhHiIlLqQefd"}  # by number: fast
_MAX_DIMENSIONS = 32  # of an array
_COPIED_BYTES = 1 << 16  # arrays up to this size are copied, which is faster than making a view
_PLAIN = frozenset({int, str, bool, type(None)})
_PADDING = tuple(bytes(count) for count in range(ALIGNMENT))


class WireError(ValueError):
    """A value that cannot be encoded, or bytes that are not a message.

    The error text says which.
    """


class Codec:
    """Encodes messages of the listed `types` (dataclasses and enums), and decodes them.

    Both ends list the same, in the same order; `type_fields.py` has the codec for an end that lists others.
    """

    def __init__(self, types: Sequence[type]) -> None:
        self.types = tuple(types)
        if len({kind.__name__ for kind in types}) < len(types):
            raise TypeError("two types to encode have the same name")
        self._fields = {kind: field_names(kind) for kind in types}
        self._tags = {kind: FIRST_TYPE + place for place, kind in enumerate(types)}
        self._readers = [make_reader(kind, names) for kind, names in self._fields.items()]
        self._moments = [moment_places(kind, names) for kind, names in self._fields.items()]

    def shifted(self, seconds: float) -> Self:
        """A codec that adds `seconds` to each `Moment` of the messages that it decodes."""
        other = copy.copy(self)
        other._readers = [
            _shifting(reader, places, seconds) if places else reader
            for reader, places in zip(self._readers, self._moments, strict=True)
        ]
        return other

    def encode(self, message: Any) -> tuple[bytes, list[Buffer]]:
        """(header, body buffers). The body's length is a multiple of ALIGNMENT.

        Large arrays are not copied: send before they change.
        """
        buffers: list[Buffer] = []
        try:
            return orjson.dumps(self._pack(message, buffers)), buffers
        except (TypeError, orjson.JSONEncodeError) as error:  # such as an integer of more than 64 bits
            raise WireError(f"{type(message).__name__} cannot be encoded: {error}") from None

    def decode(self, header: Buffer, body: Buffer) -> Any:
        """The message. Its arrays are read-only views of `body`.

        Raises `WireError` if it is not a valid message.
        """
        try:
            reading = _Reading(self._readers, body)
            message = reading.unpack(orjson.loads(header))
        except WireError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            raise WireError(f"not a message: {type(error).__name__}: {str(error)[:200]}") from None
        except Exception as error:  # a type's own check of its values
            raise WireError(f"an invalid message: {type(error).__name__}: {str(error)[:200]}") from None
        if reading.offset != len(body):
            raise WireError(f"{len(body)} bytes after the header, of which the message takes {reading.offset}")
        return message

    def _pack(self, value: Any, buffers: list[Buffer]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else [FLOAT, repr(value)]
        if kind is np.ndarray:
            return _pack_array(value, buffers)
        tag = self._tags.get(kind)
        if tag is not None:
            if issubclass(kind, enum.Enum):
                return [tag, value.value]
            packed = [tag]
            for name in self._fields[kind]:
                part = getattr(value, name)
                packed.append(part if type(part) in _PLAIN else self._pack(part, buffers))
            return packed
        if kind is tuple:
            return [TUPLE, *(self._pack(item, buffers) for item in value)]
        if kind is list:
            return [LIST, *(self._pack(item, buffers) for item in value)]
        return self._pack_rarely(value, buffers)

    def _pack_rarely(self, value: Any, buffers: list[Buffer]) -> Any:
        if isinstance(value, Mapping):
            return [DICT, *(self._pack(part, buffers) for pair in value.items() for part in pair)]
        if isinstance(value, (frozenset, set)):
            return [SET, *(self._pack(item, buffers) for item in sorted(value))]
        if isinstance(value, (bytes, bytearray)):
            _put(bytes(value), buffers)
            return [BYTES, len(value)]
        if isinstance(value, np.generic):
            return self._pack(value.item(), buffers)
        if isinstance(value, tuple):
            return [TUPLE, *(self._pack(item, buffers) for item in value)]
        raise WireError(f"type {type(value).__name__} cannot be encoded: it is not in the list that both ends share")


class _Reading:
    """The decoding of one message."""

    def __init__(self, readers: Sequence[Callable[[list[Any]], Any]], body: Buffer) -> None:
        self._readers = readers
        self._body = memoryview(body)
        self.offset = 0  # of the next byte to take

    def unpack(self, tree: Any) -> Any:
        if type(tree) is not list:
            if type(tree) is dict:
                raise WireError("a JSON object in a header: containers are lists with a tag")
            return tree
        tag = tree[0]
        if type(tag) is not int or tag < 0:
            raise WireError(f"tag {tag!r}: must be a number from 0")
        if tag >= FIRST_TYPE:
            values = tree[1:]
            for place, part in enumerate(values):
                if type(part) is list:
                    values[place] = self.unpack(part)
            return self._readers[tag - FIRST_TYPE](values)
        if tag == ARRAY:
            return self._array(tree[1], tree[2:])
        if tag == BYTES:
            return bytes(self._take(tree[1]))
        if tag == FLOAT:
            return float(tree[1])
        items = tree[1:]
        try:
            sum(items)  # numbers alone, such as a histogram's: the fastest way to see that there is nothing to unpack
        except TypeError:
            items = [item if type(item) in _PLAIN else self.unpack(item) for item in items]
        if tag == LIST:
            return items
        if tag == TUPLE:
            return tuple(items)
        if tag == SET:
            return frozenset(items)
        if tag == DICT:
            return dict(zip(items[::2], items[1::2], strict=True))
        raise WireError(f"tag {tag} is unknown")

    def _array(self, code: Any, shape: list[Any]) -> Any:
        if type(code) is not int or not 0 <= code < len(_DTYPES):
            raise WireError(f"array of dtype {code!r} is unknown")
        dtype = _DTYPES_BY_CODE[code]
        if len(shape) == 1:  # `_take` checks that it is a size
            count = shape[0]
            return np.frombuffer(self._take(count * dtype.itemsize), dtype, count)
        if len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
            raise WireError(f"array of {len(shape)} dimensions, {shape[:8]!r}: must be at most {_MAX_DIMENSIONS} sizes")
        count = math.prod(shape)
        return np.frombuffer(self._take(count * dtype.itemsize), dtype, count).reshape(shape)

    def _take(self, num_bytes: Any) -> Buffer:
        begin = self.offset
        if not _is_size(num_bytes) or begin + num_bytes > len(self._body):
            raise WireError(f"{num_bytes!r} bytes of an array at {begin}: the message has {len(self._body)}")
        self.offset = begin + num_bytes + -num_bytes % ALIGNMENT
        return self._body[begin : begin + num_bytes]


def _pack_array(array: Any, buffers: list[Buffer]) -> list[int]:
    code = _CODES.get(array.dtype.num)
    if code is None or _DTYPES_BY_CODE[code] != array.dtype:
        raise WireError(f"an array of dtype {array.dtype} cannot be encoded: must be numbers of fixed size")
    if array.nbytes > _COPIED_BYTES:
        _put(np.ascontiguousarray(array).data.cast("B"), buffers)
    elif array.nbytes:
        _put(array.tobytes(), buffers)
    return [ARRAY, code, *array.shape]


def _put(data: Buffer, buffers: list[Buffer]) -> None:
    buffers.append(data)
    if rest := -len(data) % ALIGNMENT:
        buffers.append(_PADDING[rest])


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def field_names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass that its constructor takes; none for an enum."""
    if issubclass(kind, enum.Enum):
        return ()
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__}: a type to encode must be a dataclass or an enum")
    return tuple(spec.name for spec in dataclasses.fields(kind) if spec.init)


def make_reader(kind: type, names: tuple[str, ...]) -> Callable[[list[Any]], Any]:
    """A function that makes an object from the values of these fields; the other fields get their defaults."""
    if issubclass(kind, enum.Enum):
        return lambda values: kind(*values)

    if names == field_names(kind) and not any(spec.kw_only for spec in dataclasses.fields(cast(Any, kind))):
        return lambda values: kind(*values) if len(values) == len(names) else _wrong_number(kind)

    def read(values: Iterable[Any]) -> Any:
        return kind(**dict(zip(names, values, strict=True)))

    return read


def moment_places(kind: type, names: tuple[str, ...]) -> tuple[int, ...]:
    """Which of these fields are declared as `Moment`, or as `Moment | None`.

    Annotations are text where their evaluation is postponed, so they are searched as text.
    """
    if issubclass(kind, enum.Enum):
        return ()
    declared = {spec.name: str(spec.type) for spec in dataclasses.fields(cast(Any, kind))}
    return tuple(place for place, name in enumerate(names) if re.search(r"\bMoment\b", declared[name]))


def _shifting(
    reader: Callable[[list[Any]], Any], places: tuple[int, ...], seconds: float
) -> Callable[[list[Any]], Any]:
    def read(values: list[Any]) -> Any:
        for place in places:
            if place < len(values) and values[place] is not None:
                values[place] += seconds
        return reader(values)

    return read


def _wrong_number(kind: type) -> NoReturn:
    raise WireError(f"a {kind.__name__} with a wrong number of fields")
