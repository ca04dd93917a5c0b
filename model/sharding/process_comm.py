"""Ranks as processes, through torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as public
from torch import Tensor

from .comm import MOST_SENT, CommLog, CommLost, ordered_sum

distributed: Any = public  # its process groups have no types
NUM_TAGS = 1 << 16  # of tensors from one rank to another; far more than are under way
ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux: a program that says how much of each packet is kept
DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # such a program, of one instruction: return 0
WAIT = timedelta(hours=1)  # NOTE: a rank that hangs is found by the deadline of an order, long before


class ProcessComm:
    """See `Comm`. `folder` is a private folder of this machine that all ranks are given; made by all at once.

    On CPUs sums are made in the order of ranks. On GPUs they are NCCL's, unless `is_ordered`.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, device: torch.device, *, is_ordered: bool = False, name: str = "ranks"
    ) -> None:
        """`name`: a file of the folder, of these ranks alone."""
        self.rank, self.size, self.log = rank, size, CommLog()
        self._folder, self._device = folder, device
        self._is_gpu = device.type != "cpu"
        self._sent: dict[int, deque[tuple[Any, Tensor]]] = {}  # by rank: not known to be received
        self._counts: dict[tuple[str, int], int] = {}
        self._is_ordered = is_ordered or not self._is_gpu
        store = distributed.PrefixStore("millrace", distributed.FileStore(os.fspath(folder / name), size))
        self._group: Any = _gloo(store, rank, size) if device.type == "cpu" else _nccl(store, rank, size)

    def sum(self, partial: Tensor) -> Tensor:
        partial = partial.contiguous()
        if not self._is_ordered:
            return self._wait("sum", partial, self._group.allreduce([partial]), partial)
        parts = [torch.empty_like(partial) for _ in range(self.size)]
        self._wait("sum", partial, self._group.allgather([parts], [partial]), partial)
        return ordered_sum(parts)

    def gather(self, x: Tensor) -> Sequence[Tensor] | None:
        x = x.contiguous()
        parts = [] if self.rank else [torch.empty_like(x) for _ in range(self.size)]
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._wait("gather", x, self._group.gather([parts] if parts else [], [x], options), x)
        return parts or None

    def broadcast(self, x: Tensor) -> Tensor:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        x = x.contiguous()
        return self._wait("broadcast", x, self._group.broadcast([x], options), x)

    def send(self, x: Tensor, to: int) -> None:
        x = x.contiguous()
        sent = self._sent.setdefault(to, deque())
        while sent and (len(sent) >= MOST_SENT or sent[0][0].is_completed()):
            self._ended(sent.popleft()[0], f"send to rank {to}")
        sent.append((self._group.send([x], to, self._tag("to", to)), x))  # which must live until it is received

    def receive(self, x: Tensor, source: int) -> Tensor:
        x = x.contiguous()
        self._ended(self._group.recv([x], source, self._tag("from", source)), f"receive from rank {source}")
        return x

    def part(self, ranks: Sequence[int]) -> ProcessComm:
        name = "-".join(["ranks", *map(str, ranks)])
        own = ranks.index(self.rank), len(ranks), self._device
        return ProcessComm(self._folder, *own, is_ordered=self._is_ordered, name=name)

    def _tag(self, way: str, rank: int) -> int:
        """A number for each tensor between two ranks, the same on both."""
        number = self._counts[way, rank] = (self._counts.get((way, rank), 0) + 1) % NUM_TAGS
        return number

    def _ended(self, work: Any, call: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CommLost(f"{call}: {str(error).splitlines()[0]}") from None

    def abort(self) -> None:
        """Makes calls in progress fail, and ends all: NCCL does not notice that a rank is gone. gloo's fail anyway."""
        if self._is_gpu:
            with suppress(RuntimeError):
                self._group.abort()

    def _wait(self, call: str, like: Tensor, work: Any, result: Tensor) -> Tensor:
        """Waits for a call; on a GPU the current stream does."""
        self.log.note(call, like)
        try:
            work.wait()
        except RuntimeError as error:
            raise CommLost(f"{self.log.last}: {str(error).splitlines()[0]}") from None
        return result


def _gloo(store: Any, rank: int, size: int) -> Any:
    """NOTE: gloo asks for no key, so it listens on the loopback interface only, and not once all ranks are connected:
    it would keep the connections of strangers until no file is left."""
    before = set(_sockets())
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = WAIT
    group = distributed.ProcessGroupGloo(store, rank, size, options)
    for inode, file in _sockets().items():
        if inode not in before:
            _refuse_connections(file)
    return group


def _sockets() -> dict[str, int]:
    """The sockets of this process: by inode, which no other one has, the descriptor."""
    found: dict[str, int] = {}
    for link in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        with suppress(OSError):  # it is closed by now
            if (inode := os.readlink(link)).startswith("socket:"):
                found[inode] = int(link.name)
    return found


def _refuse_connections(file: int) -> None:
    """Drops what asks for a connection at a TCP socket that listens. Those that it has stay, and it stays open."""
    with suppress(OSError), socket.socket(fileno=os.dup(file)) as sock:
        if sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            code = ctypes.create_string_buffer(DROP_ALL)
            sock.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))


def _nccl(store: Any, rank: int, size: int) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # of its first contact; tensors go over NVLink or PCIe
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = WAIT
    return distributed.ProcessGroupNCCL(store, rank, size, options)
