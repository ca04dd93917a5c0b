"""Gemma 4 (text): layers of two sizes, layers that read others' caches, and experts beside a dense feed in some.

Five layers with a window, then one without, whose heads are larger and may have one projection for keys and values. The
E-models share caches in their last layers and give each layer inputs of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...config_keys import ConfigKeys
from ...errors import quoted
from ...rope_config import RopeConfig, parse_rope, rope_keys_by_type
from ...spec import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    FeedSpec,
    HeadSpec,
    LayerSpec,
    MoeSpec,
    NormSpec,
    PerLayerInputs,
    QkNorm,
    RouterSpec,
)
from ..building import Family, activation_of, attention, biases, decoder, feed, rms_norm
from ..names import (
    EXPERT_SCALE,
    INPUT_GATE,
    INPUT_NORM,
    INPUT_UP,
    LAYER,
    OUTPUT_SCALE,
    PER_LAYER,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    POST_DENSE,
    POST_EXPERTS,
    POST_FEED,
    POST_MIXER,
    PRE_EXPERTS,
    PRE_FEED,
    ROUTER,
    ROUTER_NORM,
    Names,
    Rows,
)
from ..reading import Sizes, layer_types, refuse_other, sizes
from .mixtures import mixture, stacked_names, under_either_name

FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
OWN_KEYS = ("head_dim", "num_key_value_heads")  # of a layer, in per_layer_config


def gemma4(keys: ConfigKeys, *, max_position: int = 131_072, window: int = 512, input_size: int = 256) -> DecoderSpec:
    """The arguments are defaults: of the longest sequence, the window and the inputs of each layer."""
    if keys.values.get("use_bidirectional_attention") != "vision":  # text is causal
        refuse_other(keys, use_bidirectional_attention=None)
    if keys.values.get("rope_parameters") is None:
        keys = ConfigKeys({**keys.values, "rope_parameters": ROPES}, keys.source, keys.stored_names)
    found = sizes(keys, num_heads=8, num_kv_heads=4, head_dim=256, vocab_size=262_144, max_position=max_position)
    types = _types(keys, found.num_layers)
    keys = ConfigKeys({**keys.values, "layer_types": types}, keys.source, keys.stored_names)
    by_layer = _sizes_by_layer(keys, found, types)
    donors = _donors(keys, types)
    window = keys.count("sliding_window", window)
    norm = rms_norm(keys, is_exact=True)
    dense = feed(keys, activation="gelu_pytorch_tanh", key="hidden_activation", inner=9216)
    layers = [
        LayerSpec(
            mixer=_attention(keys, own, norm, kind=kind, window=window, donor=donor),
            feed=_feed(keys, dense, norm, is_shared=donor is not None),
            pre_mixer=norm,
            post_mixer=norm,
            pre_feed=norm,
            post_feed=norm,
            has_output_scale=True,
        )
        for own, kind, donor in zip(by_layer, types, donors, strict=True)
    ]
    embedding = EmbeddingSpec(scale=found.hidden_size**0.5, per_layer=_inputs(keys, found, norm, input_size))
    head = HeadSpec(is_tied=keys.flag("tie_word_embeddings", True), soft_cap=keys.cap("final_logit_softcapping", None))
    ropes = _ropes(keys, by_layer, types)
    return decoder(keys, found, layers, final_norm=norm, ropes=ropes, embedding=embedding, head=head)


def _types(keys: ConfigKeys, num_layers: int) -> list[str]:
    """The type of each layer; the last sees all keys, whatever the file says."""
    types = layer_types(keys, num_layers) or [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(num_layers)]
    return [*types[:-1], FULL]


def _sizes_by_layer(keys: ConfigKeys, found: Sizes, types: Sequence[str]) -> list[Sizes]:
    """The sizes of each layer's heads: those of the layers that per_layer_config names, or of all that see all keys."""
    own: Any = keys.values.get("per_layer_config")
    if own is None:
        heads = keys.values.get("num_global_key_value_heads") if keys.flag("attention_k_eq_v", False) else None
        full = {"head_dim": keys.count("global_head_dim", 512)}
        full |= {} if heads is None else {"num_key_value_heads": keys.count("num_global_key_value_heads")}
        own = {str(index): full for index, kind in enumerate(types) if kind == FULL}
    if not isinstance(own, dict) or not all(isinstance(sizes, dict) for sizes in own.values()):
        keys.fail("per_layer_config", f"must hold an object for each number of a layer, not {quoted(own)}")
    # "05" is layer 5: transformers pads the numbers to one length
    own = {int(name) if name.isascii() and name.isdigit() else name: sizes for name, sizes in own.items()}
    by_layer = []
    for index in range(len(types)):
        values = own.get(index, {})
        if others := sorted(values.keys() - set(OWN_KEYS)):
            keys.refuse("per_layer_config", f"{quoted(others[0])} of layer {index} is not supported; {OWN_KEYS} are")
        layer = ConfigKeys(values, f"{keys.source}: per_layer_config: {index}")
        heads = layer.count("num_key_value_heads", found.num_kv_heads)
        if found.num_heads % heads:
            layer.fail("num_key_value_heads", f"must divide num_attention_heads ({found.num_heads}), but is {heads}")
        by_layer.append(replace(found, num_kv_heads=heads, head_dim=layer.count("head_dim", found.head_dim)))
    return by_layer


def _donors(keys: ConfigKeys, types: Sequence[str]) -> list[int | None]:
    """The layer whose cache each of the last layers reads: the last before them of its type. None: its own."""
    first = len(types) - keys.count("num_kv_shared_layers", 0, least=0)
    if first < len(types) and not set(types[first:]) <= set(types[: max(first, 0)]):
        keys.fail("num_kv_shared_layers", f"must leave a layer of each type before the last {len(types) - first}")
    last = {kind: index for index, kind in enumerate(types[:first])}
    return [None if index < first else last[kind] for index, kind in enumerate(types)]


def _attention(
    keys: ConfigKeys, own: Sizes, norm: NormSpec, *, kind: str, window: int, donor: int | None
) -> AttentionSpec:
    is_full = kind == FULL
    return attention(
        own,
        scale=1.0,
        rope=0 if is_full else 1,
        window=None if is_full else window,
        qk_norm=QkNorm(norm=norm),
        v_norm=None if donor is not None else replace(norm, weight="none"),
        is_k_v=is_full and donor is None and keys.flag("attention_k_eq_v", False),
        kv_of=donor,
        **biases(keys),
    )


def _feed(keys: ConfigKeys, dense: FeedSpec, norm: NormSpec, *, is_shared: bool) -> FeedSpec | MoeSpec:
    """The feed of a layer, twice as wide in layers without keys if the file says so; with or without experts."""
    if is_shared and keys.flag("use_double_wide_mlp", False):
        dense = replace(dense, intermediate_size=2 * dense.intermediate_size)
    if not keys.flag("enable_moe_block", False):
        return dense
    expert = replace(dense, intermediate_size=keys.count("moe_intermediate_size"))
    router = RouterSpec(norm_top_k=True, input_norm=norm, has_expert_scale=True)
    keys = under_either_name(keys, "num_experts_per_tok", "top_k_experts")
    return mixture(keys, router, num_experts=None, top_k=None, expert=expert, dense_beside=dense, own_norms=norm)


def _inputs(keys: ConfigKeys, found: Sizes, norm: NormSpec, default: int) -> PerLayerInputs | None:
    width = keys.count("hidden_size_per_layer_input", default, least=0)
    if not width:
        return None
    rows = keys.count("vocab_size_per_layer_input", 262_144)
    if rows < found.vocab_size:
        keys.refuse("vocab_size_per_layer_input", f"must be at least vocab_size = {found.vocab_size}, not {rows}")
    return PerLayerInputs(
        rows=rows,
        width=width,
        activation=activation_of(keys, "hidden_activation", "gelu_pytorch_tanh"),
        norm=norm,
        scale=width**0.5,
        projection_scale=found.hidden_size**-0.5,
    )


def _ropes(keys: ConfigKeys, by_layer: Sequence[Sizes], types: Sequence[str]) -> tuple[RopeConfig, RopeConfig]:
    """The rotary positions of layers without a window, and of those with one."""
    dims = {kind: {own.head_dim for own, other in zip(by_layer, types, strict=True) if other == kind} for kind in ROPES}
    for kind, found in dims.items():
        if len(found) > 1:
            keys.refuse("per_layer_config", f"layers of type {kind} with head_dim of {sorted(found)} are not supported")
    full, local = (max(dims[kind], default=by_layer[0].head_dim) for kind in (FULL, SLIDING))
    length = by_layer[0].max_position
    of_full = rope_keys_by_type(keys, FULL)
    if of_full.values.get("rope_type") == "proportional":
        first = _proportional(of_full, full, length)
    else:
        first = parse_rope(keys, full, length, theta=1e6, layer_type=FULL)
    return first, parse_rope(keys, local, length, theta=1e4, layer_type=SLIDING)


def _proportional(rope: ConfigKeys, head_dim: int, length: int) -> RopeConfig:
    """Pairs of numbers i and i + half, of which the first share turns; frequencies are those of whole heads."""
    share = rope.number("partial_rotary_factor", 1.0, most=1.0)
    return RopeConfig(
        kind="proportional",
        theta=rope.positive("rope_theta", 1e6),
        dim=head_dim,
        factor=rope.positive("factor", 1.0),
        original_max_position=length,
        num_turned=int(share * head_dim // 2),
    )


def names(spec: DecoderSpec) -> Names:
    """The scale of the router's input is folded into the weight of its norm."""
    found: dict[str, str | Rows | tuple[Rows, ...]] = {
        POST_MIXER: f"{LAYER}.post_attention_layernorm",
        PRE_FEED: f"{LAYER}.pre_feedforward_layernorm",
        POST_FEED: f"{LAYER}.post_feedforward_layernorm",
        OUTPUT_SCALE: f"{LAYER}.layer_scalar",
        PER_LAYER: "model.embed_tokens_per_layer",
        PER_LAYER_PROJECTION: "model.per_layer_model_projection",
        PER_LAYER_NORM: "model.per_layer_projection_norm",
        INPUT_GATE: f"{LAYER}.per_layer_input_gate",
        INPUT_UP: f"{LAYER}.per_layer_projection",
        INPUT_NORM: f"{LAYER}.post_per_layer_input_norm",
    }
    if not spec.mixtures:
        return found
    root = spec.hidden_size**-0.5
    return {
        **found,
        **stacked_names(spec.mixtures[0], f"{LAYER}.experts.gate_up_proj", f"{LAYER}.experts.down_proj", suffix=""),
        ROUTER: f"{LAYER}.router.proj",
        ROUTER_NORM: Rows(f"{LAYER}.router.scale", suffix="", apply=lambda scale: scale * root),
        EXPERT_SCALE: f"{LAYER}.router.per_expert_scale",
        POST_DENSE: f"{LAYER}.post_feedforward_layernorm_1",
        PRE_EXPERTS: f"{LAYER}.pre_feedforward_layernorm_2",
        POST_EXPERTS: f"{LAYER}.post_feedforward_layernorm_2",
    }


def unused(spec: DecoderSpec) -> Iterable[str]:
    """Projections of layers that read another's cache, which some files hold."""
    for index in spec.donors:
        for name in ("k_proj", "v_proj", "k_norm"):
            yield f"model.layers.{index}.self_attn.{name}.weight"


FAMILIES = {
    "gemma4_text": Family(spec=gemma4, names=names, unused=unused),
    "gemma4_unified_text": Family(
        spec=partial(gemma4, max_position=262_144, window=1024, input_size=0), names=names, unused=unused
    ),
}
