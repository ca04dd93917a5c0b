"""Which captured graph runs a step: sizes that steps are padded to, what is captured, and in which order.

A graph is work of one size, with the addresses it had when it was captured; what differs between steps comes from
memory. So a step runs in the smallest that holds it, and without one where none does. Knows sizes; refuses to know what
is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ....runtime.device_streams.interface import Graph, Stream
from ...outputs import Batch, CaptureReport

DECODE_ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),  # for engines that are set to serve more
)
MIXED_TOKENS = (
    *(64, 128, 256, 512, 768, 1024),
    *range(1152, 2049, 128),  # what is computed for nothing counts here; 2,048 is an engine's most if it is not set
)


@dataclass(frozen=True, slots=True)
class Captured:
    """The graphs of a size. Behind `forward` one of `samples` is replayed; a kind without one is launched."""

    forward: Graph
    samples: Mapping[int, Graph]  # by kind


def batches_of(max_num_seqs: int, max_num_tokens: int) -> tuple[list[Batch], list[Batch]]:
    """(decode, mixed) sizes to capture, smallest first, where so many rows and tokens are the most of a step."""
    rows = {min(count, max_num_seqs) for count in DECODE_ROWS}
    tokens = [count for count in MIXED_TOKENS if count <= max_num_tokens]
    decode = [Batch(count, count, True) for count in sorted(rows)]
    return decode, [Batch(max_num_seqs, count, False) for count in tokens]


class Graphs:
    """The graphs of one device. Until `capture`, and without sizes, every step runs eagerly.

    Steps of one token a row are padded to a number of rows; others to a number of tokens, with room for all rows. Of
    `kinds` of sampling each has a graph; what another kind does behind the forward pass is launched. So is all of a
    step that no size holds.
    """

    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, *, is_eager: bool = False, kinds: Sequence[int] = (0,)
    ) -> None:
        self._decode, self._mixed = ([], []) if is_eager else batches_of(max_num_seqs, max_num_tokens)
        self.kinds = tuple(kinds)
        self._captured: dict[Batch, Captured] = {}
        self.num_replayed = 0  # forward passes, as is the other
        self.num_eager = 0

    @property
    def batches(self) -> list[Batch]:
        """All sizes, largest first, so that the pool of memory that the first one fills serves the others."""
        return sorted([*self._decode, *self._mixed], key=lambda batch: (-batch.num_tokens, -batch.num_rows))

    @property
    def captured(self) -> list[Captured]:
        """What has been captured, in that order."""
        return list(self._captured.values())

    def capture(
        self,
        stream: Stream,
        forward: Callable[[Batch], object],
        sample: Callable[[Batch, int], object],
        clock: Callable[[], float],
    ) -> CaptureReport:
        """Captures the launches of both for every size. They have run at least once: what is made at first use can not
        be made in a capture."""
        began, num_bytes = clock(), 0
        for batch in self.batches:
            whole = stream.capture(partial(forward, batch))
            samples = {kind: stream.capture(partial(sample, batch, kind)) for kind in self.kinds}
            num_bytes += sum(graph.num_bytes for graph in (whole, *samples.values()))
            self._captured[batch] = Captured(whole, samples)
        return CaptureReport(tuple(self.batches), clock() - began, num_bytes)

    def choose(self, num_rows: int, num_tokens: int, is_decode: bool) -> tuple[Batch, Captured | None]:
        """The size that a step is padded to, and its graphs; the step's own size, and None, where there are none."""
        for batch in self._decode if is_decode else self._mixed:
            if batch.num_tokens >= num_tokens and batch in self._captured:
                self.num_replayed += 1
                return batch, self._captured[batch]
        self.num_eager += 1
        return Batch(num_rows, num_tokens, is_decode), None
