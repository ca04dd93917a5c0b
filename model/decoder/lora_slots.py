"""LoRA adapters in device slots of fixed addresses, and the lists by which kernels find the tokens of each.

CUDA graphs contain the addresses; what differs between steps is read from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.kernel_set import LoraKernels
from ...kernels.layout.lora_lists import LoraLists, LoraWeights, make_lists
from ..checkpoint.safetensors import BFLOAT16
from ..errors import AdapterError
from ..lora.adapter import Adapter, AdapterSlice, LinearName
from ..lora.prepared import PreparedAdapter
from ..lora.tensor_file import Pauses
from ..spec import AttentionSpec, DecoderSpec, FeedSpec, LayerSpec
from .linear import Linear
from .upload import upload
from .weights import DecoderWeights

ALIGNMENT = 64  # numbers: each matrix begins at a multiple, so that kernels load whole lines

Place = tuple[int, LinearName]  # layer, linear


@dataclass(frozen=True, slots=True)
class SlotMatrices:
    """Where in a slot the matrices of a linear are."""

    sizes: tuple[int, ...]  # [P] rows of the linear's parts
    num_inner: int  # K
    a_at: int  # [P, R, K]
    b_at: int  # [R, M]
    ranks_at: int  # [P]


@dataclass(frozen=True, slots=True, eq=False)
class SlotContents:
    """An adapter on the host as it lies in a slot, in pinned memory if the device is a GPU."""

    numbers: Tensor  # [slot_size]
    ranks: Tensor  # [num_ranks] i32

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes + self.ranks.nbytes


class SlotLayout:
    """The layout of a slot: for each linear of each layer A by parts, then B, with room for the largest rank."""

    def __init__(self, spec: DecoderSpec, max_rank: int) -> None:
        self.max_rank = max_rank
        self.matrices: dict[Place, SlotMatrices] = {}
        self.slot_size, self.num_ranks = 0, 0
        for layer, one in enumerate(spec.layers):
            for name, (sizes, num_inner) in _linears(spec, one).items():
                a_at = self._take(len(sizes) * max_rank * num_inner)
                b_at = self._take(max_rank * sum(sizes))
                self.matrices[layer, name] = SlotMatrices(sizes, num_inner, a_at, b_at, self.num_ranks)
                self.num_ranks += len(sizes)

    def num_bytes(self, num_slots: int, itemsize: int) -> int:
        """Memory of all slots."""
        return num_slots * (self.slot_size * itemsize + 4 * self.num_ranks)

    def weights(self, numbers: Tensor, ranks: Tensor, place: Place) -> LoraWeights:
        """The views of a linear's matrices in `numbers` [S, slot_size] and `ranks` [S, num_ranks]."""
        at, most = self.matrices[place], self.max_rank
        num_parts, num_outputs = len(at.sizes), sum(at.sizes)
        return LoraWeights(
            a=_part(numbers, at.a_at, num_parts, most, at.num_inner),
            b=_part(numbers, at.b_at, most, num_outputs),
            ranks=ranks[:, at.ranks_at : at.ranks_at + num_parts],
            sizes=at.sizes,
        )

    def pack(self, adapter: Adapter, dtype: torch.dtype, *, is_pinned: bool) -> SlotContents:
        """Copies an adapter into the layout. Raises AdapterError if its ranks do not fit."""
        numbers = torch.empty(self.slot_size, dtype=dtype, pin_memory=is_pinned)
        ranks = torch.zeros(self.num_ranks, dtype=torch.int32, pin_memory=is_pinned)
        pause = Pauses()
        for place, slices in adapter.linears.items():
            pause()
            weights = self.weights(numbers[None], ranks[None], place)
            for one in slices:
                self._put(weights, one, adapter.name)
        return SlotContents(numbers, ranks)

    def _put(self, weights: LoraWeights, one: AdapterSlice, name: str) -> None:
        """Adds a slice to the parts that its rows are in; one of several parts is there for each."""
        a, b = _tensor(one.a), _tensor(one.b).t()  # [r, K], [r, rows]
        part_begin = 0
        for part, size in enumerate(weights.sizes):
            begin, end = max(one.row_start, part_begin), min(one.row_start + one.num_rows, part_begin + size)
            if begin < end:
                first = int(weights.ranks[0, part])
                if first + one.rank > self.max_rank:
                    raise AdapterError(
                        f"adapter '{name}': its ranks add up to {first + one.rank} where several of its modules are "
                        f"one matrix; this server takes up to {self.max_rank}: start it with --max-lora-rank "
                        f"{first + one.rank}"
                    )
                weights.ranks[0, part] = first + one.rank
                weights.a[0, part, first : first + one.rank] = a
                columns = weights.b[0, first : first + one.rank]
                columns[:, part_begin : part_begin + size] = 0
                columns[:, begin:end] = b[:, begin - one.row_start : end - one.row_start]
            part_begin += size

    def _take(self, size: int) -> int:
        at = self.slot_size
        self.slot_size += -(-size // ALIGNMENT) * ALIGNMENT
        return at


class LoraSlots:
    """The device slots of adapters, 1 to `num_slots`, and the lists of the current step. Slot 0 is the base model.

    Used on the device thread, except `prepare`.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        kernels: LoraKernels,
        num_slots: int,
        max_rank: int,
        max_tokens: int,
    ) -> None:
        """Steps have at most `max_tokens` tokens."""
        self.kernels = kernels
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.layout = SlotLayout(spec, max_rank)
        self._numbers = torch.zeros(num_slots, self.layout.slot_size, dtype=self.dtype, device=self.device)
        self._ranks = torch.zeros(num_slots, self.layout.num_ranks, dtype=torch.int32, device=self.device)
        self._of_linear: Mapping[Linear, LoraWeights] = {
            getattr(weights.layers[layer], name): self.layout.weights(self._numbers, self._ranks, (layer, name))
            for layer, name in self.layout.matrices
        }
        self._all_lists = make_lists(self._zeros, max_tokens, num_slots)
        self._lists: LoraLists | None = None
        self._loaded: list[SlotContents | None] = [None] * num_slots  # in use until it is copied
        self.copy: Callable[[Tensor, Tensor], object] = Tensor.copy_  # (to the device, from the host)

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return self.layout.num_bytes(len(self._numbers), self.dtype.itemsize)

    def prepare(self, adapter: Adapter) -> PreparedAdapter[SlotContents]:
        """Packs an adapter, so that `load` has only to copy it. On any thread. Raises AdapterError."""
        packed = self._pack(adapter)
        return PreparedAdapter.of(adapter, packed, packed.num_bytes)

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter | PreparedAdapter[SlotContents]) -> None:
        """Copies an adapter into a slot that no step in flight reads; one that is not prepared is packed first."""
        packed = adapter.contents if isinstance(adapter, PreparedAdapter) else self._pack(adapter)
        self._loaded[slot - 1] = packed
        self.copy(self._numbers[slot - 1], packed.numbers)
        self.copy(self._ranks[slot - 1], packed.ranks)

    def _pack(self, adapter: Adapter) -> SlotContents:
        return self.layout.pack(adapter, self.dtype, is_pinned=self.device.type == "cuda")

    def begin_step(self, slots: NDArray[np.int64] | None) -> None:
        """Sets the adapter slot of each token, [T] on the host; None: all tokens are the base model's."""
        self.begin_device_step(None if slots is None else upload(slots.astype(np.int32), self.device))

    @torch.inference_mode()
    def begin_device_step(self, adapters: Tensor | None) -> None:
        """Lists the tokens of a step by adapter slot, [T] i32; None: the step computes no adapters."""
        self._lists = None
        if adapters is not None:
            if len(adapters) > len(self._all_lists.order):  # no step of a graph
                self._all_lists = make_lists(self._zeros, len(adapters), len(self._numbers))
            lists = self._all_lists.of(len(adapters))
            self.kernels.group_tokens(adapters, lists)
            self._lists = lists

    @property
    def is_idle(self) -> bool:
        """Whether the step computes no adapters."""
        return self._lists is None

    def of(self, linear: object) -> tuple[LoraWeights, LoraLists] | None:
        """The matrices of a linear and the step's lists; None: the linear's product has no updates."""
        weights = self._of_linear.get(linear) if isinstance(linear, Linear) else None
        return None if weights is None or self._lists is None else (weights, self._lists)

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)


def _part(numbers: Tensor, at: int, *shape: int) -> Tensor:
    """[S, *shape] a view of [S, slot_size], from `at` on in each slot."""
    return numbers[:, at : at + math.prod(shape)].view(len(numbers), *shape)


def _linears(spec: DecoderSpec, layer: LayerSpec) -> dict[LinearName, tuple[tuple[int, ...], int]]:
    """The parts of each linear of a layer, in rows, and its inputs."""
    mixer, feed, hidden = layer.mixer, layer.feed, spec.hidden_size
    assert isinstance(mixer, AttentionSpec), "missing() refuses others"
    heads, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    linears: dict[LinearName, tuple[tuple[int, ...], int]] = {
        "qkv": ((heads, keys, keys), hidden),
        "output": ((hidden,), heads),
    }
    if isinstance(feed, FeedSpec):  # adapters of experts are refused
        size = feed.intermediate_size
        linears["gate_up"] = ((size, size) if feed.is_gated else (size,), hidden)
        linears["down"] = ((hidden,), size)
    return linears


def _tensor(array: NDArray[np.generic]) -> Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
