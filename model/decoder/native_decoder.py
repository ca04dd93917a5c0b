"""The native library as a decoder: numpy arrays in and out, float32 hidden states and logits, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.native.cache import NativeCache
from ...kernels.native.model import NativeModel
from ...kernels.native.shape import NativeShape
from ..config import ModelConfig
from .step_inputs import StepInputs

Floats = NDArray[np.float32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]


def native_shape(config: ModelConfig) -> NativeShape:
    """The shape of the model, as the native library takes it."""
    return NativeShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rotary_dim=config.rope.dim,
        rms_norm_eps=config.rms_norm_eps,
        sliding_windows=config.sliding_windows,
        is_tied=config.tie_word_embeddings,
        has_head=config.has_head,
    )


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
