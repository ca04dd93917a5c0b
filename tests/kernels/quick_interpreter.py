"""Triton's interpreter without what it does again at each call of a function, and without a check that tells nothing.

It replaces the functions of `triton.language` by its own at each launch and at each call of a device function, and puts
them back after the launch. A process of the tests interprets all that it launches, so here they are replaced once. It
makes a table of all types to find one of numpy's. And it computes sums and products of integers once more in 64 bits to
assert, in debug mode alone, that none overflows. Without these, the kernels compute the same in a third of the time.
A plugin of pytest: `-p tests.kernels.quick_interpreter`. Without it the kernels compute the same, later.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
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
