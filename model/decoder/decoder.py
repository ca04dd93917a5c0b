"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one plain function of weights, cache and a step's inputs.

The kernels are an argument (`KernelSet` of `kernels/kernel_set.py`), so the same code runs on PyTorch and on Triton.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.kernel_set import HeadNorms, KernelSet
from ...kernels.layout.work_lists import AttentionPlan, AttentionShape
from ..config import ModelConfig
from .kv_cache import KVCache
from .rope import rope_tables
from .step_inputs import StepInputs
from .weights import DecoderWeights, LayerWeights


class Decoder:
    """A loaded model. It holds no state of sequences: everything that differs between steps is in inputs and cache.

    `max_positions` is the length of the longest sequence; None = the checkpoint's. A position beyond it is a bug of the
    caller. With `is_batch_invariant` the other sequences of a step do not change how attention is cut; only kernels
    with attention plans honour it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kernels: KernelSet,
        max_positions: int | None = None,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.max_positions = max_positions or config.max_position_embeddings
        self._scale = config.head_dim**-0.5
        windows = tuple(dict.fromkeys(config.sliding_windows))
        self._attention_shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.dtype,
            self.dtype,
            windows,
            is_batch_invariant,
        )
        tables = rope_tables(config.rope, self.max_positions)
        self._cos, self._sin = (torch.from_numpy(table).to(self.device) for table in tables)  # [P, D_rot / 2] f32 each

    @torch.inference_mode()
    def forward(self, inputs: StepInputs[Tensor], cache: KVCache) -> Tensor:
        """Runs one step: writes the new tokens' keys and values into the cache.

        Returns the logits of `inputs.logits_rows`, [L, V], float32 on a CPU and the model's dtype elsewhere.
        """
        return self.logits(self.hidden(inputs, cache).index_select(0, inputs.logits_rows))

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs[Tensor], cache: KVCache) -> Tensor:
        """The layers' part of a step: writes the cache, returns hidden states before the final norm, [T, hidden]."""
        kernels, eps = self.kernels, self.config.rms_norm_eps
        starts = None if inputs.is_decode else inputs.query_starts
        attention_shape = replace(self._attention_shape, cache_dtype=cache.data.dtype)
        plan = kernels.plan_attention(attention_shape, inputs.lengths, starts, len(inputs.input_ids))
        residual = self.weights.embedding.index_select(0, inputs.input_ids)  # [T, hidden]
        for index, layer in enumerate(self.weights.layers):
            x = kernels.rms_norm(residual, layer.input_norm, eps)
            residual = layer.output.add_to(residual, self._attention(index, layer, x, inputs, cache, plan))
            x = kernels.rms_norm(residual, layer.post_norm, eps)
            residual = layer.down.add_to(residual, kernels.silu_mul(layer.gate_up.unrounded(x)))
        return residual

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The head's part of a step: logits [L, V] of `hidden` [L, hidden], rows of what `hidden` returns."""
        logits = self.weights.head.unrounded(self.normed(hidden))
        return logits.float() if self.device.type == "cpu" else logits

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of `hidden` [L, hidden], as embeddings are made from; same shape."""
        return self.kernels.rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        inputs: StepInputs[Tensor],
        cache: KVCache,
        plan: AttentionPlan | None,
    ) -> Tensor:
        """The attention of one layer for x [T, hidden]: writes the cache, returns [T, H * D]."""
        config, kernels = self.config, self.kernels
        num_tokens = x.shape[0]
        qkv = layer.qkv(x).view(num_tokens, -1, config.head_dim)  # [T, H + 2 G, D]
        keys, values = cache.layer(index)  # [N, G, B, D]
        k_scale, v_scale = cache.layer_scales(index)  # [G]
        has_norms = layer.q_norm is not None
        norms = HeadNorms(q=layer.q_norm, k=layer.k_norm, eps=config.rms_norm_eps) if has_norms else None
        tables = (self._cos, self._sin, inputs.positions)
        q = kernels.attention_prologue(
            qkv, norms, *tables, keys, values, inputs.slot_mapping, k_scale, v_scale
        )  # [T, H, D]
        window = config.sliding_windows[index]
        if inputs.is_decode:
            seen = kernels.paged_decode(
                q,
                keys,
                values,
                inputs.block_tables,
                inputs.lengths,
                self._scale,
                window,
                k_scale=k_scale,
                v_scale=v_scale,
                plan=plan,
            )  # [S, H, D]
        else:
            seen = kernels.paged_attention(
                q,
                keys,
                values,
                inputs.block_tables,
                inputs.query_starts,
                inputs.lengths,
                self._scale,
                window,
                k_scale=k_scale,
                v_scale=v_scale,
                plan=plan,
            )  # [T, H, D]
        return seen.view(num_tokens, -1)
