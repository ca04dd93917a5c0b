"""Loads the native library for an instruction set of the machine.

Each call releases the GIL, except `millrace_follow`: the event loop calls it, and it takes less time than reacquiring
the GIL.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

from ..layout.sampling_fields import DRAWS
from . import build, machine
from .errors import NativeUnavailableError
from .library import (
    ExpertsStruct,
    FormatStruct,
    LayerStruct,
    RecurrentStruct,
    RowsStruct,
    ShapeStruct,
    declare_functions,
)

ENVIRONMENT = "MILLRACE_INSTRUCTION_SET"  # forces an instruction set, for tests
EMULATED = {"avx512_bf16_emulated": "avx512", "amx_emulated": "avx512_bf16"}  # what each needs; for tests


def choose_instruction_set(requested: str | None = None) -> str:
    """The requested instruction set, by argument or environment, or the best that the machine has.

    Raises NativeUnavailableError if the machine lacks the requested one, or all of them.
    """
    requested = requested_instruction_set(requested)
    available = machine.instruction_sets()
    if requested is not None and EMULATED.get(requested) in available:
        return requested
    if requested is not None and requested not in available:
        raise NativeUnavailableError(f"instruction set {requested}: this machine has {', '.join(available) or 'none'}")
    if not available:
        raise NativeUnavailableError("the native step needs AVX2 and FMA, or AVX-512, on Linux")
    return requested or available[0]


def requested_instruction_set(requested: str | None) -> str | None:
    """The requested instruction set, by argument or environment; None if there is none."""
    return requested or os.environ.get(ENVIRONMENT) or None


def load_best(requested: str | None = None) -> tuple[str, ctypes.CDLL]:
    """The instruction set of `choose_instruction_set` and its library. Raises NativeUnavailableError.

    Falls back to the next best instruction set if none is requested and the compiler is too old for the best.
    """
    chosen = choose_instruction_set(requested)
    failures = []
    for name in (chosen,) if requested_instruction_set(requested) else machine.instruction_sets():
        found = _load_once(name)
        if not isinstance(found, NativeUnavailableError):
            return name, found
        failures.append(found)
    raise failures[0]


@cache
def _load_once(instruction_set: str) -> ctypes.CDLL | NativeUnavailableError:
    """The library, or why there is none. Cached, so that a failing compiler runs once and not once per model."""
    try:
        return load(instruction_set)
    except NativeUnavailableError as error:
        return error


@cache
def load(instruction_set: str) -> ctypes.CDLL:
    """The library with its functions' types. Raises NativeUnavailableError if it is neither found nor built."""
    try:
        path = str(build.library_path(instruction_set))
        library = ctypes.CDLL(path)
        setattr(library, "millrace_follow", ctypes.PyDLL(path).millrace_follow)  # noqa: B010
    except (build.BuildError, OSError) as error:
        raise NativeUnavailableError(f"native library ({instruction_set}) not available: {error}") from None
    declare_functions(library)
    if not library.millrace_is_supported():
        raise NativeUnavailableError(f"instruction set {instruction_set}: the processor lacks it")
    structs = (ShapeStruct, LayerStruct, ExpertsStruct, RecurrentStruct, RowsStruct, FormatStruct)
    mirrored = tuple(map(ctypes.sizeof, structs))
    sizes = ("shape", "layer_shape", "experts_shape", "recurrent_shape", "rows", "format")
    compiled = tuple(getattr(library, f"millrace_{name}_bytes")() for name in sizes)
    assert mirrored == compiled, f"structs of {mirrored} bytes: the library has {compiled}"
    names = library.millrace_draw_fields().decode()
    assert names.split() == [field.name for field in DRAWS], f"sampling fields of the library: {names}"
    return library
