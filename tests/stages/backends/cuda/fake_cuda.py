"""A fake of `torch.cuda` without a GPU: which device is used by which call, and a GPU that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

Device = torch.device | int | None


class FakeCuda:
    """GPUs that do nothing but count. `errors` are raised by the next waits, one each."""

    def __init__(self, num_gpus: int = 2) -> None:
        self.num_gpus = num_gpus
        self.calls: list[tuple[str, int]] = []  # (function, index of the GPU)
        self.errors: list[BaseException] = []
        self.recorded: list[FakeStream] = []  # the streams of events, in order
        self.current = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replaces the functions of `torch.cuda` that the engine calls."""
        patch.setattr(torch.cuda, "is_available", lambda: self.num_gpus > 0)
        patch.setattr(torch.cuda, "device_count", lambda: self.num_gpus)
        patch.setattr(torch.cuda, "synchronize", self._synchronize)
        patch.setattr(torch.cuda, "set_device", self._set_device)
        patch.setattr(torch.cuda, "Stream", self._stream)
        patch.setattr(torch.cuda, "Event", partial(FakeEvent, self))
        patch.setattr(torch.cuda, "default_stream", self._stream)
        patch.setattr(torch.cuda, "stream", self._use)
        patch.setattr(torch.cuda, "set_stream", lambda stream: self.calls.append(("set_stream", stream.index)))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        zeros = torch.zeros

        def on_host(*shape: Any, device: Any = None, **more: Any) -> torch.Tensor:
            if device is not None:
                self.calls.append(("zeros", self._index(device)))
            return zeros(*shape, **more)

        patch.setattr(torch, "zeros", on_host)

    def _index(self, device: Device) -> int:
        found = device.index if isinstance(device, torch.device) else device
        return self.current if found is None else found

    def _synchronize(self, device: Device = None) -> None:
        self.calls.append(("synchronize", self._index(device)))
        if self.errors:
            raise self.errors.pop(0)

    def _set_device(self, device: Device) -> None:
        self.current = self._index(device)
        self.calls.append(("set_device", self.current))

    def _stream(self, device: Device = None) -> FakeStream:
        return FakeStream(self, self._index(device))

    @contextlib.contextmanager
    def _use(self, stream: FakeStream) -> Iterator[None]:
        self.calls.append(("stream", stream.index))
        yield


class FakeStream:
    """A stream of one fake GPU."""

    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self._cuda, self.index = cuda, index

    def synchronize(self) -> None:
        self._cuda._synchronize(self.index)


class FakeEvent:
    """An event of one fake GPU, whose wait sleeps or spins."""

    def __init__(self, cuda: FakeCuda, *, blocking: bool = False, enable_timing: bool = False) -> None:
        self._cuda, self._is_blocking, self._stream = cuda, blocking, FakeStream(cuda, -1)

    def record(self, stream: FakeStream) -> None:
        self._stream = stream
        self._cuda.recorded.append(stream)

    def synchronize(self) -> None:
        assert self._is_blocking, "a wait that spins"
        self._stream.synchronize()
