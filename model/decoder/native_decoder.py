"""The native library as a decoder: numpy arrays in and out, float32 hidden states and logits, without torch."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ...kernels.native.cache import NativeCache
from ...kernels.native.lora import NativeLoraSlice, PackedAdapter
from ...kernels.native.model import NativeModel
from ...kernels.native.shape import (
    CacheDType,
    NativeExperts,
    NativeHeads,
    NativeLatents,
    NativeLayer,
    NativeLayerInputs,
    NativeNorm,
    NativeQkNorm,
    NativeRecurrent,
    NativeShape,
    RecurrentKind,
)
from ..kv_kinds import BlockBytes, CachedMixer
from ..lora.adapter import Adapter
from ..lora.prepared import PreparedAdapter
from ..lora.tensor_file import Pauses
from ..spec import (
    AttentionSpec,
    DecoderSpec,
    FeedSpec,
    LatentSpec,
    LayerSpec,
    MoeSpec,
    NormSpec,
    PerLayerInputs,
    QkNorm,
    RecurrentSpec,
)
from .step_inputs import StepInputs

Floats = NDArray[np.float32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]


def native_shape(spec: DecoderSpec) -> NativeShape:
    """The decoder as the native library takes it; `backend_gaps.missing` has found nothing that it lacks."""
    layers = {layer: _layer(layer) for layer in dict.fromkeys(spec.layers)}
    embedding, head = spec.embedding, spec.head
    return NativeShape(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        layers=tuple(layers[layer] for layer in spec.layers),
        rotary_dims=tuple(rope.dim for rope in spec.ropes),
        is_tied=head.is_tied,
        has_head=head.exists,
        has_head_bias=head.has_bias,
        head_scale=head.scale,
        head_soft_cap=head.soft_cap,
        embedding_scale=embedding.scale,
        num_learned_positions=embedding.positions.rows if embedding.positions else 0,
        position_offset=embedding.positions.offset if embedding.positions else 0,
        embedding_norm=_norm(embedding.norm),
        layer_inputs=_layer_inputs(embedding.per_layer),
        final_norm=_norm(spec.final_norm),
    )


def _layer(layer: LayerSpec) -> NativeLayer:
    feed = layer.feed or FeedSpec(intermediate_size=0)
    moe = feed if isinstance(feed, MoeSpec) else None
    if isinstance(feed, MoeSpec):
        feed = feed.shared or feed.dense_beside or FeedSpec(intermediate_size=0)
    return NativeLayer(
        intermediate_size=feed.intermediate_size,
        has_mixer=layer.mixer is not None,
        recurrent=_recurrent(layer.mixer) if isinstance(layer.mixer, RecurrentSpec) else None,
        **(_attention(layer.mixer) if isinstance(layer.mixer, AttentionSpec | LatentSpec) else {}),
        is_gated=feed.is_gated,
        activation=feed.activation,
        clamp=(feed.alpha, feed.limit),
        experts=None if moe is None else _experts(moe),
        is_shared=moe is not None and moe.shared is not None,
        pre_mixer=_norm(layer.pre_mixer),
        post_mixer=_norm(layer.post_mixer),
        pre_feed=_norm(layer.pre_feed),
        post_feed=_norm(layer.post_feed),
        is_parallel=layer.is_parallel,
        residual_scale=layer.residual_scale,
        has_output_scale=layer.has_output_scale,
    )


def _attention(mixer: AttentionSpec | LatentSpec) -> dict[str, Any]:
    """The fields of `NativeLayer` that belong to attention."""
    latents = mixer if isinstance(mixer, LatentSpec) else None
    attention = mixer.cached if isinstance(mixer, LatentSpec) else mixer
    return {
        "heads": heads_of(attention),
        "latents": None if latents is None else latents_of(latents),
        "kv_of": attention.kv_of,
        "is_k_v": attention.is_k_v,
        "v_norm": _norm(attention.v_norm),
        "window": attention.window,
        "rope": attention.rope,
        "attention_scale": attention.scale,
        "soft_cap": attention.soft_cap,
        "qk_norm": _qk_norm(attention.qk_norm if latents is None else QkNorm(norm=latents.norm)),
        "query_temper": attention.query_temper,
        "has_output_gate": attention.has_output_gate,
    }


def _recurrent(mixer: RecurrentSpec) -> NativeRecurrent:
    return NativeRecurrent(
        kind=cast(RecurrentKind, mixer.kind),
        num_key_heads=mixer.num_key_heads,
        num_value_heads=mixer.num_value_heads,
        key_dim=mixer.key_dim,
        value_dim=mixer.value_dim,
        conv_width=mixer.conv_width,
        norm=_norm(mixer.norm),
        norm_group=mixer.norm_group,
        step_limit=mixer.step_limit,
    )


def block_bytes(block_size: int, dtype: CacheDType) -> BlockBytes:
    """Bytes of a block of a layer, as the library keeps it."""

    def of_layer(mixer: CachedMixer) -> int:
        kept = latents_of(mixer) if isinstance(mixer, LatentSpec) else heads_of(mixer)
        return kept.block_bytes(block_size, dtype)

    return of_layer


def heads_of(attention: AttentionSpec) -> NativeHeads:
    """The heads as the library takes them."""
    sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim
    return NativeHeads(num_heads=sizes[0], num_kv_heads=sizes[1], head_dim=sizes[2])


def latents_of(latents: LatentSpec) -> NativeLatents:
    """The sizes of latents as the library takes them."""
    return NativeLatents(
        q_rank=latents.q_rank,
        kv_rank=latents.kv_rank,
        nope_dim=latents.nope_dim,
        rope_dim=latents.rope_dim,
        value_dim=latents.value_dim,
    )


def _layer_inputs(inputs: PerLayerInputs | None) -> NativeLayerInputs | None:
    norm = None if inputs is None else _norm(inputs.norm)
    if inputs is None or norm is None:
        return None
    return NativeLayerInputs(
        rows=inputs.rows,
        width=inputs.width,
        activation=inputs.activation,
        norm=norm,
        scale=inputs.scale,
        projection_scale=inputs.projection_scale,
    )


def _experts(moe: MoeSpec) -> NativeExperts:
    expert, router = moe.expert, moe.router
    return NativeExperts(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        intermediate_size=expert.intermediate_size,
        is_gated=expert.is_gated,
        activation=expert.activation,
        clamp=(expert.alpha, expert.limit),
        score=router.score,
        is_softmax_of_chosen=router.score == "softmax" and router.when == "after_top_k",
        divides_by_sum=router.norm_top_k,
        norm_eps=router.norm_eps,
        norm_min=router.norm_min,
        scale=router.scale,
        num_groups=router.groups,
        num_groups_kept=router.groups_kept,
        group_score=router.group_score,
        scales_input=router.scales_input,
        has_shared_gate=moe.has_shared_gate,
        router_norm=_norm(router.input_norm),
        own_norms=_norm(moe.own_norms),
    )


def _norm(norm: NormSpec | None) -> NativeNorm | None:
    """The library computes all norms in float32; what differs is whether the weight is rounded first."""
    if norm is None:
        return None
    return NativeNorm(kind=norm.kind, eps=norm.eps, is_exact=norm.is_exact or norm.weight == "one_plus")


def _qk_norm(qk_norm: QkNorm | None) -> NativeQkNorm | None:
    norm = None if qk_norm is None else _norm(qk_norm.norm)
    if qk_norm is None or norm is None:
        return None
    return NativeQkNorm(
        norm=norm,
        is_over_row=qk_norm.over == "row",
        is_after_rope=qk_norm.when == "after_rope",
        has_weight_per_head=qk_norm.has_weight_per_head,
    )


class NativeLoraTable:
    """The adapters by slot, and which tokens of the current step each has. Slot 0 is the base model.

    `prepare` may be called on any thread, and the rest on the device thread. The memory of an adapter is freed with it
    and the slots that have it.
    """

    def __init__(self, model: NativeModel, num_slots: int, max_rank: int) -> None:
        self._model = model
        self.token_slots: NDArray[np.int64] | None = None  # [T] of the current step; None: all are the base model's
        model.reserve_adapters(num_slots, max_rank)

    def prepare(self, adapter: Adapter) -> PreparedAdapter[PackedAdapter]:
        """Packs an adapter, so that a step that loads it only changes a pointer."""
        fits = adapter.dtype == "bfloat16" or adapter.dtype == self._model.dtype
        assert fits, f"an adapter in {adapter.dtype} for {self._model.dtype}"
        all_slices = adapter.slices()
        slices = [NativeLoraSlice(layer, linear, one.row_start, one.a, one.b) for layer, linear, one in all_slices]
        packed = self._model.pack_adapter(slices, Pauses(), adapter.dtype)
        return PreparedAdapter.of(adapter, packed, packed.num_bytes)

    def load(self, slot: int, adapter: PreparedAdapter[PackedAdapter]) -> None:
        """Puts an adapter into a slot, in place of the one there."""
        self._model.use_adapter(slot, adapter.contents)

    def begin_step(self, slots: NDArray[np.int64] | None) -> None:
        """Sets the adapter slot of each token, [T]; None: all tokens are the base model's."""
        self.token_slots = slots


class NativeDecoder:
    """As `Decoder`, with a step in one call, during which the interpreter lock is free."""

    runs_kinds: ClassVar[bool] = True

    def __init__(self, model: NativeModel, adapters: NativeLoraTable | None = None) -> None:
        """`adapters`: of the tokens of steps; None: no token has one."""
        self.model, self.adapters = model, adapters

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
        slot_mapping, block_tables = inputs.slot_mapping, inputs.block_tables
        if inputs.more_kinds:
            slot_mapping = np.stack([slot_mapping, *(kind.slot_mapping for kind in inputs.more_kinds)])
            block_tables = np.stack([block_tables, *(kind.block_tables for kind in inputs.more_kinds)])
        self.model.step(
            cache,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            query_starts=inputs.query_starts,
            lengths=inputs.lengths,
            adapters=None if self.adapters is None else self.adapters.token_slots,
            slots=inputs.slots,
            **wanted,
        )
