"""Triton's interpreter without what it does again at each call of a function, and without a check that tells nothing.

It replaces the functions of `triton.language` by its own at each launch and at each call of a device function, and puts
them back after the launch. A process of the tests interprets all that it launches, so here they are replaced once. It
makes a table of all types to find one of numpy's, and each tensor's shape and type anew, of which there are few; it
compares the shapes of two operands, mostly the same one, number by number. And it computes sums and products of
integers once more in 64 bits to assert, in debug mode alone, that none overflows.
A plugin of pytest: `-p tests.kernels.quick_interpreter`. Without it the kernels compute the same, later.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch_lang, scope_of_nothing = interpreter._patch_lang, interpreter._LangPatchScope
    patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def is_patched(fn: Any) -> Any:
        return scope_of_nothing()

    interpreter._patch_lang = is_patched

    find_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def known_dtype(dtype: Any) -> Any:
        found = dtypes.get(dtype.name)
        if found is None:
            found = dtypes[dtype.name] = find_dtype(dtype)
        return found

    interpreter._get_np_dtype = known_dtype

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    sizes: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}  # numbers, product and shape of tensors
    block_types: dict[tuple[Any, ...], tuple[Any, int, str]] = {}  # shape, product and name
    new_block_type, is_equal = tl.core.block_type.__init__, tl.core.tuple.__eq__

    def known_sizes(numbers: tuple[int, ...]) -> tuple[Any, Any, Any]:
        found = sizes.get(numbers)
        if found is None:
            each = tl.core.tuple([tl.constexpr(number) for number in numbers])
            found = sizes[numbers] = tl.core.tuple(numbers), tl.constexpr(math.prod(numbers)), each
        return found

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.numel, self.shape = known_sizes(tuple(type.shape.values) if type.is_block() else ())

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = tuple(each.value if isinstance(each, tl.constexpr) else each for each in shape)
        found = block_types.get((element_ty.name, *numbers))
        if found is None:
            new_block_type(self, element_ty, shape)
            self.shape = known_sizes(numbers)[0]
            block_types[element_ty.name, *numbers] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found

    def equal(self: Any, other: Any) -> Any:
        if self is other:
            return tl.constexpr(True)
        if type(other) is list and all(type(each) is int for each in other):
            return tl.constexpr(self.values == other)
        return is_equal(self, other)

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        is_alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if is_alike else broadcast(self, lhs, rhs)

    tl.core.tensor.__init__, tl.core.block_type.__init__ = init_tensor, init_block_type
    tl.core.tuple.__eq__ = equal
    TritonSemantic.broadcast_impl_value = broadcast_values
