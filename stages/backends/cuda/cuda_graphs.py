"""CUDA graphs: the padded sizes, the order of capture, and the graph that runs a step.

A graph has a fixed size and fixed addresses; everything that differs between steps is read from memory. So a step runs
in the smallest graph that holds it, and without a graph if none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ....runtime.device_streams.interface import Graph, Stream
from ...outputs import Batch, CaptureReport

DECODE_ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),  # for engines with a larger max_num_seqs
)
MIXED_TOKENS = (
    *(64, 128, 256, 512, 768, 1024),
    *range(1152, 2049, 128),  # dense, as padding is costly here; 2,048 is the default token budget
)


@dataclass(frozen=True, slots=True)
class Captured:
    """The graphs of one size.

    After `forward` one of `samples` is replayed; a kind without a graph is launched.
    """

    forward: Graph
    samples: Mapping[int, Graph]  # by kind of sampling


def batches_of(max_num_seqs: int, max_num_tokens: int) -> tuple[list[Batch], list[Batch]]:
    """(decode, mixed) sizes to capture, smallest first, for at most this many rows and tokens."""
    rows = {min(count, max_num_seqs) for count in DECODE_ROWS}
    tokens = [count for count in MIXED_TOKENS if count <= max_num_tokens]
    decode = [Batch(count, count, True) for count in sorted(rows)]
    return decode, [Batch(max_num_seqs, count, False) for count in tokens]


class Graphs:
    """The graphs of one device. Until `capture`, and with `is_eager`, every step runs eagerly.

    Decode steps are padded to a number of rows; others to a number of tokens, with room for all rows. Each of `kinds`
    of sampling has a graph. Other kinds are launched after the forward pass. Steps that no size holds are launched
    entirely.
    """

    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, *, is_eager: bool = False, kinds: Sequence[int] = (0,)
    ) -> None:
        self._decode, self._mixed = ([], []) if is_eager else batches_of(max_num_seqs, max_num_tokens)
        self.kinds = tuple(kinds)
        self._captured: dict[Batch, Captured] = {}
        self.num_replayed = 0  # forward passes
        self.num_eager = 0  # forward passes

    @property
    def batches(self) -> list[Batch]:
        """All sizes, largest first: the memory pool that the first one fills serves the others."""
        return sorted([*self._decode, *self._mixed], key=lambda batch: (-batch.num_tokens, -batch.num_rows))

    @property
    def captured(self) -> list[Captured]:
        """The captured graphs, in the order of capture."""
        return list(self._captured.values())

    def capture(
        self,
        stream: Stream,
        forward: Callable[[Batch], object],
        sample: Callable[[Batch, int], object],
        clock: Callable[[], float],
    ) -> CaptureReport:
        """Captures `forward` and `sample` for every size.

        Both must have run before: lazy initialization cannot happen inside a capture.
        """
        began, num_bytes = clock(), 0
        for batch in self.batches:
            whole = stream.capture(partial(forward, batch))
            samples = {kind: stream.capture(partial(sample, batch, kind)) for kind in self.kinds}
            num_bytes += sum(graph.num_bytes for graph in (whole, *samples.values()))
            self._captured[batch] = Captured(whole, samples)
        return CaptureReport(tuple(self.batches), clock() - began, num_bytes)

    def choose(self, num_rows: int, num_tokens: int, is_decode: bool) -> tuple[Batch, Captured | None]:
        """The size that a step is padded to, and its graphs; its own size and None without a graph."""
        for batch in self._decode if is_decode else self._mixed:
            if batch.num_tokens >= num_tokens and batch in self._captured:
                self.num_replayed += 1
                return batch, self._captured[batch]
        self.num_eager += 1
        return Batch(num_rows, num_tokens, is_decode), None
