"""The C interface is as `library.py` says: the fields of structs, in order, and the functions, with their types."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.kernels.native import library, structs
from millrace.kernels.native.shape import NativeExperts, NativeLayer, NativeNorm, NativeQkNorm, NativeShape

SOURCE = Path(library.__file__).parent / "source"
MIRRORED = [each for each in vars(library).values() if isinstance(each, type) and issubclass(each, ctypes.Structure)]
MIRRORED = [each for each in MIRRORED if each is not ctypes.Structure]
NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}
ENUMS = {
    name for path in SOURCE.rglob("*.h") for name in re.findall(r"enum (?:class )?(\w+) : int32_t", path.read_text())
}


def place_of(struct: type[ctypes.Structure]) -> tuple[str, str]:
    """The name of the C struct and its file, as the docstring gives them."""
    found = re.fullmatch(r"`(\w+)` of source/(\S+)\.", struct.__doc__ or "")
    assert found, f"{struct.__name__}: {struct.__doc__}"
    return found[1], found[2]


def c_fields(name: str, file: str) -> Iterator[tuple[str, str, str]]:
    """(type, name, length of an array) of each field. Pointers are of the type `*`."""
    text = re.sub(r"//[^\n]*", "", (SOURCE / file).read_text())
    body = re.search(rf"\bstruct {name} \{{(.*?)\n\}};", text, re.S)
    assert body, f"{file} has no struct {name}"
    for statement in re.sub(r"\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", ";", body[1]).split(";"):
        declared = re.fullmatch(r"\s*(?:const )?(\w+)([ *]+\w.*)", statement.split(" = ")[0], re.S)
        if declared is None or "(" in statement:
            continue  # a method
        for one in declared[2].split(","):
            pointer, field, length = re.fullmatch(r"\s*(\**)\s*(\w+)(?:\[(\w+)\])?\s*", one).groups("")  # type: ignore[union-attr]
            yield pointer or declared[1], field, length


def expected_fields(name: str, file: str) -> Iterator[tuple[str, type]]:
    """The fields as ctypes has them."""
    structs_of = {place_of(struct)[0]: struct for struct in MIRRORED}
    for kind, field, length in c_fields(name, file):
        if kind == "GroupedFormat":  # a struct in it, whose fields `FormatStruct` has as its own
            yield from expected_fields("GroupedFormat", "grouped/format.h")
            continue
        found = ctypes.c_void_p if kind == "*" else structs_of.get(kind) or NUMBERS.get(kind)
        assert found or kind in ENUMS, f"{name}.{field}: {kind}"
        found = found or ctypes.c_int32
        yield field, found * library.MAX_KINDS if length == "MAX_KINDS" else found


@pytest.mark.parametrize("struct", MIRRORED, ids=lambda struct: struct.__name__)
def test_a_struct_mirrors_the_one_of_the_library_field_by_field(struct: type[ctypes.Structure]) -> None:
    expected = list(expected_fields(*place_of(struct)))
    assert expected and [(name, kind) for name, kind, *_ in struct._fields_] == expected


def c_functions() -> Iterator[tuple[str, str, list[str]]]:
    """(name, type of the result, types of arguments) of each function of the interface. Pointers are `T*`."""
    text = re.sub(r"//[^\n]*", "", (SOURCE / "step/api.cpp").read_text())
    for result, name, arguments in re.findall(r"^EXPORT (\w[\w ]*[ *]+)millrace_(\w+)\(([^)]*)\)", text, re.M):
        kinds = [re.sub(r"\w+$", "", one.strip()) for one in arguments.split(",") if one.strip()]
        yield name, *(_type_of(result), [_type_of(kind) for kind in kinds])  # type: ignore[misc]


def _type_of(words: str) -> str:
    return re.sub(r"\bconst\b|\s", "", words)


def is_as(kind: Any, c_type: str) -> bool:
    """Whether ctypes passes `kind` as the C type."""
    if c_type == "char*":
        return kind is ctypes.c_char_p
    if c_type.endswith("*"):
        struct = {place_of(each)[0]: each for each in MIRRORED}.get(c_type[:-1])
        numbers = {"int64_t*": ctypes.POINTER(ctypes.c_int64)}
        return kind in (ctypes.c_void_p, numbers.get(c_type)) if struct is None else kind is ctypes.POINTER(struct)
    return kind is (None if c_type == "void" else NUMBERS[c_type])


def test_each_function_of_the_library_is_declared_with_its_types() -> None:
    found = {name: (result, arguments) for name, result, arguments in c_functions()}
    assert found.keys() == library.FUNCTIONS.keys()
    for name, (result, arguments) in library.FUNCTIONS.items():
        c_result, c_arguments = found[name]
        assert is_as(result, c_result) and len(arguments) == len(c_arguments), name
        assert all(map(is_as, arguments, c_arguments)), f"{name}: {arguments}, and in C {c_arguments}"


def test_fields_are_the_attributes_by_the_same_name_and_0_where_there_is_none() -> None:
    experts = NativeExperts(num_experts=4, top_k=2, intermediate_size=6, activation="relu", clamp=(2.0, 3.0), scale=0.5)
    qk_norm = NativeQkNorm(norm=NativeNorm(kind="layer", eps=0.25), is_over_row=True)
    layer = NativeLayer(intermediate_size=8, window=5, qk_norm=qk_norm, experts=experts, post_mixer=None)
    others = replace(layer, experts=None, qk_norm=None, rope=None, window=None)
    shape = NativeShape(
        vocab_size=9, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2, layers=(layer, others), rotary_dims=(2,),
        is_tied=True, head_soft_cap=None, embedding_scale=1.5,
    )  # fmt: skip
    model = structs.of_shape(shape, dtype=1, linears=2, head=3, cache=0, group_size=32)
    assert (model.vocab_size, model.num_layers, model.is_tied, model.head_soft_cap) == (9, 2, 1, 0.0)
    assert (model.dtype, model.linears, model.head, model.cache, model.group_size) == (1, 2, 3, 0, 32)
    assert (model.embedding_scale, model.final_norm.kind, model.embedding_norm.kind) == (1.5, 1, 0)
    first, second = structs.of_layers(shape)
    assert (first.num_heads, first.num_kv_heads, first.window, first.rope, first.activation) == (2, 1, 5, 0, 0)
    assert (first.qk_norm.kind, first.qk_norm.eps, first.is_qk_norm_over_row, first.post_mixer.kind) == (2, 0.25, 1, 0)
    its = first.experts
    assert (its.num_experts, its.top_k, its.activation, its.alpha, its.limit, its.scale) == (4, 2, 3, 2.0, 3.0, 0.5)
    assert (second.window, second.rope, second.qk_norm.kind, second.experts.num_experts) == (0, -1, 0, 0)
