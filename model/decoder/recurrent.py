"""Recurrent layers of a decoder, and the states of running sequences by slot.

The matrices are in f32, the convolutions' last inputs as the model. A slot's state is not cleared when a sequence ends:
a sequence that begins with its first token reads zeros.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.kernel_set import RecurrentKernels
from ...kernels.layout.state_layout import StateLayout
from ...kernels.reference.recurrent import SequenceRows, gated_norm, unit
from ..families.names import projections
from ..spec import DecoderSpec, RecurrentSpec
from .upload import zeros
from .weights import RecurrentWeights

Ids = NDArray[np.int64]  # [C] slots, or places on the host


class RecurrentStates:
    """The states of running sequences, for all recurrent layers of a decoder, and behind them those of cached prefixes.

    A slot is contiguous in each tensor.
    """

    def __init__(self, spec: DecoderSpec, layout: StateLayout, dtype: torch.dtype, device: torch.device) -> None:
        layers = spec.recurrent_layers
        kinds: dict[RecurrentSpec, list[int]] = {}
        for index, layer in layers.items():
            kinds.setdefault(layer, []).append(index)
        self.layout, num_rows = layout, layout.num_slots + layout.num_snapshots
        self._memory: list[Tensor] = []  # [S + snapshots, layers of one shape, ...] each
        self._layers: dict[int, tuple[Tensor, Tensor | None]] = {}
        for kind, indices in kinds.items():
            tail = (kind.conv_width - 1, kind.conv_channels)
            tails = zeros((num_rows, len(indices), *tail), dtype, device)
            self._memory.append(tails)
            matrices = None
            if kind.matrix_size:
                shape = (kind.num_value_heads, kind.key_dim, kind.value_dim)
                matrices = zeros((num_rows, len(indices), *shape), torch.float32, device)
                self._memory.append(matrices)
            for place, index in enumerate(indices):
                self._layers[index] = tails[:, place], None if matrices is None else matrices[:, place]

    def layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """What one layer keeps: inputs of its convolution [S, W - 1, C], and matrices [S, H, K, V] or None. Views."""
        return self._layers[index]

    def make_host_states(self) -> list[Tensor]:
        """Host memory for the states of swapped sequences; uninitialised. Unused places take address space only."""
        num = self.layout.num_on_host
        return [torch.empty((num, *memory.shape[1:]), dtype=memory.dtype) for memory in self._memory]

    def copy(self, sources: Ids, destinations: Ids) -> None:
        """Copies the state of slot or snapshot `sources[i]` to `destinations[i]`, all layers. None is in both."""
        for memory in self._memory:
            memory[torch.from_numpy(destinations)] = memory[torch.from_numpy(sources)]

    def copy_out(self, slots: Ids, host: list[Tensor], places: Ids) -> None:
        """Copies the state of `slots[i]` to place `places[i]` of `host` (see `make_host_states`), all layers."""
        for memory, stored in zip(self._memory, host, strict=True):
            stored[torch.from_numpy(places)] = memory[torch.from_numpy(slots)]

    def copy_in(self, host: list[Tensor], places: Ids, slots: Ids) -> None:
        """Copies place `places[i]` of `host` to the state of `slots[i]`, all layers."""
        for memory, stored in zip(self._memory, host, strict=True):
            memory[torch.from_numpy(slots)] = stored[torch.from_numpy(places)]


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
        mixed = F.silu(self.kernels.causal_conv(mixed, tails, weights.conv, weights.conv_bias, rows))
        mix = self._delta if self.spec.kind == "gdn" else self._mamba
        out = mix(mixed, [head.float() for head in heads], matrices, rows)  # [T, H, V]
        if weights.norm is None:
            return (out.reshape(num_tokens, -1) * F.silu(gate.float())).to(joined.dtype)
        size, norm = self.spec.norm_group or self.spec.value_dim, weights.norm
        assert norm.weight is not None
        parts = (num_tokens, -1, size)
        is_gated_first = self.spec.kind == "mamba2"
        out, gate = out.reshape(parts), gate.reshape(parts)
        return gated_norm(out, gate, norm.weight, norm.spec.eps, is_gated_first=is_gated_first).to(joined.dtype)

    def _delta(self, mixed: Tensor, heads: list[Tensor], matrices: Tensor, rows: SequenceRows) -> Tensor:
        """The gated delta rule, [T, H, V]."""
        spec, weights = self.spec, self.weights
        assert weights.decay is not None and weights.step_bias is not None
        step, rate = heads
        keys = spec.num_key_heads * spec.key_dim
        q, k, v = mixed.split_with_sizes((keys, keys, spec.inner_size), -1)
        q, k = (unit(one.reshape(len(one), spec.num_key_heads, spec.key_dim)) for one in (q, k))
        v = v.reshape(len(v), spec.num_value_heads, spec.value_dim)
        log_decay = weights.decay * F.softplus(step + weights.step_bias)
        return self.kernels.recur(matrices, q * spec.key_dim**-0.5, k, v, log_decay, torch.sigmoid(rate), rows)

    def _mamba(self, mixed: Tensor, heads: list[Tensor], matrices: Tensor, rows: SequenceRows) -> Tensor:
        """Mamba-2, [T, H, V]: its B are the keys, its C the queries, and values are x times the step."""
        spec, weights = self.spec, self.weights
        assert weights.decay is not None and weights.step_bias is not None and weights.skip is not None
        keys = spec.num_key_heads * spec.key_dim
        x, k, q = mixed.split_with_sizes((spec.inner_size, keys, keys), -1)
        q, k = (one.reshape(len(one), spec.num_key_heads, spec.key_dim) for one in (q, k))
        x = x.reshape(len(x), spec.num_value_heads, spec.value_dim)
        step = F.softplus(heads[0] + weights.step_bias).clamp(*spec.step_limit)
        out = self.kernels.recur(matrices, q, k, x * step[..., None], weights.decay * step, None, rows)
        return out.addcmul_(weights.skip[:, None], x)

    def _convolve(self, joined: Tensor, tails: Tensor, rows: SequenceRows) -> Tensor:
        """A short convolution between two gates, [T, C]."""
        before, after, x = joined.chunk(3, -1)
        mixed = self.kernels.causal_conv(before * x, tails, self.weights.conv, self.weights.conv_bias, rows)
        return (after.float() * mixed).to(joined.dtype)
