"""A decoder made of transformers' modules: a step's tokens are one row for them, and attention is on the paged cache.

It serves models that no family here describes, in plain PyTorch. `gate.py` and `probe.py` say which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...kernels.kernel_set import KernelSet
from ...kernels.reference.attention import QUERY_TILE
from ...kernels.reference.attention_f32 import SCORED_ROWS
from ..decoder.kv_cache import KVCache
from ..decoder.step_inputs import StepInputs
from ..spec import DecoderSpec, LayerSpec
from .attention_interface import AttentionCall, Handler, handled_by
from .model_body import ModelBody
from .paged_layers import PagedLayer, PagedStep, attention_specs, paged_layers
from .step_memory import measured_bytes

NUM_TOKENS = 5  # of the step whose attention calls are looked at


class TransformersModel:
    """A loaded model with what its steps call and take. It keeps nothing of sequences.

    Raises UnservableError if its attention cannot be on a paged cache.
    """

    def __init__(self, model: PreTrainedModel, spec: DecoderSpec) -> None:
        """`spec` has no layers yet."""
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.body = ModelBody(model, nothing_seen)
        self.calls: list[AttentionCall] = []
        self.run(NUM_TOKENS, self._note)
        self.layers = paged_layers(self.calls, model.config)
        self._tensors = [*model.parameters(), *model.buffers()]
        self._fixed_bytes, self._token_bytes = measured_bytes(self._run_blindly, self._tensors)
        self.spec = replace(
            spec, layers=tuple(LayerSpec(mixer=each, feed=None) for each in attention_specs(self.layers))
        )

    @torch.inference_mode()
    def run(self, num_tokens: int, handler: Handler) -> Tensor:
        """The hidden states [T, hidden] of some tokens, with attention by `handler`."""
        positions = torch.arange(num_tokens, device=self.device)
        with handled_by(handler):
            return self.body.hidden_of_step(positions, positions)

    def weights_bytes(self) -> int:
        """Memory of all weights; shared memory counts once."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._tensors}
        return sum(storages.values())

    def step_bytes(self, num_tokens: int, max_model_len: int) -> int:
        """About the peak memory of a step of `num_tokens` tokens on a CPU, in sequences of up to `max_model_len`.

        What the modules take is measured on a few tokens; what attention takes is computed.
        """
        attention = max(
            self._attention_bytes(layer, call, num_tokens, max_model_len)
            for layer, call in zip(self.layers, self.calls, strict=True)
        )
        return self._fixed_bytes + self._token_bytes * num_tokens + attention

    @property
    def used_share(self) -> float:
        """The share of the cache's numbers that hold keys and values: its layers have one size, that of the largest."""
        written = [layer for layer in self.layers if layer.writes]
        used = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in written)
        return used / (2 * len(written) * self.spec.num_kv_heads * self.spec.head_dim)

    def _attention_bytes(self, layer: PagedLayer, call: AttentionCall, num_tokens: int, max_model_len: int) -> int:
        reach = layer.window or layer.chunk
        context = min(max_model_len, (reach or max_model_len) + num_tokens)
        item, heads = self.dtype.itemsize, layer.num_heads
        gathered = 2 * item * context * layer.num_kv_heads * layer.size
        hidden = min(num_tokens, QUERY_TILE) * context * (9 + 2 * item * (1 + heads // layer.num_kv_heads))
        if call.soft_cap is not None or layer.chunk is not None:  # in f32: keys and values, and four copies of scores
            gathered += 8 * context * layer.num_kv_heads * layer.size
            hidden = 16 * min(num_tokens * heads, max(SCORED_ROWS, heads)) * context
        return gathered + hidden + 4 * num_tokens * heads * layer.size * item

    def _note(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return nothing_seen(call)

    def _run_blindly(self, num_tokens: int) -> Tensor:
        return self.run(num_tokens, nothing_seen)


def nothing_seen(call: AttentionCall) -> Tensor:
    """Zeros in place of attention's output."""
    return call.q.new_zeros(*call.q.shape[:2], call.v.shape[-1])


class TransformersDecoder:
    """As `Decoder`, but hidden states are those behind the final norm, as transformers gives them."""

    runs_kinds: ClassVar[bool] = False  # its layers share one table a sequence

    def __init__(
        self,
        loaded: TransformersModel,
        kernels: KernelSet,
        max_positions: int | None = None,
        *,
        layers: Sequence[PagedLayer] | None = None,
    ) -> None:
        """`layers` replace those of the model, for the probe."""
        self.spec = loaded.spec
        self.loaded = loaded
        self.kernels = kernels
        self.device, self.dtype = loaded.device, loaded.dtype
        self.max_positions = max_positions or loaded.spec.max_position_embeddings
        self._layers = loaded.layers if layers is None else layers

    @torch.inference_mode()
    def forward(self, inputs: StepInputs[Tensor], cache: KVCache) -> Tensor:
        """As `Decoder.forward`: the logits of `inputs.logits_rows`, [L, V], float32 on a CPU."""
        step = PagedStep(self._layers, inputs, cache, self.kernels)
        with handled_by(step):
            logits = self.loaded.body.logits_of_step(inputs.input_ids, inputs.positions, inputs.logits_rows)
        step.finish()
        return self._as_returned(logits)

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs[Tensor], cache: KVCache) -> Tensor:
        """The layers' part of a step and the final norm: writes the cache, returns [T, hidden]."""
        step = PagedStep(self._layers, inputs, cache, self.kernels)
        with handled_by(step):
            hidden = self.loaded.body.hidden_of_step(inputs.input_ids, inputs.positions)
        step.finish()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The head's part of a step: logits [L, V] of `hidden` [L, hidden], rows of what `hidden` returns."""
        return self._as_returned(self.loaded.body.logits_of_hidden(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """`hidden` itself, [L, hidden]."""
        return hidden

    def weights_bytes(self) -> int:
        """Memory of the weights."""
        return self.loaded.weights_bytes()

    def step_bytes(self, num_tokens: int, max_model_len: int, *, is_kv_fp8: bool = False) -> int:
        """About the peak memory of a step on a CPU."""
        assert not is_kv_fp8, "the cache has the dtype of the weights"
        return self.loaded.step_bytes(num_tokens, max_model_len)

    def _as_returned(self, logits: Tensor) -> Tensor:
        return logits.float() if self.device.type == "cpu" else logits
