"""The memory of a step, measured on a few tokens: the most bytes of tensors that are alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FEW, MORE = 5, 37  # tokens of the measured steps


def measured_bytes(run: Callable[[int], object], known: Iterable[Tensor]) -> tuple[int, int]:
    """The peak memory of `run(num_tokens)` as a constant and a slope, in bytes and bytes a token.

    Tensors that are `known`, as weights are, do not count.
    """
    tensors = list(known)
    few, more = (_peak_bytes(run, num_tokens, tensors) for num_tokens in (FEW, MORE))
    slope = max(0, -(-(more - few) // (MORE - FEW)))
    return max(0, few - FEW * slope), slope


def _peak_bytes(run: Callable[[int], object], num_tokens: int, known: list[Tensor]) -> int:
    live = cast(Any, _LiveBytes)(known)
    with live:
        run(num_tokens)
    return cast(int, live.peak_bytes)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that torch makes within this context. Views count once."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, int] = {}  # storage -> bytes
        self._bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return output

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self._bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(storage, self._remove, key)  # torch keeps one Python object for a storage while it lives

    def _remove(self, key: int) -> None:
        self._bytes -= self._alive.pop(key, 0)
