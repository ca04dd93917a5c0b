"""The fields of message types as each end of a link knows them, and the codec for what two versions share.

The hello of a link names the sender's types with their fields. A type has a place in that list, which is its tag, and
the sender leaves out the fields that the other end does not know. It may do so only while they have their defaults;
an end whose messages only report leaves them out in any case, as an older end cannot ask for what they tell.
A field with a default may thus be added or removed from one version to the next; one without cannot, and neither can
the meaning of a field change, but with a new version of the link.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .wire import Buffer, Codec, WireError, field_names, make_reader, moment_places

Reader = Callable[[list[Any]], Any]

MAX_TYPES = 1024
MAX_FIELDS = 1024  # of a type, or values of an enum


class VersionError(WireError):
    """A message that needs what the other end's version does not know. The text names it."""


@dataclass(frozen=True, slots=True)
class TypeFields:
    """One type: a dataclass with its fields, or an enum with its values."""

    name: str
    fields: tuple[str, ...] = ()  # in order
    required: frozenset[str] = frozenset()  # those without a default
    values: tuple[str | int, ...] | None = None  # of an enum

    @classmethod
    def of(cls, kind: type) -> TypeFields:
        if issubclass(kind, enum.Enum):
            return cls(kind.__name__, values=tuple(member.value for member in kind))
        names = field_names(kind)
        required = frozenset(spec.name for spec in dataclasses.fields(cast(Any, kind)) if _is_required(spec))
        return cls(kind.__name__, names, required & set(names))

    @classmethod
    def from_json(cls, value: Any) -> TypeFields:
        """Raises `WireError` if it is not what `to_json` returns."""
        match value:
            case [str(name), list(fields), list(required)] if _are_names(fields) and _are_names(required):
                return cls(name, tuple(fields), frozenset(required))
            case [str(name), list(values)] if len(values) <= MAX_FIELDS and all(type(x) in (str, int) for x in values):
                return cls(name, values=tuple(values))
        raise WireError(f"a type is {str(value)[:100]}: must be [name, fields, required fields] or [enum, values]")

    def to_json(self) -> list[Any]:
        if self.values is not None:
            return [self.name, list(self.values)]
        return [self.name, list(self.fields), [name for name in self.fields if name in self.required]]

    def shared_with(self, receiver: TypeFields) -> tuple[str, ...]:
        """The fields that cross from here to `receiver`, in the order here."""
        known = set(receiver.fields)
        return tuple(name for name in self.fields if name in known)

    def lacks(self, receiver: TypeFields) -> str | None:
        """A field that `receiver` cannot do without and that this end does not have."""
        return next((name for name in receiver.fields if name in receiver.required and name not in self.fields), None)


def describe(codec: Codec) -> list[Any]:
    """The types of a codec for the hello, as JSON."""
    return [TypeFields.of(kind).to_json() for kind in codec.types]


def codec_for(codec: Codec, described: Any, *, only_reports: bool = False) -> Codec:
    """The codec for an end whose hello has `described`: `codec` itself if both ends know the same.

    `only_reports`: fields that the other end does not know are left out whatever their values. Raises `WireError` if
    `described` is not what `describe` returns.
    """
    if described == describe(codec):
        return codec
    if not isinstance(described, list) or len(described) > MAX_TYPES:
        raise WireError(f"the types of a hello must be a list of at most {MAX_TYPES}")
    return PeerCodec(codec.types, [TypeFields.from_json(value) for value in described], only_reports)


class PeerCodec(Codec):
    """Encodes for an end of another version, and decodes what it sends."""

    def __init__(self, types: Sequence[type], there: Sequence[TypeFields], only_reports: bool = False) -> None:
        super().__init__(types)
        self._only_reports = only_reports
        by_name = {one.name: one for one in there}
        own = {kind.__name__: kind for kind in types}
        self._checks: dict[type, Callable[[Any], None]] = {}
        for kind in types:
            self._prepare(kind, TypeFields.of(kind), by_name.get(kind.__name__))
        readers = [_reader_of(own.get(one.name), one) for one in there]
        self._readers = [reader for reader, _ in readers]
        self._moments = [places for _, places in readers]

    def _pack(self, value: Any, buffers: list[Buffer]) -> Any:
        check = self._checks.get(type(value))
        if check is not None:
            check(value)
        return super()._pack(value, buffers)

    def _prepare(self, kind: type, here: TypeFields, there: TypeFields | None) -> None:
        """Sets how values of a type are encoded: with what fields, and when they are refused."""
        name = here.name
        if there is None or (there.values is None) is not (here.values is None):
            self._checks[kind] = _refusal(f"{name} cannot be sent: the other end's version does not know it")
        elif here.values is not None and there.values is not None:
            if unknown := set(here.values) - set(there.values):
                self._checks[kind] = lambda member: _check_value(member, unknown)
        elif (lacking := here.lacks(there)) is not None:
            self._checks[kind] = _refusal(
                f"{name} cannot be sent: the other end's version needs its field {lacking}, which this one lacks"
            )
        else:
            self._fields[kind] = here.shared_with(there)
            unknown_fields = [spec for spec in _init_fields(kind) if spec.name not in there.fields]
            if unknown_fields and not self._only_reports:
                self._checks[kind] = lambda value: self._check_defaults(value, unknown_fields)

    def _check_defaults(self, value: Any, unknown: Sequence[dataclasses.Field[Any]]) -> None:
        for spec in unknown:
            part = getattr(value, spec.name)
            if _is_required(spec) or _comparable(part) != _comparable(_default(spec)):
                raise VersionError(
                    f"{type(value).__name__} cannot be sent: the other end's version does not know its field "
                    f"{spec.name}, which is set to {_shown(part)}"
                )


def _reader_of(kind: type | None, there: TypeFields) -> tuple[Reader, tuple[int, ...]]:
    """How to decode values of the other end's type `there`, called `kind` here; and the places of its moments."""
    if kind is None:
        return _refusal(f"a {there.name} came, which this version does not know"), ()
    here = TypeFields.of(kind)
    if (here.values is None) is not (there.values is None):
        return _refusal(f"a {there.name} came, which is something else in this version"), ()
    if (lacking := there.lacks(here)) is not None:
        return _refusal(f"a {there.name} came without the field {lacking}, which this version needs"), ()
    names = there.shared_with(here)
    return make_reader(kind, names), moment_places(kind, names)


def _refusal(text: str) -> Reader:
    def refuse(value: Any) -> Any:
        raise VersionError(text)

    return refuse


def _check_value(member: enum.Enum, unknown: set[str | int]) -> None:
    if member.value in unknown:
        raise VersionError(f"{member} cannot be sent: the other end's version does not know it")


def _init_fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [spec for spec in dataclasses.fields(cast(Any, kind)) if spec.init]


def _is_required(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING


def _default(spec: dataclasses.Field[Any]) -> Any:
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def _comparable(value: Any) -> Any:
    """A form that is equal for equal values: messages and arrays have no equality, and a list may stand for a tuple."""
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {key: _comparable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), *(_comparable(getattr(value, spec.name)) for spec in _init_fields(type(value)))
    return "nan" if value != value else value


def _are_names(values: list[Any]) -> bool:
    return len(values) <= MAX_FIELDS and all(type(value) is str for value in values)


def _shown(value: Any) -> str:
    """The value if it is a number or alike; only its type otherwise, as it may be a user's text."""
    return repr(value) if isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"
