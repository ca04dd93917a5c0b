"""A step's attention plan: the sizes and the memory of its work lists, and the launches that make them.

`kernels/layout/work_lists.py` describes the lists. The host reads no length, and launches depend on sizes alone.

The lists are made on a branch of a CUDA graph: launches that run beside those behind them, until a later launch needs
them. Only while a graph is captured, and if `SWITCHES` allows it: an event of the capturing stream begins the branch on
a stream of its own, and another ends it. Outside a capture launches stay in order, as two events more would cost the
host as much as the branch saves.

Memory that the branch writes must be allocated before it begins, on the capturing stream, and be in use until a launch
behind the join: the allocator knows of the capturing stream alone. The launch behind the join depends on both streams;
if it is an early launch (`launch.py`), it waits for both.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout.work_lists import (
    CUT_TILES,
    AttentionPlan,
    AttentionShape,
    Division,
    Tiling,
    WorkItem,
    WorkList,
    decode_tiling,
    divide,
    extend_tiling,
    partials_size,
    table_sizes,
    with_groups_of_latents,
)
from .launch import SWITCHES, capability, early_launch, num_multiprocessors
from .work_lists import list_kernel

BLOCK = 512  # tasks processed at a time
COMPARED = 16  # query tiles whose keys those of a block are compared with at a time


def plan_attention(
    shape: AttentionShape,
    lengths: Tensor,
    query_starts: Tensor | None,
    num_tokens: int,
    num_processors: int | None = None,
) -> AttentionPlan:
    """See `KernelSet.plan_attention`. Returns the work lists of the step, on the device of `lengths`.

    Its memory (`workspace_bytes`) depends on S, T and the device alone. So a replayed CUDA graph remakes the lists in
    place, from the current lengths. There, they are made on a branch, beside what the first layer has before attention.
    """
    processors = num_processors or num_multiprocessors(lengths.device)
    shape = with_groups_of_latents(shape, capability(lengths.device))
    divided = _divisions(shape, len(lengths), num_tokens, query_starts is None, processors, lengths.device)
    divisions = [division for division, _ in divided]
    tables = {window: [_Tables.of(each, lengths.device) for each in divisions] for window in shape.windows}
    partials = torch.empty(_num_partials(shape, divided), dtype=torch.float32, device=lengths.device)

    def launch() -> None:
        for window, made in tables.items():
            _make_lists(divisions, made, lengths, query_starts, window)

    branch = Branch(lengths.device, launch)
    lists = [
        (window, made.as_list(*sizes))
        for window, each in tables.items()
        for made, sizes in zip(each, divided, strict=True)
    ]
    decode, extend = (
        {window: work for window, work in lists if work.division.kind == kind} for kind in ("decode", "extend")
    )
    return AttentionPlan(decode, extend, partials, branch.join)


def workspace_bytes(
    shape: AttentionShape,
    num_sequences: int,
    num_tokens: int,
    is_decode: bool,
    device: torch.device,
    num_processors: int | None = None,
) -> int:
    """Device memory that `plan_attention` takes for a step of this size, for any lengths."""
    processors = num_processors or num_multiprocessors(device)
    shape = with_groups_of_latents(shape, capability(device))
    divided = _divisions(shape, num_sequences, num_tokens, is_decode, processors, device)
    tables = sum(sum(table_sizes(division)) for division, _ in divided) * len(shape.windows)
    return 4 * (tables + _num_partials(shape, divided))


def _num_partials(shape: AttentionShape, divided: list[tuple[Division, Tiling]]) -> int:
    """Size of the partial sums in numbers: of the larger list, as lists and layers run one after another."""
    return max(partials_size(division, shape) for division, _ in divided)


def _divisions(
    shape: AttentionShape,
    num_sequences: int,
    num_tokens: int,
    is_decode: bool,
    num_processors: int,
    device: torch.device,
) -> list[tuple[Division, Tiling]]:
    """The sizes of a step's lists: decode unless extend is joint, extend unless every sequence has one new token."""
    tilings = {
        "decode": decode_tiling(shape, capability(device), num_sequences),
        "extend": extend_tiling(shape, capability(device), num_tokens),
    }
    sizes = (num_sequences, num_tokens, num_processors)
    extend = divide("extend", shape, tilings["extend"], *sizes)
    if is_decode or not extend.is_joint:
        decode = divide("decode", shape, tilings["decode"], *sizes)
        found = [decode] if is_decode else [decode, extend]
    else:
        found = [extend]
    return [(division, tilings[division.kind]) for division in found]


class _Tables(NamedTuple):
    """Memory of a list; see `TableSizes`."""

    items: Tensor
    begins: Tensor
    starts: Tensor
    arrivals: Tensor
    counts: Tensor
    keys: Tensor

    @classmethod
    def of(cls, division: Division, device: torch.device) -> _Tables:
        sizes = table_sizes(division)
        return cls(*torch.empty(sum(sizes), dtype=torch.int32, device=device).split_with_sizes(sizes))

    def as_list(self, division: Division, tiling: Tiling) -> WorkList:
        return WorkList(
            division,
            tiling,
            self.items[: division.max_items * len(WorkItem)].view(-1, len(WorkItem)),
            self.starts[: division.num_programs + 1],
            self.arrivals[: division.max_partials],
            self.counts[:2],
        )


def _make_lists(
    divisions: list[Division],
    tables: list[_Tables],
    lengths: Tensor,
    query_starts: Tensor | None,
    window: int | None,
) -> None:
    """Launches the kernel that makes these lists: of decode, of extend, or both in this order."""
    # NOTE: with the limit of registers the compiler spills none. Without, it spills to let more programs run at a time.
    decode, extend = divisions[0], divisions[-1]
    if extend.max_tasks:
        list_kernel[(len(divisions),)](
            *tables[0][:-1], *tables[-1], lengths if query_starts is None else query_starts, lengths,
            decode.num_sequences, decode.num_tokens, window or 0, decode.max_tasks, extend.max_tasks,
            extend.max_query_tiles, decode.num_programs, extend.num_programs,
            NUM_GROUPS=decode.num_groups, TOKENS=extend.tokens_per_tile, DECODE_N=decode.block_n,
            EXTEND_N=extend.block_n, HAS_DECODE=decode.kind == "decode", IS_MIXED=query_starts is not None,
            HAS_WINDOW=window is not None, IS_FIXED=decode.is_fixed, FIXED_PIECES=decode.max_pieces,
            DECODE_MIN=decode.min_tiles, EXTEND_MIN=extend.min_tiles, ITEM_TILES=extend.item_tiles, CUT_TILES=CUT_TILES,
            ITEM=len(WorkItem), BLOCK=BLOCK, BLOCK_J=COMPARED, num_warps=8, maxnreg=128, enable_fp_fusion=True,
            **early_launch(lengths.device),
        )  # fmt: skip


# -- the branch of a graph


class Branch:
    """Launches beside those of the stream that began it.

    `join` them before the first launch that reads their result, and before the end of the capture.
    """

    def __init__(self, device: torch.device, launch: Callable[[], object]) -> None:
        """Calls `launch`, whose launches run after all that is on the current stream now."""
        self._ended: torch.cuda.Event | None = None
        if not (SWITCHES.branches and is_captured(device)):
            launch()
            return
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            launch()
            self._ended = stream.record_event()
        self._device = device

    def join(self) -> None:
        """Makes later launches on the current stream wait for the branch. Calls after the first do nothing."""
        if self._ended is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ended)
            self._ended = None


def is_captured(device: torch.device) -> bool:
    """Whether the current stream of the device captures a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all branches of a device. In use by one capture at a time."""
    return torch.cuda.Stream(device)
