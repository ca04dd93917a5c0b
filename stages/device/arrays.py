"""Array operations beyond plain indexing, with one interface for numpy and torch.

A model that runs without torch uses numpy arrays for the whole step, and this module never imports torch for it.
All other models use tensors, which `torch_arrays.py` handles. Both take indices as numpy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = Any  # a numpy array, or a tensor on any device
HostArray = NDArray[Any]
Longs = NDArray[np.int64]


class Arrays(Protocol):
    """Operations on arrays of one kind, numpy or torch.

    x and each `Array` returned are of that kind.
    """

    def inference(self) -> AbstractContextManager[Any]:
        """A context in which no gradients are recorded."""

    def beside(self, x: Array, array: HostArray) -> Array:
        """`array` on the device of x. Shares the memory of `array` where possible."""

    def on_host(self, x: Array) -> HostArray:
        """x as a numpy array. Shares its memory where possible."""

    def is_on_host(self, x: Array) -> bool:
        """Whether x is in host memory."""

    def wait(self, x: Array) -> None:
        """Blocks until the device of x has finished all work submitted to it."""

    def as_tensor(self, x: Array) -> Any:
        """x as a torch tensor that shares its memory."""

    def floats(self, x: Array) -> Array:
        """x as float32; x itself if it already is."""

    def take(self, x: Array, rows: Longs) -> Array:
        """A copy of these rows of x."""

    def put(self, x: Array, rows: Longs, values: Array) -> None:
        """Sets row `rows[i]` of x to `values[i]`."""

    def add(self, x: Array, places: tuple[Array, Array], values: Array) -> None:
        """Adds each value at its place of x [N, V]; repeated places accumulate. Rows broadcast."""

    def add_rows(self, x: Array, rows: Longs, values: Array) -> None:
        """Adds `values[i]` to row `rows[i]` of x [N, H]; repeated rows accumulate.

        `values` in any precision.
        """

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """x where the condition holds, y elsewhere."""

    def hide(self, x: Array, is_hidden: Array) -> Array:
        """Sets x to -inf where `is_hidden`, in place. Returns x."""

    def maxima(self, blocks: Array) -> Array:
        """Maxima along the last of three axes. NaN where there is one."""

    def sums(self, blocks: Array) -> Array:
        """Sums along the last of three axes.

        The order of summation does not depend on the other two.
        """

    def join(self, x: Array, y: Array) -> Array:
        """x [N, A] and y [N, B] as [N, A + B]."""

    def pick(self, blocks: Array, rows: Longs, columns: Longs) -> HostArray:
        """`blocks[rows[i], columns[i]]` of an array with three axes, as float32 on the host."""

    def weights(self, x: Array, best: HostArray, temperature: HostArray | None) -> Array:
        """exp((x - best) / temperature) of x [N, V], as a new f32 array.

        `best` and `temperature` are [N]; a temperature of None is 1.
        """

    def likeliest(self, x: Array, k: int) -> tuple[HostArray, HostArray]:
        """(ids, values) of the k largest of each row of x [N, V] f32, largest first, on the host."""


class HostArrays:
    """The operations on numpy arrays."""

    inference: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    def beside(self, x: Array, array: HostArray) -> Array:
        return array

    def on_host(self, x: Array) -> HostArray:
        array: HostArray = x
        return array

    def is_on_host(self, x: Array) -> bool:
        return True

    def wait(self, x: Array) -> None:
        pass

    def as_tensor(self, x: Array) -> Any:
        import torch  # only for user code that takes tensors

        return torch.from_numpy(x)

    def floats(self, x: Array) -> Array:
        return x.astype(np.float32, copy=False)

    def take(self, x: Array, rows: Longs) -> Array:
        return x[rows]

    def put(self, x: Array, rows: Longs, values: Array) -> None:
        x[rows] = values

    def add(self, x: Array, places: tuple[Array, Array], values: Array) -> None:
        np.add.at(x, places, values)

    def add_rows(self, x: Array, rows: Longs, values: Array) -> None:
        if not len(rows):
            return
        starts = np.flatnonzero(np.diff(rows, prepend=-1))  # of runs: tokens of one sequence are adjacent
        np.add.at(x, rows[starts], np.add.reduceat(values, starts, axis=0, dtype=np.float32))

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        return np.where(condition, x, y)

    def hide(self, x: Array, is_hidden: Array) -> Array:
        x[is_hidden] = -np.inf
        return x

    def maxima(self, blocks: Array) -> Array:
        places = blocks.argmax(2)[:, :, None]  # takes two thirds of the time of `max`, which is slow on short axes
        return np.take_along_axis(blocks, places, 2)[:, :, 0]

    def sums(self, blocks: Array) -> Array:
        return blocks.sum(2)

    def join(self, x: Array, y: Array) -> Array:
        return np.concatenate([x, y], axis=1)

    def pick(self, blocks: Array, rows: Longs, columns: Longs) -> HostArray:
        picked: HostArray = blocks[rows, columns]
        return picked

    def weights(self, x: Array, best: HostArray, temperature: HostArray | None) -> Array:
        scaled = np.subtract(x, best.astype(np.float32)[:, None], dtype=np.float32)
        if temperature is not None:
            scaled /= temperature.astype(np.float32)[:, None]
        return np.exp(scaled, out=scaled)

    def likeliest(self, x: Array, k: int) -> tuple[HostArray, HostArray]:
        if not k:
            return np.zeros((len(x), 0), np.int64), np.zeros((len(x), 0), np.float32)
        ids = np.argpartition(x, x.shape[1] - k, axis=1)[:, x.shape[1] - k :]
        ids.sort(axis=1)  # so that the lowest id comes first among equals
        order = np.argsort(-np.take_along_axis(x, ids, 1), axis=1, kind="stable")
        ids = np.take_along_axis(ids, order, 1)
        return ids, np.take_along_axis(x, ids, 1)


HOST = HostArrays()


def arrays_of(x: Array) -> Arrays:
    """The operations on arrays of the kind of x."""
    return HOST if isinstance(x, np.ndarray) else _tensors()


@cache
def _tensors() -> Arrays:
    from .torch_arrays import Tensors

    return Tensors()
