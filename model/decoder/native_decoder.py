"""The native library as a decoder: numpy arrays in and out, float32 hidden states and logits, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.native.cache import NativeCache
from ...kernels.native.model import NativeModel
from ...kernels.native.shape import NativeShape
from ..spec import DecoderSpec
from .step_inputs import StepInputs

Floats = NDArray[np.float32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]


def native_shape(spec: DecoderSpec) -> NativeShape:
    """The shape of the model, as the native library takes it."""
    return NativeShape(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        rotary_dim=spec.ropes[0].dim,
        rms_norm_eps=_eps_of(spec),
        sliding_windows=spec.windows,
        is_tied=spec.head.is_tied,
        has_head=spec.head.exists,
    )


def _eps_of(spec: DecoderSpec) -> float:
    """The eps of all norms, which the library takes once."""
    assert spec.final_norm is not None
    return spec.final_norm.eps


class NativeDecoder:
    """As `Decoder`, with a step in one call, during which the interpreter lock is free."""

    def __init__(self, model: NativeModel) -> None:
        self.model = model

    def forward(self, inputs: StepInputs[NDArray[Any]], cache: NativeCache) -> Floats:
        """Runs one step. Returns logits [L, V]; zeros for a model without a head, of which only timings are used."""
        if not self.model.shape.has_head:
            self._step(inputs, cache)
            return np.zeros((len(inputs.logits_rows), self.model.shape.vocab_size), np.float32)
        logits = self.model.logits_buffer(len(inputs.logits_rows))
        self._step(inputs, cache, logits_rows=inputs.logits_rows, logits=logits)
        return logits

    def likeliest(self, inputs: StepInputs[NDArray[Any]], cache: NativeCache) -> tuple[Longs, Bools]:
        """Runs one step without returning logits.

        Returns the likeliest token ids, the lowest among equals, and which rows hold no number, [L] each.
        """
        count = len(inputs.logits_rows)
        found = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        self._step(inputs, cache, logits_rows=inputs.logits_rows, likeliest=found)
        return found

    def hidden(self, inputs: StepInputs[NDArray[Any]], cache: NativeCache) -> Floats:
        """The layers' part of a step: writes the cache, returns [T, hidden]."""
        hidden = np.empty((len(inputs.input_ids), self.model.shape.hidden_size), np.float32)
        self._step(inputs, cache, hidden=hidden)
        return hidden

    def logits(self, hidden: Floats) -> Floats:
        """The head's part of a step: logits [L, V] of `hidden` [L, hidden], rows of what `hidden` returns."""
        return self.model.logits(hidden)

    def normed(self, hidden: Floats) -> Floats:
        """The final norm of `hidden` [L, hidden], as embeddings are made from; same shape."""
        return self.model.normed(hidden)

    def _step(self, inputs: StepInputs[NDArray[Any]], cache: NativeCache, **wanted: Any) -> None:
        self.model.step(
            cache,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables,
            query_starts=inputs.query_starts,
            lengths=inputs.lengths,
            **wanted,
        )
