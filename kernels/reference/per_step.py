"""A cache of values derived from a step's small index tensors: computed once a step instead of once a layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")

MAX_KINDS = 8  # keys kept: at most as many kinds of layers (windows, layouts) as a model has; more are of old models


class PerStepCache(Generic[Value]):
    """The last value of each key, valid as long as the tensors it came from hold the same numbers.

    Inputs are compared by value with copies, so a write into them in place is noticed. A comparison takes about 3 us,
    the computation of a value 15 to 240 us (one AVX-512 core), and each layer of a model needs it.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[tuple[Tensor, ...], Value]] = {}

    def get(self, key: Hashable, inputs: tuple[Tensor, ...], derive: Callable[[], Value]) -> Value:
        """The value kept for `key` if `inputs` are unchanged, else the result of `derive()`, which replaces it."""
        kept = self._kept.get(key)
        if kept is not None and all(_is_same(then, now) for then, now in zip(kept[0], inputs, strict=True)):
            return kept[1]
        value = derive()
        if len(self._kept) >= MAX_KINDS:
            self._kept.clear()
        self._kept[key] = (tuple(tensor.clone() for tensor in inputs), value)
        return value


def _is_same(then: Tensor, now: Tensor) -> bool:
    return then.dtype == now.dtype and then.device == now.device and torch.equal(then, now)
