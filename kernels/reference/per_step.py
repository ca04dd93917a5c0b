"""What is worked out from a step's small index tensors, once instead of once a layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")

MAX_KINDS = 8  # kinds of layers (windows, layouts) a model has at most; beyond it lie leftovers of earlier models


class Derived(Generic[Value]):
    """For each key the last value, good as long as the tensors it came from hold the same numbers.

    Inputs are compared by value with copies, so writing into them in place is seen. Comparing takes about 3 us; what is
    kept here takes 15 to 240 us to work out (one AVX-512 core), and a model asks for it in each of its layers.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[tuple[Tensor, ...], Value]] = {}

    def get(self, key: Hashable, inputs: tuple[Tensor, ...], derive: Callable[[], Value]) -> Value:
        """The value kept for `key` if `inputs` are as they were, else `derive()`, which is kept from now on."""
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
