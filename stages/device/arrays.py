"""What the code of the device thread asks of arrays beyond plain indexing: the same of numpy's and of torch's.

Where a model runs without torch, all of its step are numpy arrays, and nothing here imports torch. Everywhere else
they are tensors, and `torch_arrays.py` answers. Both take indices as numpy arrays on the host.
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
    """Operations on arrays of one kind. What is called x is of that kind, and so is what comes back as an `Array`."""

    def inference(self) -> AbstractContextManager[Any]:
        """Within it nothing is noted down for gradients."""

    def beside(self, x: Array, array: HostArray) -> Array:
        """`array` where x is; the same memory where that can be."""

    def on_host(self, x: Array) -> HostArray:
        """The numbers of x; the same memory where that can be."""

    def is_on_host(self, x: Array) -> bool:
        """Whether its numbers are in the host's memory."""

    def wait(self, x: Array) -> None:
        """Returns when all that was asked of the device that x is on is done."""

    def as_tensor(self, x: Array) -> Any:
        """x as a tensor that shares its memory."""

    def floats(self, x: Array) -> Array:
        """As float32; x itself if it is."""

    def take(self, x: Array, rows: Longs) -> Array:
        """These rows of x: a copy."""

    def put(self, x: Array, rows: Longs, values: Array) -> None:
        """Row `rows[i]` of x becomes `values[i]`."""

    def add(self, x: Array, places: tuple[Array, Array], values: Array) -> None:
        """Adds each value at its place of x [N, V], as often as the place is named. Rows broadcast."""

    def add_rows(self, x: Array, rows: Longs, values: Array) -> None:
        """Adds `values[i]` to row `rows[i]` of x [N, H], however often a row is named. `values` in any precision."""

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """x where the condition holds, y elsewhere."""

    def hide(self, x: Array, is_hidden: Array) -> Array:
        """-inf where `is_hidden`, in place. Returns x."""

    def maxima(self, blocks: Array) -> Array:
        """Along the last of three axes. NaN where there is one."""

    def sums(self, blocks: Array) -> Array:
        """Along the last of three axes, each in one order whatever the other two."""

    def join(self, x: Array, y: Array) -> Array:
        """x [N, A] and y [N, B] as [N, A + B]."""

    def pick(self, blocks: Array, rows: Longs, columns: Longs) -> HostArray:
        """`blocks[rows[i], columns[i]]` of three axes, as float32 on the host."""

    def weights(self, x: Array, best: HostArray, temperature: HostArray | None) -> Array:
        """exp((x - best) / temperature) of x [N, V], new and in float32; `best` and `temperature` [N], None is 1."""

    def likeliest(self, x: Array, k: int) -> tuple[HostArray, HostArray]:
        """(ids, numbers) of the k largest of each row of x [N, V] f32, in falling order, on the host."""


class HostArrays:
    """numpy's."""

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
        import torch  # for code of users, who may expect tensors

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
        starts = np.flatnonzero(np.diff(rows, prepend=-1))  # of runs: the tokens of one sequence follow each other
        np.add.at(x, rows[starts], np.add.reduceat(values, starts, axis=0, dtype=np.float32))

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        return np.where(condition, x, y)

    def hide(self, x: Array, is_hidden: Array) -> Array:
        x[is_hidden] = -np.inf
        return x

    def maxima(self, blocks: Array) -> Array:
        places = blocks.argmax(2)[:, :, None]  # two thirds of the time of `max`, which is slow on short axes
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
        ids.sort(axis=1)  # the lowest id first among equals
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
