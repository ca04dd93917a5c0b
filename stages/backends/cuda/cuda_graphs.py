"""CUDA graphs: the padded sizes, the order of capture, and the graph that runs a step.

A graph has a fixed size and fixed addresses; everything that differs between steps is read from memory. So a step runs
in the smallest graph that holds it, and without a graph if none does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ....runtime.device_streams.interface import DeviceGraph, DeviceStream
from ....runtime.env.log import get_logger
from ...device.device_guard import is_out_of_memory
from ...errors import ConfigError
from ...memory_table import human
from ...outputs import CaptureReport, GraphBatch

DECODE_ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),  # for engines with a larger max_num_seqs
)
VERIFY_TOKENS = (8, 16, 32, 64, 128)  # of steps with drafts, and of small ones beside them
MIXED_TOKENS = (
    *(64, 128, 256, 512, 768, 1024),
    *range(1152, 2049, 128),  # dense, as padding is costly here; 2,048 is the default token budget
)
FEW_ROWS = 16  # of mixed sizes for one prompt or some: the head, its logits and their sampling are of so few rows


log = get_logger("millrace.stages")


@dataclass(frozen=True, slots=True)
class CapturedGraphs:
    """The graphs of one size.

    After `forward`, or `adapted`, one of `samples` is replayed; a kind without a graph is launched.
    """

    forward: DeviceGraph
    samples: Mapping[int, DeviceGraph]  # by kind of sampling
    adapted: DeviceGraph | None = None  # `forward` for any mix of LoRA adapters


def batches_of(
    max_num_seqs: int, max_num_tokens: int, num_verified: int = 0
) -> tuple[list[GraphBatch], list[GraphBatch]]:
    """(decode, mixed) sizes to capture, smallest first, for at most this many rows and tokens.

    Each mixed size is there twice, with room for all rows and for FEW_ROWS. With `num_verified`, the most tokens of a
    step with drafts, there are mixed sizes for such steps. They have room for as many rows, and rows of logits, as they
    have tokens.
    """
    rows = {min(count, max_num_seqs) for count in DECODE_ROWS}
    tokens = [count for count in MIXED_TOKENS if count <= max_num_tokens]
    decode = [GraphBatch(count, count, True) for count in sorted(rows)]
    mixed = [GraphBatch(most, count, False) for count in tokens for most in (min(FEW_ROWS, max_num_seqs), max_num_seqs)]
    verify = [
        GraphBatch(count, count, False) for count in VERIFY_TOKENS[: bisect_left(VERIFY_TOKENS, num_verified) + 1]
    ]
    verify = [batch for batch in verify if batch.num_tokens <= max_num_tokens] if num_verified else []
    return decode, sorted({*verify, *mixed}, key=lambda batch: (batch.num_tokens, batch.num_rows))


def most_rows(max_num_seqs: int, num_verified: int) -> int:
    """The most rows, or rows of logits, of any step."""
    return max(max_num_seqs, *(batch.num_rows for batch in batches_of(1, max(VERIFY_TOKENS), num_verified)[1]))


def with_adapters(batch: GraphBatch) -> GraphBatch:
    """The same size, for a step with LoRA adapters."""
    return replace(batch, has_adapters=True)


def _num_bytes(captured: CapturedGraphs) -> int:
    adapted = 0 if captured.adapted is None else captured.adapted.num_bytes
    return captured.forward.num_bytes + adapted + sum(graph.num_bytes for graph in captured.samples.values())


class CudaGraphs:
    """The graphs of one device. Until `capture`, and with `is_eager`, every step runs eagerly.

    Decode steps are padded to a number of rows; others to a number of tokens, with room for few rows or for all. Each
    of `kinds` of sampling has a graph. Other kinds are launched after the forward pass. Steps that no size holds are
    launched entirely.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        num_verified: int = 0,
        *,
        is_eager: bool = False,
        kinds: Sequence[int] = (0,),
        has_adapters: bool = False,
    ) -> None:
        """With `has_adapters`, each size has one more graph of the forward pass, for steps with LoRA adapters."""
        sizes = batches_of(max_num_seqs, max_num_tokens, num_verified)
        self._decode, self._mixed = ([], []) if is_eager else sizes
        self.kinds = tuple(kinds)
        self.has_adapters = has_adapters
        self._captured: dict[GraphBatch, CapturedGraphs] = {}
        self.num_replayed = 0  # forward passes
        self.num_eager = 0  # forward passes
        self._dropped: set[GraphBatch] = set()  # sizes for which there was no memory

    @property
    def batches(self) -> list[GraphBatch]:
        """All sizes, largest first: the memory pool that the first one fills serves the others."""
        sizes = [batch for batch in (*self._decode, *self._mixed) if batch not in self._dropped]
        return sorted(sizes, key=lambda batch: (-batch.num_tokens, -batch.num_rows))

    @property
    def captured(self) -> list[CapturedGraphs]:
        """The captured graphs, in the order of capture."""
        return list(self._captured.values())

    def capture(
        self,
        stream: DeviceStream,
        forward: Callable[[GraphBatch], object],
        sample: Callable[[GraphBatch, int], object],
        clock: Callable[[], float],
        free_bytes: Callable[[], int],
    ) -> CaptureReport:
        """Captures `forward` and `sample` for every size.

        Both must have run before: lazy initialization cannot happen inside a capture. Where memory runs out, the
        largest size is dropped, until the others fit. `free_bytes` tells how much is free, for the log.
        """
        began = clock()
        for batch in self.batches:
            while batch not in self._dropped and not self._captures(batch, stream, forward, sample):
                self.drop(next(iter(self._captured), batch), free_bytes())
        return CaptureReport(tuple(self._captured), clock() - began, sum(map(_num_bytes, self._captured.values())))

    def _captures(
        self,
        batch: GraphBatch,
        stream: DeviceStream,
        forward: Callable[[GraphBatch], object],
        sample: Callable[[GraphBatch, int], object],
    ) -> bool:
        """Captures one size. False if there is too little memory for it."""
        try:
            whole = stream.capture(partial(forward, batch))
            adapted = stream.capture(partial(forward, with_adapters(batch))) if self.has_adapters else None
            samples = {kind: stream.capture(partial(sample, batch, kind)) for kind in self.kinds}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        self._captured[batch] = CapturedGraphs(whole, samples, adapted)
        return True

    def drop(self, batch: GraphBatch, free_bytes: int) -> None:
        """Drops a size for which there is no memory; its steps run in a larger graph, or eagerly.

        Raises `ConfigError` if no size is left.
        """
        self._captured.pop(batch, None)
        self._dropped.add(batch)
        lower = "gpu_memory_utilization"
        if not self.batches:
            raise ConfigError(
                f"CUDA graphs: {human(free_bytes)} are free beside the weights and the KV cache, which is too little "
                f"for the smallest graph, a step of {batch.num_rows} row(s); lower {lower}, kv_cache_bytes or "
                "num_gpu_blocks, or set enforce_eager"
            )
        size = {"num_rows": batch.num_rows, "num_tokens": batch.num_tokens, "is_decode": batch.is_decode}
        log.warning("graphs.dropped", reason="out_of_memory", **size, free_bytes=free_bytes, lower=lower)

    def choose(self, num_rows: int, num_tokens: int, is_decode: bool) -> tuple[GraphBatch, CapturedGraphs | None]:
        """The size that a step is padded to, and its graphs; its own size and None without a graph.

        `num_rows` is the number of its rows, or of its rows of logits if these are more.
        """
        for batch in self._decode if is_decode else self._mixed:
            if batch.num_tokens >= num_tokens and batch.num_rows >= num_rows and batch in self._captured:
                self.num_replayed += 1
                return batch, self._captured[batch]
        self.num_eager += 1
        return GraphBatch(num_rows, num_tokens, is_decode), None
