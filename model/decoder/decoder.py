"""The decoder: one plain function of a spec, weights, a cache and a step's inputs. It knows no family.

The kernels are an argument (`KernelSet` of `kernels/kernel_set.py`), so the same code runs on PyTorch and on Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.kernel_set import FewRows, HeadNorms, KernelSet, RowNorm, load_recurrent
from ...kernels.layout.work_lists import AttentionPlan, AttentionShape
from ...kernels.reference.recurrent import SequenceRows
from ...kernels.tilings.tables import Tilings
from ..sharding.comm import Comm, ordered_sum
from ..sharding.shard import RankShare
from ..spec import AttentionSpec, DecoderSpec, FeedSpec, LatentSpec, LayerSpec, MoeSpec, RecurrentSpec
from .experts import Experts
from .few_rows import FewRowProducts, LayerProducts
from .kv_cache import KVCache
from .latents import LatentLayer
from .linear import Linear, held
from .lora_linear import LoraTable
from .lora_slots import LoraSlots
from .memory_estimate import step_bytes, weights_bytes
from .norms import normed
from .recurrent import RecurrentLayer
from .rope import alibi_slopes, decoder_tables, query_factors
from .step_inputs import StepInputs
from .weights import DecoderWeights, LayerInputWeights, LayerWeights, NormWeights

HALF_ROOT = 2.0**-0.5  # of the sum of table and projection

# query heads, key/value heads, numbers of a head's value, and how many more its key has
HeadSizes = tuple[int, int, int, int]
Plans = dict[HeadSizes, AttentionPlan | None]  # of a step, by the sizes of heads


class Decoder:
    """A loaded model. It holds no state of sequences: everything that differs between steps is in inputs and cache.

    `max_positions` is the length of the longest sequence; None = the checkpoint's. A position beyond it is a bug of the
    caller. With `is_batch_invariant` the other sequences of a step do not change how attention is cut; only kernels
    with attention plans honour it, and products of few rows are then the library's. `tilings` are the launch options of
    the card; None = all products are the library's, and attention has its own. `adapters` are those that the linears in
    `weights`, or `kernels`, add. `comm` joins the ranks that share a model; `spec` and `weights` are then the rank's
    share, and only rank 0 gets logits: of all ranks, or of a head that is whole there. None = the whole model is here.
    """

    runs_kinds: ClassVar[bool] = True  # whether its layers may have blocks of several kinds: see `KVLayout`

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        kernels: KernelSet,
        max_positions: int | None = None,
        *,
        is_batch_invariant: bool = False,
        tilings: Tilings | None = None,
        adapters: LoraTable | LoraSlots | None = None,
        comm: Comm | None = None,
        is_head_whole: bool = False,
    ) -> None:
        self.spec = spec
        self.comm = comm
        self._head_comm = None if is_head_whole else comm
        self.adapters = adapters
        self.weights = weights
        self.kernels = kernels
        self.tilings = tilings
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.max_positions = max_positions or spec.max_position_embeddings
        self._is_batch_invariant = is_batch_invariant
        self._attention_shapes = {
            sizes: AttentionShape(
                *sizes[:3], self.dtype, self.dtype, windows, is_batch_invariant, tilings, extra_dim=sizes[3]
            )
            for sizes, windows in _windows_by_sizes(spec).items()
        }
        self._tables = [  # cos, sin of each of `spec.ropes`, [P, D_rot / 2] f32 each
            (self.on_device(cos), self.on_device(sin)) for cos, sin in decoder_tables(spec.ropes, self.max_positions)
        ]
        self._by_position: dict[AttentionSpec, tuple[Tensor | None, Tensor | None]] = {}
        self.few_rows = FewRowProducts(
            spec.layers, weights.layers, None if is_batch_invariant else tilings, self.dtype, self.device
        )
        self._blocks = [
            _Layer(self, *layer) for layer in zip(spec.layers, weights.layers, self.few_rows.layers, strict=True)
        ]
        self._layer_inputs = _LayerInputs(spec, weights, kernels)
        self._embedding_scale = float(torch.tensor(spec.embedding.scale, dtype=self.dtype))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs[Tensor], cache: KVCache, out: Tensor | None = None) -> Tensor:
        """Runs one step: writes the new tokens' keys and values into the cache.

        Returns the logits of `inputs.logits_rows`, [L, V], float32 on a CPU and the model's dtype elsewhere; in the
        first L rows of `out`, if given.
        """
        hidden = self.hidden(inputs, cache).index_select(0, inputs.logits_rows)
        return self.logits(hidden, None if out is None else out[: len(hidden)])

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs[Tensor], cache: KVCache, entering: Tensor | None = None) -> Tensor:
        """The layers' part of a step: writes the cache, returns hidden states before the final norm, [T, hidden].

        `entering`: what the layers before these returned, to be overwritten; None: these begin with the embedding.
        """
        self.few_rows.begin_step(len(inputs.input_ids))
        starts = None if inputs.is_decode else inputs.query_starts
        plans = {
            sizes: self.kernels.plan_attention(
                replace(shape, cache_dtype=cache.data.dtype), inputs.lengths, starts, len(inputs.input_ids)
            )
            for sizes, shape in self._attention_shapes.items()
        }
        rows = None
        if inputs.slots is not None:
            is_fixed = self._is_batch_invariant or self.dtype == torch.float32  # products of chunks round to 10 bits
            rows = SequenceRows(inputs.slots, inputs.query_starts, inputs.lengths, is_fixed)
        residual = self._embed(inputs) if entering is None else entering
        each = self._layer_inputs.of(residual, inputs.input_ids)
        for index, layer in enumerate(self._blocks):
            residual = layer.run(residual, index, inputs, cache, plans, rows)
            if layer.has_more:
                residual = layer.finish(residual, None if each is None else each[:, index])
        return residual

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The head's part of a step: logits [L, V] of `hidden` [L, hidden], rows of what `hidden` returns.

        Written to `out` [L, V], if given.
        """
        head = self.spec.head
        if out is not None and head.scale == 1.0 and head.soft_cap is None and self._head_comm is None:
            self.weights.head.write(self.normed(hidden), out)
            return out
        logits = self.weights.head.unrounded(self.normed(hidden))
        if self._head_comm is not None:
            logits = self._gathered(logits, self._head_comm)
        if head.scale != 1.0:
            logits = logits * head.scale
        if head.soft_cap is not None:
            logits = (torch.tanh(logits.float() / head.soft_cap) * head.soft_cap).to(logits.dtype)
        logits = logits.float() if self.device.type == "cpu" else logits
        return logits if out is None else out.copy_(logits)

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of `hidden` [L, hidden], as embeddings are made from; same shape."""
        return self.norm(hidden, self.weights.final_norm)

    def weights_bytes(self) -> int:
        """Memory of the weights."""
        return weights_bytes(self.weights)

    def step_bytes(self, num_tokens: int, max_model_len: int, *, is_kv_fp8: bool = False) -> int:
        """The peak memory of a step on a CPU, as `memory_estimate.step_bytes` says."""
        return step_bytes(self.spec, self.weights, num_tokens, max_model_len, is_kv_fp8=is_kv_fp8)

    def norm(self, x: Tensor, norm: NormWeights | None) -> Tensor:
        """A norm over the rows of x [T, D]; None = x."""
        return normed(x, norm, self.kernels)

    def layer_part(self, x: Tensor, layer_input: Tensor, weights: LayerInputWeights) -> Tensor:
        """What a layer adds to x [T, hidden] of its input [T, width]; as x."""
        return self._layer_inputs.part(x, layer_input, weights)

    def tables_of(self, attention: AttentionSpec) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The rotary tables of a layer, [P, D_rot / 2] f32 each; None = it does not rotate."""
        return (None, None) if attention.rope is None else self._tables[attention.rope]

    def tables_by_position(self, attention: AttentionSpec) -> tuple[Tensor | None, Tensor | None]:
        """The factors of queries [P] and the slopes of alibi [H], or [H, P], f32; equal layers share them."""
        if attention not in self._by_position:
            temper = attention.query_temper
            factors = None if temper is None else self.on_device(query_factors(*temper, self.max_positions))
            self._by_position[attention] = factors, _alibi(attention, self)
        return self._by_position[attention]

    def on_device(self, table: NDArray[np.float32]) -> Tensor:
        """A table of numbers where the weights are."""
        return torch.from_numpy(table).to(self.device)

    def _gathered(self, logits: Tensor, comm: Comm) -> Tensor:
        """The logits [L, V] of all ranks' rows of the head; on the other ranks none of them, [0, V]."""
        sizes = [_len(RankShare(rank, comm.size).part(self.spec.vocab_size)) for rank in range(comm.size)]
        parts = comm.gather(pad(logits, (0, max(sizes) - logits.shape[1])))
        if parts is None:
            return logits.new_empty(0, self.spec.vocab_size)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def _embed(self, inputs: StepInputs[Tensor]) -> Tensor:
        """The first residual, [T, hidden]."""
        embedding, weights = self.spec.embedding, self.weights
        residual = weights.embedding.index_select(0, inputs.input_ids)
        if embedding.scale != 1.0:
            residual = residual * self._embedding_scale
        if embedding.positions is not None:
            assert weights.positions is not None
            residual = residual + weights.positions.index_select(0, inputs.positions + embedding.positions.offset)
        return self.norm(residual, weights.embedding_norm)


class _LayerInputs:
    """What layers get of each token besides the residual, of models that have it: see `PerLayerInputs`."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, kernels: KernelSet) -> None:
        self.spec, self.weights, self.kernels = spec.embedding.per_layer, weights.per_layer, kernels
        if self.spec is not None:
            self._scale = float(torch.tensor(self.spec.scale, dtype=weights.embedding.dtype))

    def of(self, residual: Tensor, ids: Tensor) -> Tensor | None:
        """The inputs [T, layers, width] of tokens `ids` [T], with their first residual [T, hidden]; None: none."""
        if self.spec is None or self.weights is None:
            return None
        table = self.weights.table.index_select(0, ids) * self._scale
        projected = self.weights.projection(residual) * self.spec.projection_scale
        shape = (len(ids), -1, self.spec.width)
        projected = normed(projected.view(shape), self.weights.norm, self.kernels)
        return (projected + table.view(shape)) * HALF_ROOT

    def part(self, x: Tensor, layer_input: Tensor, weights: LayerInputWeights) -> Tensor:
        """What a layer adds to x [T, hidden] of its input [T, width]; as x."""
        assert self.spec is not None
        inner = self.kernels.activated_linear(x, None, weights.gate, self.spec.activation) * layer_input
        return normed(weights.up(inner), weights.norm, self.kernels)


class _Layer:
    """One layer, with what does not change between steps prepared."""

    def __init__(self, decoder: Decoder, spec: LayerSpec, weights: LayerWeights, products: LayerProducts) -> None:
        self.decoder, self.kernels = decoder, decoder.kernels
        self.spec, self.weights, self.products = spec, weights, products
        moe = spec.feed if isinstance(spec.feed, MoeSpec) else None
        self.experts = (
            [] if moe is None else [Experts(moe, one, self.kernels, decoder.tilings) for one in weights.experts]
        )
        self.pre_mixer, self.pre_feed = _row_norm(weights.pre_mixer), _row_norm(weights.pre_feed)
        self.recurrent: RecurrentLayer | None = None
        if isinstance(spec.mixer, RecurrentSpec):
            assert weights.recurrent is not None
            self.recurrent = RecurrentLayer(spec.mixer, weights.recurrent, load_recurrent(self.kernels.name))
        self.has_more = weights.layer_input is not None or weights.output_scale is not None  # after `run`
        self.latent = _latent_layer(decoder, spec.mixer, weights) if isinstance(spec.mixer, LatentSpec) else None
        self.sizes: HeadSizes | None = None  # of its attention, which shares plans with others of the same
        if isinstance(spec.mixer, AttentionSpec | LatentSpec):
            self.sizes = _head_sizes(spec.mixer)
        if isinstance(spec.mixer, AttentionSpec):
            self.is_reader = spec.mixer.kv_of is not None  # of another layer's cache
            self.makes_values = not self.is_reader and (spec.mixer.is_k_v or weights.v_norm is not None)
            self.tables = decoder.tables_of(spec.mixer)
            self.norms = _head_norms(spec.mixer, weights)
            self.query_factors, self.alibi = decoder.tables_by_position(spec.mixer)

    def run(
        self,
        residual: Tensor,
        index: int,
        inputs: StepInputs[Tensor],
        cache: KVCache,
        plans: Plans,
        rows: SequenceRows | None,
    ) -> Tensor:
        """The layer's output [T, hidden], before `finish`; may overwrite `residual`."""
        weights, products, plan = self.weights, self.products, plans[self.sizes] if self.sizes else None
        if self.spec.is_parallel:  # both read the same x, which is normed once
            x = self.decoder.norm(residual, weights.pre_mixer)
            y = x if weights.pre_feed is None else self.decoder.norm(residual, weights.pre_feed)
            seen = self._attend(x, None, index, inputs, cache, plan)
            residual = self._add(residual, seen, weights.output, products.output, None)
            return self._feed(residual, y, None, None)
        if self.recurrent is not None:
            mixed = self._recur(self.recurrent, residual, index, cache, rows)
            residual = self._add(residual, mixed, weights.output, products.output, weights.post_mixer)
        elif self.spec.mixer is not None:
            if self.latent is None:
                seen = self._attend(residual, self.pre_mixer, index, inputs, cache, plan)
            else:
                seen = self.latent.run(residual, self.pre_mixer, products.qkv, index, inputs, cache, plan)
            residual = self._add(residual, seen, weights.output, products.output, weights.post_mixer)
        if self.spec.feed is None:
            return residual
        return self._feed(residual, residual, self.pre_feed, weights.post_feed)

    def _feed(self, residual: Tensor, x: Tensor, norm: RowNorm | None, post_norm: NormWeights | None) -> Tensor:
        """Adds the feed-forward part of `norm(x)`, x [T, hidden], to the residual."""
        weights, products = self.weights, self.products
        if not self.experts:
            fed = self._activate(x, norm, held(weights.gate_up), products.gate_up)
            return self._add(residual, fed, weights.down, products.down, post_norm)
        x = self.decoder.norm(x, None if norm is None else weights.pre_feed)
        product = ordered_sum([experts(x, residual) for experts in self.experts])
        return self._added(residual, product, post_norm)

    def finish(self, residual: Tensor, layer_input: Tensor | None) -> Tensor:
        """The layer's output [T, hidden], once it has its input [T, width] of `PerLayerInputs` and its scale."""
        weights = self.weights
        if layer_input is not None and weights.layer_input is not None:
            residual = residual + self.decoder.layer_part(residual, layer_input, weights.layer_input)
        return residual if weights.output_scale is None else residual * weights.output_scale

    def _recur(self, layer: RecurrentLayer, x: Tensor, index: int, cache: KVCache, rows: SequenceRows | None) -> Tensor:
        """A recurrent layer for `pre_mixer(x)`, x [T, hidden]: changes the states of the step's slots, [T, inner]."""
        assert cache.states is not None and rows is not None, "a step without the slots of its sequences"
        joined = self.kernels.norm_linear(x, self.pre_mixer, held(self.weights.qkv), self.products.qkv)
        return layer.run(joined, *cache.states.layer(index), rows)

    def _add(
        self, residual: Tensor, x: Tensor, linear: Linear | None, few: FewRows | None, post_norm: NormWeights | None
    ) -> Tensor:
        """Adds a product to the residual [T, hidden], normed and scaled as the layer says."""
        linear = held(linear)
        if post_norm is None and self.spec.residual_scale == 1.0 and self.decoder.comm is None:
            return self.kernels.linear_add(residual, x, linear, few)
        return self._added(residual, self.kernels.norm_linear(x, None, linear, few), post_norm)

    def _added(self, residual: Tensor, product: Tensor, post_norm: NormWeights | None) -> Tensor:
        """As `_add`, of a product [T, hidden], or of this rank's part of it."""
        scale, comm = self.spec.residual_scale, self.decoder.comm
        product = self.decoder.norm(product if comm is None else comm.sum(product), post_norm)
        return residual + (product if scale == 1.0 else product * scale)

    def _activate(self, x: Tensor, norm: RowNorm | None, linear: Linear, few: FewRows | None) -> Tensor:
        """The feed-forward network of `norm(x)`, x [T, hidden], before its last product, [T, F]."""
        feed = self.spec.feed
        assert isinstance(feed, FeedSpec)
        if feed.is_gated:
            return self.kernels.gated_linear(x, norm, linear, feed.activation, feed.alpha, feed.limit, few)
        return self.kernels.activated_linear(x, norm, linear, feed.activation, self.weights.activation, few)

    def _attend(
        self,
        x: Tensor,
        norm: RowNorm | None,
        index: int,
        inputs: StepInputs[Tensor],
        cache: KVCache,
        plan: AttentionPlan | None,
    ) -> Tensor:
        """Attention for `norm(x)`, x [T, hidden]: writes the cache, returns [T, H * D]."""
        attention, num_tokens = self.spec.mixer, x.shape[0]
        assert isinstance(attention, AttentionSpec), "missing() refuses others"
        qkv, gate = self.kernels.norm_linear(x, norm, held(self.weights.qkv), self.products.qkv), None
        if attention.has_output_gate:
            qkv, gate = (part.contiguous() for part in qkv.tensor_split((attention.qkv_size,), -1))
        qkv = qkv.view(num_tokens, -1, attention.head_dim)  # [T, H + 2 G, D]; of a reader [T, H, D]
        if self.makes_values:
            qkv = self._with_values(qkv)
        keys, values = cache.layer(index)  # [N, G, B, D]
        k_scale, v_scale = cache.layer_scales(index)  # [G]
        slot_mapping, block_tables = inputs.tables_of(cache.kind_of(index))
        prologue: tuple[Any, ...] = (qkv, self.norms, *self.tables, inputs.positions, keys, values, slot_mapping)
        if self.is_reader:  # of no heads of keys, the prologue writes none
            prologue = (*prologue[:-3], keys[:, :0], values[:, :0], slot_mapping)
        attend: Callable[..., Tensor] = self.kernels.prologue_decode
        places: tuple[object, ...] = (*prologue, self.query_factors, block_tables, inputs.lengths)
        if self.is_reader or not inputs.is_decode:
            scales = (k_scale, v_scale, self.query_factors)
            q = self.kernels.attention_prologue(*(*prologue, *scales))  # [T, H, D]
            attend, places = self.kernels.paged_decode, (q, keys, values, block_tables, inputs.lengths)
            if not inputs.is_decode:
                attend = self.kernels.paged_attention
                places = (q, keys, values, block_tables, inputs.query_starts, inputs.lengths)
        seen = attend(  # keywords, as merging two dicts of them takes three times as long
            *places,
            scale=attention.scale,
            window=attention.window,
            soft_cap=attention.soft_cap,
            sinks=self.weights.sinks,
            alibi=self.alibi,
            chunk=attention.chunk,
            k_scale=k_scale,
            v_scale=v_scale,
            plan=plan,
        )  # [T, H, D]
        seen = seen.view(num_tokens, -1)
        return seen if gate is None else seen * torch.sigmoid(gate)

    def _with_values(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values [T, H + 2G, D], with values that are keys, and values normed, in their place."""
        attention, norm = self.spec.mixer, self.weights.v_norm
        assert isinstance(attention, AttentionSpec)
        values = normed(qkv[:, -attention.num_kv_heads :], norm, self.kernels)
        return torch.cat((qkv if attention.is_k_v else qkv[:, : -attention.num_kv_heads], values), 1)


def _head_sizes(mixer: AttentionSpec | LatentSpec) -> HeadSizes:
    if isinstance(mixer, LatentSpec):
        return mixer.num_heads, 1, mixer.kv_rank, mixer.rope_dim
    return mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, 0


def _windows_by_sizes(spec: DecoderSpec) -> dict[HeadSizes, tuple[int | None, ...]]:
    """The windows that layers with heads of the same sizes have, each once."""
    found: dict[HeadSizes, dict[int | None, None]] = {}
    for mixer in (layer.mixer for layer in spec.layers):
        if isinstance(mixer, AttentionSpec | LatentSpec):
            window = None if isinstance(mixer, LatentSpec) else mixer.window
            found.setdefault(_head_sizes(mixer), {})[window] = None
    return {sizes: tuple(windows) for sizes, windows in found.items()}


def _latent_layer(decoder: Decoder, mixer: LatentSpec, weights: LayerWeights) -> LatentLayer:
    assert weights.latent is not None and weights.k_norm is not None
    cos, sin = decoder.tables_of(mixer.cached)
    latent_norm = _row_norm(weights.k_norm)
    assert cos is not None and sin is not None and latent_norm is not None
    norms = _row_norm(weights.q_norm), latent_norm
    return LatentLayer(mixer, weights.latent, held(weights.qkv), norms, (cos, sin), decoder.kernels)


def _alibi(attention: AttentionSpec, decoder: Decoder) -> Tensor | None:
    """What alibi adds to scores: [H] f32 by distance, or [H, P] f32 by position where that is rounded."""
    if not attention.has_alibi:
        return None
    slopes = decoder.on_device(_slopes(attention.num_heads, decoder.comm))
    if attention.is_alibi_rounded:
        slopes = slopes.bfloat16()[:, None] * torch.arange(decoder.max_positions, device=decoder.device)
    return slopes.float() * attention.alibi_scale


def _slopes(num_heads: int, comm: Comm | None) -> NDArray[np.float32]:
    """The slopes of the heads that are here."""
    if comm is None:
        return alibi_slopes(num_heads)
    whole = num_heads * comm.size
    return alibi_slopes(whole)[RankShare(comm.rank, comm.size).part(whole)]


def _len(part: slice) -> int:
    return int(part.stop - part.start)


def _row_norm(norm: NormWeights | None) -> RowNorm | None:
    if norm is None:
        return None
    return RowNorm(kind=norm.spec.kind, eps=norm.spec.eps, weight=norm.weight, bias=norm.bias)


def _head_norms(attention: AttentionSpec, weights: LayerWeights) -> HeadNorms | None:
    norm = attention.qk_norm
    if norm is None:
        return None
    q_norm, k_norm = weights.q_norm, weights.k_norm or weights.q_norm  # a layer without keys norms none
    assert q_norm is not None and k_norm is not None
    is_whole = norm.over == "row" or norm.has_weight_per_head
    q, k, q_bias, k_bias = (
        one if one is None or not is_whole else one.view(-1, attention.head_dim)
        for one in (q_norm.weight, k_norm.weight, q_norm.bias, k_norm.bias)
    )
    return HeadNorms(
        q=q,
        k=k,
        eps=norm.norm.eps,
        kind=norm.norm.kind,
        is_over_row=norm.over == "row",
        is_after_rope=norm.when == "after_rope",
        q_bias=q_bias,
        k_bias=k_bias,
    )
