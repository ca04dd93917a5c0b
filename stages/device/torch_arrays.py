"""The operations of `arrays.py` on torch tensors, on any device. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HostArray = NDArray[Any]
Longs = NDArray[np.int64]


class TorchArrays:
    """The operations on torch tensors."""

    inference: Callable[[], AbstractContextManager[Any]] = staticmethod(torch.inference_mode)

    def beside(self, x: Tensor, array: HostArray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if x.device.type == "cpu" else tensor.to(x.device, non_blocking=True)

    def on_host(self, x: Tensor) -> HostArray:
        array: HostArray = x.cpu().numpy()
        return array

    def is_on_host(self, x: Tensor) -> bool:
        return x.device.type == "cpu"

    def wait(self, x: Tensor) -> None:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    def as_tensor(self, x: Tensor) -> Tensor:
        return x

    def floats(self, x: Tensor) -> Tensor:
        return x.float()

    def take(self, x: Tensor, rows: Longs) -> Tensor:
        return x.index_select(0, self.beside(x, rows))

    def put(self, x: Tensor, rows: Longs, values: Tensor) -> None:
        if x.device.type == "cpu":
            x.numpy()[rows] = values.numpy()  # takes a quarter of the time of index_copy_ for a few hundred numbers
        else:
            x.index_copy_(0, self.beside(x, rows), values)

    def add(self, x: Tensor, places: tuple[Tensor, Tensor], values: Tensor) -> None:
        rows, columns = places
        x.index_put_((rows.expand_as(columns), columns), values, accumulate=True)

    def add_rows(self, x: Tensor, rows: Longs, values: Tensor) -> None:
        x.index_add_(0, self.beside(x, rows), values.to(x.dtype))

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition, x, y)

    def hide(self, x: Tensor, is_hidden: Tensor) -> Tensor:
        return x.masked_fill_(is_hidden, -torch.inf)

    def maxima(self, blocks: Tensor) -> Tensor:
        return blocks.amax(2)

    def sums(self, blocks: Tensor) -> Tensor:
        return blocks.sum(2)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], dim=1)

    def pick(self, blocks: Tensor, rows: Longs, columns: Longs) -> HostArray:
        if blocks.device.type == "cpu":
            return np.asarray(blocks.float())[rows, columns]  # takes half the time of torch's indexing
        return self.on_host(blocks[self.beside(blocks, rows), self.beside(blocks, columns)].float())

    def weights(self, x: Tensor, best: HostArray, temperature: HostArray | None) -> Tensor:
        scaled = x.float() - self.beside(x, best.astype(np.float32))[:, None]
        if temperature is not None:
            scaled.div_(self.beside(x, temperature.astype(np.float32))[:, None])
        return scaled.exp_()

    def likeliest(self, x: Tensor, k: int) -> tuple[HostArray, HostArray]:
        top = x.topk(k, dim=1)
        return self.on_host(top.indices), self.on_host(top.values)
