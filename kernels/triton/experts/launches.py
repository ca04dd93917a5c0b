"""Launches of experts: routing and lists, both products, and the sum over the experts of a token.

Its twin is `kernels/reference/experts.py`; the kernels, and how they work, are in `routing.py`, `lists.py` and
`products.py`. T tokens, P = T * k pairs, E experts. Nothing is read by the host, and all sizes follow from T, so steps
can be captured in CUDA graphs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import triton

from ...layout.experts import TILE, CodedMatrices, RoutedExperts, most_tiles
from ...tilings.experts import ExpertProduct, ExpertShape, ExpertTiling, usual_tiling
from ...tilings.products import DtypeName
from ...tilings.shared_memory import RESERVE, block_bytes
from .. import launch
from ..launch import check_dtype, early_launch, next_power_of_2
from .lists import count_kernel, place_kernel
from .products import product_kernel, sum_kernel
from .routing import route_kernel

FEW_PAIRS = 128  # that one program lists: it compares all with all
BLOCK_PAIRS = 256  # that a program places of more
COMPARED_AT_ONCE = 16  # with each of them: 32 comparisons a thread
COUNTED_AT_ONCE = 2048  # counts of blocks
ROUTED_LANES = 1024  # of a program: 8 a thread
SUMMED = 1024  # numbers of a token that a program adds up
NAMES: dict[torch.dtype, DtypeName] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


@dataclass(frozen=True, slots=True, eq=False)
class PairLists:
    """The pairs of a step by expert."""

    ids: Tensor  # [T, k] i32, best first
    shares: Tensor  # [T, k] f32
    order: Tensor  # [P] i32 pairs by expert, of one expert in their order
    tiles: Tensor  # [W, TILE] i32
    num_tiles: Tensor  # [1] i32


def routed_experts(x: Tensor, logits: Tensor, experts: RoutedExperts) -> Tensor:
    """See `ExpertKernels.routed_experts`."""
    check_dtype(x)
    stack = experts.stack
    assert stack is not None, "the weights were not loaded for these kernels"
    assert x.stride(1) == 1 and all(_is_plain(weight, x) for weight in (stack.gate_up, stack.down))
    num_tokens, num_pairs = len(x), len(x) * experts.top_k
    out = torch.empty((num_tokens, x.shape[1]), dtype=torch.float32, device=x.device)
    if not num_tokens:
        return out
    num_experts, _, inner = stack.down.shape
    first = tiling_of("gate_up", experts, num_pairs, x)
    second = replace(tiling_of("down", experts, num_pairs, x), block_m=first.block_m)
    lists = list_pairs(logits, experts, first.block_m)
    hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    pairs = torch.empty((num_pairs, x.shape[1]), dtype=x.dtype, device=x.device)
    kind = "gated" if experts.is_gated else "activated"
    assert stack.gate_up.shape == (num_experts, inner * (1 + experts.is_gated), x.shape[1])
    _multiply(hidden, x, stack.gate_up, stack.gate_up_bias, lists, experts, first, kind)
    _multiply(pairs, hidden, stack.down, stack.down_bias, lists, experts, second, "down")
    block = min(SUMMED, next_power_of_2(x.shape[1]))
    sum_kernel[(num_tokens, triton.cdiv(x.shape[1], block))](
        out, pairs, lists.shares, x.shape[1],
        TOP_K=experts.top_k, BLOCK=block, enable_fp_fusion=True, **early_launch(x.device),
    )  # fmt: skip
    return out


def _is_plain(weight: Tensor | CodedMatrices, x: Tensor) -> bool:
    """Whether the kernels take a weight for rows x: numbers of one type, or codes, one behind another."""
    if isinstance(weight, CodedMatrices):
        return all(part.is_contiguous() for part in weight.tensors())
    return weight.stride(2) == 1 and weight.dtype == x.dtype


def tiling_of(product: ExpertProduct, experts: RoutedExperts, num_pairs: int, x: Tensor) -> ExpertTiling:
    """The launch options of a product for that many pairs."""
    stack, is_fixed = experts.stack, experts.is_batch_invariant
    assert stack is not None
    num_experts, width, inner = stack.down.shape
    sizes = (inner, width) if product == "gate_up" else (width, inner)
    shape = ExpertShape(
        num_experts=num_experts,
        num_outputs=sizes[0],
        num_inner=sizes[1],
        num_pairs=num_pairs,
        product=product,
        is_gated=experts.is_gated,
        dtype=NAMES[x.dtype],
    )
    if experts.tilings is not None:
        tiling = experts.tilings.experts(shape, is_fixed=is_fixed)
    else:
        tiling = usual_tiling(shape, block_bytes(launch.capability(x.device)) - RESERVE, is_fixed=is_fixed)
    weight = stack.gate_up if product == "gate_up" else stack.down
    return _of_codes(tiling) if isinstance(weight, CodedMatrices) else tiling


def _of_codes(tiling: ExpertTiling) -> ExpertTiling:
    """The same with tiles that leave registers to unpack codes in."""
    sizes = {"block_m": min(64, tiling.block_m), "block_n": min(64, tiling.block_n)}
    return replace(tiling, **sizes, num_warps=max(8, tiling.num_warps))


def list_pairs(logits: Tensor, experts: RoutedExperts, tile_rows: int) -> PairLists:
    """Routes the tokens of logits [T, E] f32, T > 0, and lists their pairs in tiles of at most `tile_rows`."""
    (num_tokens, num_experts), top_k, rule, device = logits.shape, experts.top_k, experts.rule, logits.device
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_experts % rule.groups == 0
    num_pairs = num_tokens * top_k
    size = num_experts // rule.groups
    group_lanes, size_lanes = next_power_of_2(rule.groups), next_power_of_2(size)
    rows = max(1, ROUTED_LANES // (group_lanes * size_lanes))
    rows = min(rows, next_power_of_2(num_tokens))
    is_few = num_tokens <= rows and num_pairs <= FEW_PAIRS
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    shares = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((most_tiles(num_pairs, num_experts, tile_rows), TILE), dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    is_after = rule.score == "softmax" and rule.when == "after_top_k"
    by_logits = is_after or (experts.choice_bias is None and (rule.groups == 1 or rule.group_score == "max"))
    route_kernel[(triton.cdiv(num_tokens, rows),)](
        ids, shares, logits, None if is_after else experts.choice_bias, experts.scales, order, tiles, num_tiles,
        num_tokens, logits.stride(0), rule.norm_eps, rule.norm_min, rule.scale,
        GROUPS=1 if is_after else rule.groups, SIZE=num_experts if is_after else size, TOP_K=top_k,
        KEPT=rule.groups_kept, GROUP_SCORE=rule.group_score, SCORE=rule.score, IS_AFTER=is_after,
        IS_NORMED=rule.norm_top_k, BY_LOGITS=by_logits, GROUP_LANES=1 if is_after else group_lanes,
        SIZE_LANES=next_power_of_2(num_experts) if is_after else size_lanes, RANKS=next_power_of_2(top_k), ROWS=rows,
        LISTED=next_power_of_2(num_pairs) if is_few else 0, TILE_ROWS=tile_rows,
        enable_fp_fusion=True, **early_launch(device),
    )  # fmt: skip
    lists = PairLists(ids, shares, order, tiles, num_tiles)
    if not is_few:
        _list_many(lists, num_experts, tile_rows)
    return lists


def _list_many(lists: PairLists, num_experts: int, tile_rows: int) -> None:
    num_pairs, device = len(lists.order), lists.order.device
    num_blocks, lanes = triton.cdiv(num_pairs, BLOCK_PAIRS), next_power_of_2(num_experts + 1)
    counts = torch.empty((num_blocks, num_experts), dtype=torch.int32, device=device)
    shared = dict(EXPERTS=num_experts, LANES=lanes, BLOCK=BLOCK_PAIRS, enable_fp_fusion=True, **early_launch(device))
    count_kernel[(num_blocks,)](counts, lists.ids, num_pairs, **shared)
    place_kernel[(num_blocks,)](
        lists.order, lists.tiles, lists.num_tiles, lists.ids, counts, num_pairs, num_blocks,
        AT_ONCE=COMPARED_AT_ONCE, TURN=max(1, COUNTED_AT_ONCE // lanes), TILE_ROWS=tile_rows, **shared,
    )  # fmt: skip


def _multiply(
    out: Tensor,
    x: Tensor,
    weight: Tensor | CodedMatrices,
    bias: Tensor | None,
    lists: PairLists,
    experts: RoutedExperts,
    tiling: ExpertTiling,
    kind: str,
) -> None:
    """A product of each tile, to `out` [P, N]; x is [T, K], or [P, K] for `down`."""
    num_outputs, num_inner = out.shape[1], x.shape[1]
    coded = weight if isinstance(weight, CodedMatrices) else None
    stored = weight.codes if isinstance(weight, CodedMatrices) else weight
    by_group = (None,) * 4 if coded is None else (coded.scales, coded.zeros, coded.offsets, coded.table)
    groups = (0, 0) if coded is None else coded.scales.stride()[:2]
    product_kernel[(triton.cdiv(num_outputs, tiling.block_n), len(lists.tiles))](
        out, x, stored, bias, *by_group, lists.order, lists.tiles, lists.num_tiles, experts.alpha, experts.limit,
        0.0 if coded is None else coded.zero, num_outputs, num_inner, x.stride(0), stored.stride(0), stored.stride(1),
        *groups, 0 if bias is None else bias.stride(0), out.stride(0),
        GROUP=0 if coded is None else coded.group, IS_PAIRS=coded is not None and coded.is_packed,
        TOP_K=experts.top_k, KIND=kind, ACTIVATION=experts.activation,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EVEN_N=num_outputs % tiling.block_n == 0, EVEN_K=num_inner % tiling.block_k == 0,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, STAGES=tiling.num_stages,
        num_warps=tiling.num_warps, enable_fp_fusion=True, **early_launch(x.device),
    )  # fmt: skip
