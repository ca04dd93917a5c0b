"""Recurrent layers of a decoder, and the states of running sequences by slot.

The matrices are in f32, the convolutions' last inputs as the model. A slot's state is not cleared when a sequence ends:
a sequence that begins with its first token reads zeros.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.kernel_set import KernelSet, RecurrentKernels
from ...kernels.layout.kv_layout import ALIGNMENT
from ...kernels.layout.state_layout import StateLayout
from ...kernels.reference import kernel_set
from ...kernels.reference.recurrent import SequenceRows
from ..families.names import projections
from ..spec import DecoderSpec, RecurrentSpec
from .upload import upload, zeros
from .weights import RecurrentWeights

Ids = NDArray[np.int64]  # [C] slots, or places on the host


class RecurrentStates:
    """The states of running sequences, for all recurrent layers of a decoder, and behind them those of cached prefixes.

    A state is contiguous over all layers, so swapping or copying it is one transfer.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layout: StateLayout,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet = kernel_set,
    ) -> None:
        """Allocates them on `device`; `kernels` copies states."""
        kinds: dict[RecurrentSpec, list[int]] = {}
        for index, layer in spec.recurrent_layers.items():
            kinds.setdefault(layer, []).append(index)
        parts: list[tuple[RecurrentSpec, torch.dtype, tuple[int, ...]]] = [  # f32 first, which is aligned to 4 bytes
            (kind, torch.float32, (len(indices), kind.num_value_heads, kind.key_dim, kind.value_dim))
            for kind, indices in kinds.items()
            if kind.matrix_size
        ]
        parts += [
            (kind, dtype, (len(indices), kind.conv_width - 1, kind.conv_channels)) for kind, indices in kinds.items()
        ]
        ends = [*accumulate((part[1].itemsize * math.prod(part[2]) for part in parts), initial=0)]
        self.layout, self._copy_blocks = layout, kernels.copy_blocks
        num_rows = layout.num_slots + layout.num_snapshots
        # [S + snapshots, bytes] u8
        self.memory = zeros((num_rows, -(-ends[-1] // ALIGNMENT) * ALIGNMENT), torch.uint8, device)
        self._layers: dict[int, tuple[Tensor, Tensor | None]] = {}
        matrices: dict[RecurrentSpec, Tensor] = {}
        for (kind, part_dtype, shape), (begin, end) in zip(parts, pairwise(ends), strict=True):
            part = self.memory[:, begin:end].view(part_dtype).view(num_rows, *shape)  # [S + snapshots, layers, ...]
            if len(shape) == 4:
                matrices[kind] = part
                continue
            for place, index in enumerate(kinds[kind]):
                self._layers[index] = part[:, place], matrices[kind][:, place] if kind in matrices else None

    def layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """What one layer keeps: inputs of its convolution [S, W - 1, C], and matrices [S, H, K, V] or None. Views."""
        return self._layers[index]

    def make_host_states(self) -> Tensor:
        """Host memory for the states of swapped sequences, [places, bytes]; uninitialised.

        Pinned if the states are on a GPU, and then allocated at once. Otherwise unused places take address space only.
        """
        shape = self.layout.num_on_host, self.memory.shape[1]
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.memory.is_cuda)

    def copy(self, sources: Ids, destinations: Ids) -> None:
        """Copies the state of slot or snapshot `sources[i]` to `destinations[i]`, all layers. None is in both."""
        self._copy_blocks(self.memory, 0, *(upload(ids, self.memory.device) for ids in (sources, destinations)))

    def copy_out(self, slots: Ids, host: Tensor, places: Ids) -> None:
        """Copies the state of `slots[i]` to place `places[i]` of `host` (see `make_host_states`), all layers."""
        _copy(self.memory, slots, host, places)

    def copy_in(self, host: Tensor, places: Ids, slots: Ids) -> None:
        """Copies place `places[i]` of `host` to the state of `slots[i]`, all layers."""
        _copy(host, places, self.memory, slots)


def _copy(source: Tensor, source_ids: Ids, destination: Tensor, destination_ids: Ids) -> None:
    """Copies state by state: on a GPU one asynchronous transfer each, on the current stream."""
    for source_id, destination_id in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
        destination[destination_id].copy_(source[source_id], non_blocking=True)


class RecurrentLayer:
    """A layer of the kinds `gdn`, `mamba2` and `short_conv`. Computes in f32 between the two projections."""

    def __init__(self, spec: RecurrentSpec, weights: RecurrentWeights, kernels: RecurrentKernels) -> None:
        self.spec, self.weights, self.kernels = spec, weights, kernels
        self._sizes = list(projections(spec).values())

    def run(self, joined: Tensor, tails: Tensor, matrices: Tensor | None, rows: SequenceRows) -> Tensor:
        """From the joined projections [T, N] of a step to [T, inner] in their dtype. Changes the slots' states."""
        if matrices is None:
            return self._convolve(joined, tails, rows)
        gate, mixed, *heads = joined.split_with_sizes(self._sizes, -1)
        weights, num_tokens = self.weights, len(joined)
        mixed = self.kernels.causal_conv(mixed, tails, weights.conv, weights.conv_bias, rows)
        mix = self._delta if self.spec.kind == "gdn" else self._mamba
        out = mix(mixed, heads, matrices, rows)  # [T, H, V]
        if weights.norm is None:
            return (out.reshape(num_tokens, -1) * F.silu(gate.float())).to(joined.dtype)
        size, norm = self.spec.norm_group or self.spec.value_dim, weights.norm
        assert norm.weight is not None
        is_gated_first = self.spec.kind == "mamba2"
        out = out.reshape(num_tokens, -1, size)
        return self.kernels.gated_norm(out, gate, norm.weight, norm.spec.eps, is_gated_first=is_gated_first)

    def _delta(self, mixed: Tensor, heads: list[Tensor], matrices: Tensor, rows: SequenceRows) -> Tensor:
        """The gated delta rule, [T, H, V]."""
        spec, weights = self.spec, self.weights
        assert weights.decay is not None and weights.step_bias is not None
        step, rate = heads
        sizes = spec.num_key_heads, spec.key_dim
        inputs = self.kernels.delta_inputs(mixed, step, rate, weights.decay, weights.step_bias, *sizes)
        return self.kernels.recur(matrices, *inputs, rows)

    def _mamba(self, mixed: Tensor, heads: list[Tensor], matrices: Tensor, rows: SequenceRows) -> Tensor:
        """Mamba-2, [T, H, V]: its B are the keys, its C the queries, and values are x times the step."""
        spec, weights = self.spec, self.weights
        assert weights.decay is not None and weights.step_bias is not None and weights.skip is not None
        sizes = spec.num_key_heads, spec.key_dim
        q, k, x, v, log_decay = self.kernels.mamba_inputs(
            mixed, heads[0], weights.decay, weights.step_bias, spec.step_limit, *sizes
        )
        out = self.kernels.recur(matrices, q, k, v, log_decay, None, rows)
        return out.addcmul_(weights.skip[:, None], x)

    def _convolve(self, joined: Tensor, tails: Tensor, rows: SequenceRows) -> Tensor:
        """A short convolution between two gates, [T, C]."""
        before, after, x = joined.chunk(3, -1)
        mixed = self.kernels.causal_conv(before * x, tails, self.weights.conv, self.weights.conv_bias, rows)
        return (after.float() * mixed).to(joined.dtype)
