"""Layers of a decoder whose cache keeps latents instead of keys and values."""

from __future__ import annotations

from torch import Tensor

from ...kernels.kernel_set import FewRows, KernelSet, RowNorm, load_latents
from ...kernels.layout.work_lists import AttentionPlan
from ..spec import LatentSpec
from .kv_cache import KVCache
from .linear import Linear
from .step_inputs import StepInputs
from .weights import LatentWeights


class LatentLayer:
    """Attention over latents, in the absorbed form: see `kernels/reference/latents.py`."""

    def __init__(
        self,
        spec: LatentSpec,
        weights: LatentWeights,
        qkv: Linear,
        norms: tuple[RowNorm | None, RowNorm],
        tables: tuple[Tensor, Tensor],
        kernels: KernelSet,
    ) -> None:
        """`qkv`: hidden -> q_rank, or all queries; then kv_rank + rope. `norms`: of the first and of the latent."""
        self.spec, self.weights, self.qkv, self.tables, self.kernels = spec, weights, qkv, tables, kernels
        self.query_norm, self.latent_norm = norms
        self.latent_kernels = load_latents(kernels.name)
        both = weights.keys_values.view(spec.num_heads, spec.nope_dim + spec.value_dim, spec.kv_rank)
        self.key_up, self.value_up = both.split_with_sizes((spec.nope_dim, spec.value_dim), 1)
        self._sizes = (spec.q_rank or spec.query_size, spec.kv_rank, spec.rope_dim)

    def run(
        self,
        x: Tensor,
        norm: RowNorm | None,
        few: FewRows | None,
        index: int,
        inputs: StepInputs[Tensor],
        cache: KVCache,
        plan: AttentionPlan | None,
    ) -> Tensor:
        """Attention for `norm(x)`, x [T, hidden]: writes the cache of layer `index`, returns [T, H * value_dim]."""
        spec, kernels, num_tokens = self.spec, self.kernels, len(x)
        q, latents, rotated = kernels.norm_linear(x, norm, self.qkv, few).split_with_sizes(self._sizes, -1)
        if self.weights.query is not None:
            q = kernels.norm_linear(q.contiguous(), self.query_norm, self.weights.query)
        q = q.view(num_tokens, spec.num_heads, -1)
        latents = kernels.rms_norm(latents.contiguous(), self.latent_norm.weight, self.latent_norm.eps)
        keys, _ = cache.layer(index)  # [N, 1, B, kv_rank + rope]
        slot_mapping, block_tables = inputs.tables_of(cache.kind_of(index))
        places = (*self.tables, inputs.positions, keys, slot_mapping)
        q = self.latent_kernels.latent_prologue(q, latents, rotated, self.key_up, *places)
        starts = None if inputs.is_decode else inputs.query_starts
        lists = (block_tables, starts, inputs.lengths)
        seen = self.latent_kernels.latent_attention(q, keys, spec.kv_rank, *lists, spec.scale, plan)
        return self.latent_kernels.latent_values(seen, self.value_up)
