"""Triton's interpreter without what it does again at each call of a function, a quarter of its time.

It replaces the functions of `triton.language` by its own at each launch and at each call of a device function, and puts
them back after the launch. A process of the tests interprets all that it launches, so here they are replaced once.
A plugin of pytest: `-p tests.kernels.quick_interpreter`. Without it the kernels compute the same, later.
"""

from __future__ import annotations

import os
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
