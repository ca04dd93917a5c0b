"""The kinds of rows in a table of another engine's flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Arguments = tuple[str, ...]
ANY = "*"  # in `SoAnyway.values`: whatever the value is


class FlagError(Exception):
    """A flag or value that cannot be accepted. The message says why, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A flag with a value that one of ours takes; `values` are those with another name here."""

    ours: str
    values: Mapping[str, str] = field(default_factory=dict)
    note: str = ""  # logged beside our flag, where the two differ


@dataclass(frozen=True, slots=True)
class Switch:
    """A flag without a value: our arguments with the same effect, and those for its `--no-` form."""

    on: Arguments
    off: Arguments | None = None  # None: it has no such form


@dataclass(frozen=True, slots=True)
class SoAnyway:
    """A flag that is accepted and changes nothing, as `why` says."""

    why: str
    values: tuple[str, ...] | None = None  # those that are accepted, in small letters; None: the flag has no value
    otherwise: str = ""  # what is said of other values, and of the `--no-` form; empty: there the same holds


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A flag that is not supported: the reason and the next step."""

    reason: str


@dataclass(frozen=True, slots=True)
class Read:
    """A flag whose value is JSON: `read` makes our arguments of it, or raises `FlagError`."""

    read: Callable[[Any], Arguments]
    note: str = ""


Row = Renamed | Switch | SoAnyway | Unsupported | Read
