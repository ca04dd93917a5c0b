"""Trials of attention over a paged cache, and of the lists of work that it walks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from millrace.kernels.checks import roofline
from millrace.kernels.checks.roofline import LaunchCost
from millrace.kernels.kernel_set import KernelSet
from millrace.kernels.layout.list_work import list_work
from millrace.kernels.layout.work_lists import AttentionPlan, AttentionShape
from tests.bench.gpu.trials.folded import FoldedInputs
from tests.bench.gpu.trials.layers import Widths
from tests.bench.gpu.trials.trial import Tensors, Trial, far, unchecked
from tests.kernels.paged import PagedCase, dense_attention, make_case

SCALE = 0.25
FP8 = torch.float8_e4m3fn
Load = Sequence[tuple[int, int]]  # of each sequence: new tokens, tokens in all


def checked_trial(
    kernels: KernelSet,
    name: str,
    load: Load,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    *,
    head_dim: int = 64,
    num_groups: int = 2,
    group: int = 2,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    is_fp8: bool = False,
    is_batch_invariant: bool = False,
    num_processors: int | None = None,
) -> Trial:
    """Scattered blocks, NaN in every slot without a token, and ids far out of range behind a sequence's blocks."""
    sizes = {"num_groups": num_groups, "group": group, "head_dim": head_dim, "block_size": block_size}
    case = make_case([new for new, _ in load], [length for _, length in load], **sizes, dtype=dtype, seed=seed)
    scales = torch.tensor([[0.5, 1.75]]).expand(2, 2).repeat(1, num_groups)[:, :num_groups] if is_fp8 else None
    if is_fp8:
        assert scales is not None
        small = replace(case, k_cache=case.k_cache.to(FP8), v_cache=case.v_cache.to(FP8))
        case = replace(small, keys=_as_kept(case.keys, scales[0]), values=_as_kept(case.values, scales[1]))
    sinks = torch.linspace(-2, 4, num_groups * group) if has_sinks else None
    want = dense_attention(case, SCALE, window, soft_cap, sinks)
    sinks = None if sinks is None else sinks.to(device)
    there = _moved(case, device)
    shape = AttentionShape(
        num_groups * group, num_groups, head_dim, dtype, there.k_cache.dtype, (window,), is_batch_invariant
    )
    is_decode = all(new == 1 for new, _ in load)
    starts = None if is_decode else there.query_starts
    more = (None, None) if scales is None else tuple(scales.contiguous().to(device))

    def launch() -> Tensors:
        plan = kernels.plan_attention(shape, there.lengths, starts, len(there.q), num_processors)
        return {"out": _attend(kernels, there, plan, is_decode, SCALE, window, soft_cap, sinks, *more)}

    return Trial(
        f"{name} {head_dim} {str(dtype).removeprefix('torch.')}",
        launch,
        lambda got: far("the result", got["out"], want),
        roofline.paged_attention(
            *_both(load), num_groups * group, num_groups, head_dim, block_size, dtype.itemsize, window
        ),
    )


def checked_trials(
    kernels: KernelSet, device: torch.device, dtype: torch.dtype, seed: int, is_tiny: bool
) -> Iterator[Trial]:
    """Every branch of the kernels: decode and extend, cut and whole, windows, caps, sinks, 8 bits, fixed cuts."""

    def trial(name: str, load: Load, **more: object) -> Trial:
        return checked_trial(kernels, name, load, device, dtype, seed, **more)

    decoding: Load = [(1, 0), (1, 1), (1, 16), (1, 17), (1, 130)]
    mixed: Load = [(1, 9), (5, 5), (0, 0), (1, 70), (12, 40)]
    yield trial("paged_decode", decoding)
    yield trial("paged_attention", mixed)
    if is_tiny:
        return
    for head_dim in (128, 80):
        yield trial("paged_decode", decoding, head_dim=head_dim, group=4)
        yield trial("paged_attention", mixed, head_dim=head_dim, group=4)
    long: Load = [(1, 700), (1, 3)]
    prompt: Load = [(1, 400), (90, 516)]
    options: dict[str, dict[str, object]] = {
        "in pieces": {"num_processors": 4},
        "of two lists": {"num_processors": 3},
        "window": {"window": 33},
        "cap": {"soft_cap": 3.0},
        "sinks": {"has_sinks": True, "window": 33},
        "sinks in pieces": {"has_sinks": True, "num_processors": 4},
        "fp8": {"is_fp8": True},
        "fixed": {"is_batch_invariant": True},
    }
    for name, more in options.items():
        yield trial(f"paged_decode {name}", long, **more)
        yield trial(f"paged_attention {name}", prompt, **more)
    for group in (1, 7, 19):
        yield trial(f"paged_decode group {group}", [(1, 37)], num_groups=1, group=group)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLoad:
    """Tensors of one load of one model, made once; `trials` may then be taken with any tilings."""

    kernels: KernelSet
    widths: Widths
    load: Load
    case: PagedCase
    shape: AttentionShape
    block_size: int
    scales: tuple[Tensor | None, Tensor | None]
    folded: FoldedInputs | None = None  # of decode with its prologue, as steps of few rows have it

    @classmethod
    def drawn(
        cls,
        kernels: KernelSet,
        widths: Widths,
        num_layers: int,
        load: Load,
        dtype: torch.dtype,
        draw: Generator | None,
        *,
        is_block_major: bool = True,
        is_fp8: bool = False,
        block_size: int = 16,
        device: torch.device | None = None,
        is_folded: bool = False,
    ) -> AttentionLoad:
        """`draw` None: on `device`, and never filled, as meta tensors cannot be. `is_folded`: decode with its prologue,
        with norms of heads."""
        device = draw.device if draw is not None else device
        assert device is not None
        case = _random_case(widths, num_layers, load, dtype, draw, device, is_block_major, is_fp8, block_size)
        shape = AttentionShape(widths.num_heads, widths.num_groups, widths.head_dim, dtype, case.k_cache.dtype)
        scales = (torch.ones(widths.num_groups, device=device),) * 2 if is_fp8 else (None, None)
        folded = FoldedInputs.drawn(widths, case, block_size, draw) if is_folded else None
        return cls(kernels, widths, load, case, shape, block_size, scales, folded)

    @property
    def is_decode(self) -> bool:
        return all(new == 1 for new, _ in self.load)

    def plan(self) -> AttentionPlan | None:
        starts = None if self.is_decode else self.case.query_starts
        return self.kernels.plan_attention(self.shape, self.case.lengths, starts, len(self.case.q))

    def attend(self, plan: AttentionPlan | None) -> Tensors:
        scale = self.widths.head_dim**-0.5
        if self.folded is not None:
            of, case, (k_scale, v_scale) = self.folded, self.case, self.scales
            out = self.kernels.prologue_decode(
                of.qkv, of.norms, of.cos, of.sin, of.positions, case.k_cache, case.v_cache, of.slots, None,
                case.block_tables, case.lengths, scale, k_scale=k_scale, v_scale=v_scale, plan=plan,
            )  # fmt: skip
            return {"out": out}
        return {"out": _attend(self.kernels, self.case, plan, self.is_decode, scale, None, None, None, *self.scales)}

    def trials(self) -> tuple[Trial, Trial]:
        """Of the lists of a step, and of attention by them."""
        plan = self.plan()
        starts = None if self.is_decode else self.case.query_starts
        listed, walked = _list_costs(plan, self.case, starts, self.widths, self.shape.dtype)
        whole = roofline.paged_attention(
            *_both(self.load), self.widths.num_heads, self.widths.num_groups, self.widths.head_dim, self.block_size,
            self.shape.dtype.itemsize, cache_element_size=self.case.k_cache.itemsize,
        )  # fmt: skip
        (*_, (num_new, length)) = self.load
        what = f"{len(self.load)} x {num_new} of {length}"

        def listing() -> Tensors:
            self.plan()
            return {}

        name = f"{_KERNELS[self.is_decode, self.folded is not None]} of {what}"
        return (
            Trial(f"plan_attention of {what}", listing, unchecked, listed),
            Trial(name, lambda: self.attend(plan), unchecked, whole + walked),
        )


_KERNELS = {(False, False): "paged_attention", (True, False): "paged_decode", (True, True): "prologue_decode"}


def timed_trials(
    kernels: KernelSet,
    widths: Widths,
    num_layers: int,
    load: Load,
    dtype: torch.dtype,
    draw: Generator,
    *,
    is_block_major: bool = True,
    is_fp8: bool = False,
) -> Iterator[Trial]:
    """The lists of a step, and one layer's attention by them, over a cache with all layers in it, in either order."""
    kinds = {"is_block_major": is_block_major, "is_fp8": is_fp8}
    plan, attention = AttentionLoad.drawn(kernels, widths, num_layers, load, dtype, draw, **kinds).trials()
    yield plan
    kernel, _, what = attention.name.partition(" ")
    order = f"{'block' if is_block_major else 'layer'}-major{' fp8' if is_fp8 else ''}"
    yield replace(attention, name=f"{kernel} {order} {what}")


def _attend(
    kernels: KernelSet,
    case: PagedCase,
    plan: AttentionPlan | None,
    is_decode: bool,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    caches = (case.q, case.k_cache, case.v_cache, case.block_tables)
    if is_decode:
        return kernels.paged_decode(
            *caches, case.lengths, scale, window, soft_cap=soft_cap, sinks=sinks,
            k_scale=k_scale, v_scale=v_scale, plan=plan,
        )  # fmt: skip
    return kernels.paged_attention(
        *caches, case.query_starts, case.lengths, scale, window,
        soft_cap=soft_cap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, plan=plan,
    )  # fmt: skip


def _random_case(
    widths: Widths,
    num_layers: int,
    load: Load,
    dtype: torch.dtype,
    draw: Generator | None,
    device: torch.device,
    is_block_major: bool,
    is_fp8: bool,
    block_size: int,
) -> PagedCase:
    """The middle layer of a whole cache, whose other layers are left as memory came."""
    num_new, lengths = _both(load)
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks, middle = sum(blocks) + 1, num_layers // 2
    tile = (2, widths.num_groups, block_size, widths.head_dim)
    if is_block_major:
        data = torch.empty(num_blocks, num_layers, *tile, dtype=FP8 if is_fp8 else dtype, device=device)[:, middle]
    else:
        data = torch.empty(num_layers, num_blocks, *tile, dtype=FP8 if is_fp8 else dtype, device=device)[middle]
    for first in range(
        0, num_blocks if draw is not None else 0, 1024
    ):  # in parts, so that what is drawn takes little room
        part = data[first : first + 1024]
        part.copy_(torch.randn(part.shape, generator=draw, device=device, dtype=dtype))
    tables = torch.zeros(len(load), max(blocks), dtype=torch.int32, device=device)
    ids = (torch.randperm(num_blocks - 1, generator=draw, device=device) + 1).int()
    for row, own in enumerate(ids.split(blocks)):
        tables[row, : len(own)] = own
    starts = torch.tensor([0, *num_new]).cumsum(0).int().to(device)
    q = torch.randn(sum(num_new), widths.num_heads, widths.head_dim, generator=draw, device=device, dtype=dtype)
    return PagedCase(
        q, data[:, 0], data[:, 1], tables, starts, torch.tensor(lengths, dtype=torch.int32, device=device), [], []
    )


def _list_costs(
    plan: AttentionPlan | None, case: PagedCase, starts: Tensor | None, widths: Widths, dtype: torch.dtype
) -> tuple[LaunchCost, LaunchCost]:
    """Of making the lists of a step, and of walking them and merging what was cut."""
    listed = walked = LaunchCost(0, 0)
    for lists in (plan.decode, plan.extend) if plan is not None else ():
        for window, work in lists.items():
            division = work.division
            on_host = list_work(division, case.lengths.cpu(), None if starts is None else starts.cpu(), window)
            num_items, num_splits = len(on_host.items), len(on_host.splits)
            listed += roofline.list_work(len(case.lengths), num_items, num_splits, division.num_programs)
            rows = on_host.splits[:, 1].astype(int) * (widths.num_heads // widths.num_groups)
            num_partial, num_merged = int((rows * on_host.splits[:, 4]).sum()), int(rows.sum())
            sizes = (num_partial, num_merged, widths.head_dim, dtype.itemsize)
            walked += roofline.walk_list(num_items, division.num_programs, *sizes)
            walked += roofline.merge(num_splits, *sizes)
    return listed, walked


def _both(load: Load) -> tuple[list[int], list[int]]:
    return [new for new, _ in load], [length for _, length in load]


def _as_kept(tokens: list[Tensor], scale: Tensor) -> list[Tensor]:
    """What an fp8 cache with these numbers in it stands for, [L, G, D] each."""
    return [one.to(FP8).float() * scale[:, None] for one in tokens]


def _moved(case: PagedCase, device: torch.device) -> PagedCase:
    """The same on a device, caches with the strides they have."""

    def moved(view: Tensor) -> Tensor:
        base = view if view._base is None else view._base
        return base.to(device).as_strided(view.shape, view.stride(), view.storage_offset())

    return replace(
        case,
        q=case.q.to(device),
        k_cache=moved(case.k_cache),
        v_cache=moved(case.v_cache),
        block_tables=case.block_tables.to(device),
        query_starts=case.query_starts.to(device),
        lengths=case.lengths.to(device),
    )
