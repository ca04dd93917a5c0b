"""A step's attention plan: the sizes and the memory of its work lists, and the launches that make them.

`kernels/layout/work_lists.py` describes the lists. The host reads no length, and launches depend on sizes alone.
"""

from __future__ import annotations

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
)
from .branch import Branch
from .launch import capability, early_launch, num_multiprocessors
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
