"""Guides: what the host adds to the sampling of a step, in one upload, and when that upload may run.

A guide has a mask of allowed tokens for some rows of logits, and a token that other rows must get. It is uploaded on a
stream of its own while the step's forward pass runs, so the device waits for it only if it is late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....runtime.device_streams.interface import DeviceStream, DeviceStreams
from ...messages import Ints
from .pinned_ring import PinnedMemory, SendRing

NUM_GUIDES = 2  # pinned buffers: the device reads one while the host writes another
NO_MASK = NO_TOKEN = -1

WriteGuide = Callable[[Ints], int]
"""Writes a guide into a buffer, and returns the count of numbers written."""


@dataclass(frozen=True, slots=True)
class GuideLayout:
    """The parts of a guide of up to P rows of logits: i32 arrays, on the host or the device."""

    num_rows: int  # P
    vocab_size: int

    @property
    def num_words(self) -> int:
        """W, of a mask: bit t % 32 of word t // 32 allows token t."""
        return -(-self.vocab_size // 32)

    @property
    def size(self) -> int:
        """Numbers in the largest guide."""
        return self.masks_at + self.num_rows * self.num_words

    @property
    def masks_at(self) -> int:
        """Offset of the masks; aligned to 16 bytes, as the kernel loads them so."""
        return -(-2 * self.num_rows // 4) * 4

    def mask_rows(self, guide: Any) -> Any:
        """[P] the row of `masks` for each row of logits, or NO_MASK."""
        return guide[: self.num_rows]

    def forced(self, guide: Any) -> Any:
        """[P] as `SamplingKernels.force` takes it."""
        return guide[self.num_rows : 2 * self.num_rows]

    def masks(self, guide: Any) -> Any:
        """[P, W] masks; only the first are in use, and uploaded."""
        return guide[self.masks_at : self.size].reshape(self.num_rows, self.num_words)


class GuideUploads:
    """Uploads guides to one buffer on the device. Used on the device thread.

    `compute` runs the steps. A step is sampled between `send` and `note_read`, which wait for nothing on the device.
    """

    def __init__(
        self, streams: DeviceStreams, compute: DeviceStream, guide: Any, guides: Sequence[PinnedMemory]
    ) -> None:
        self._compute, self._guide = compute, guide
        self._stream = streams.stream("guides")
        self._ring = SendRing(guides, streams)
        self._read = streams.event()  # the last step with a guide has been sampled

    def send(self, write: WriteGuide) -> None:
        """Uploads a guide; work submitted to `compute` afterwards runs when it is there."""
        buffer, sent = self._ring.take()
        size = write(buffer.numbers)
        self._stream.wait(self._read)
        self._stream.copy(self._guide[:size], buffer.array[:size])
        self._stream.record(sent)
        self._compute.wait(sent)

    def note_read(self) -> None:
        """Marks the end of the work on `compute` that reads the guide."""
        self._compute.record(self._read)
