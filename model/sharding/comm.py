"""How the ranks of a model add, gather and send tensors: the interface, and the log that finds ranks that part."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

MOST_SENT = 16  # tensors from one rank to another that have not been received, as many as steps in flight


class CommLost(RuntimeError):
    """Another rank is gone, or does something else. The message says which."""


class Comm(Protocol):
    """One rank's end. All ranks make the same calls in the same order, with tensors of the same shape and dtype."""

    rank: int
    size: int
    log: CommLog

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, the same on each. May overwrite `partial`."""

    def gather(self, x: Tensor) -> Sequence[Tensor] | None:
        """On rank 0 the tensors of all ranks in their order, None on the others."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor; those of the others have its shape and are overwritten."""

    def send(self, x: Tensor, to: int) -> None:
        """Sends a tensor to one rank, and waits only while `MOST_SENT` of them have not been received.

        `x` is not to be changed afterwards. What is sent and received is no call in the log of a rank.
        """

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Waits for the next tensor of one rank, of the shape and dtype of `x`, which may be overwritten."""

    def part(self, ranks: Sequence[int]) -> Comm:
        """This rank's end among some ranks, numbered in their order. Each of them calls it once, at the start."""


class CommLog:
    """A running number of a rank's calls: equal on two ranks as long as their calls are."""

    def __init__(self) -> None:
        self.number = 0  # 64 bits
        self.last = "nothing"  # call, in words

    def note(self, call: str, x: Tensor) -> None:
        """Adds a call."""
        self.last, mixed = _mixed(call, tuple(x.shape), x.dtype)
        self.number = (self.number * 0x100000001B3 + mixed) & 0xFFFFFFFFFFFFFFFF


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks, in float32, rounded once."""
    if parts[0].dtype == torch.float32 or len(parts) == 2:
        total = parts[0] + parts[1] if len(parts) > 1 else parts[0]
        for part in parts[2:]:
            total = total + part
        return total
    wide = parts[0].float()
    for part in parts[1:]:
        wide = wide + part
    return wide.to(parts[0].dtype)


@cache
def _mixed(call: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, int]:
    words = f"{call} {list(shape)} {str(dtype).removeprefix('torch.')}"
    return words, zlib.crc32(words.encode()) + 1
