"""OPT and BioGPT: LayerNorm, positions learned from row 2 on, ungated feeds, biases everywhere, tied heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec, EmbeddingSpec, FeedSpec, LayerSpec, LearnedPositions, NormSpec
from ..building import Family, attention, decoder, feed
from ..names import DOWN, EMBEDDING, FINAL_NORM, HEAD, OUTPUT, POSITIONS, PRE_FEED, PRE_MIXER, UP, K, Names, Q, V
from ..reading import Sizes, sizes

OFFSET = 2  # row of position 0
NORM: dict[str, Any] = {"kind": "layer", "eps": 1e-5, "is_exact": True}  # whatever the file says


def opt(keys: ConfigKeys) -> DecoderSpec:
    """OPT. The norms of the 350M one come after, and its embedding is narrower, which no backend computes."""
    found, is_post_norm = sizes(keys, has_plain_heads=True), not keys.flag("do_layer_norm_before", True)
    has_bias, has_weight = keys.flag("enable_bias", True), keys.flag("layer_norm_elementwise_affine", True)
    norm = NormSpec(**NORM, weight="w" if has_weight else "none", has_bias=has_weight)
    inner = feed(keys, activation="relu", key="activation_function", size="ffn_dim", is_gated=False, has_bias=has_bias)
    final_norm = None if is_post_norm or keys.flag("_remove_final_layer_norm", False) else norm
    spec = _decoder(keys, found, inner, norm, final_norm=final_norm, has_bias=has_bias, is_post_norm=is_post_norm)
    width = keys.count("word_embed_proj_dim", found.hidden_size)
    return replace(spec, embedding=replace(spec.embedding, width=width)) if width != found.hidden_size else spec


def biogpt(keys: ConfigKeys) -> DecoderSpec:
    """BioGPT: a scaled embedding. Its norms do not heed `layer_norm_eps`."""
    found, norm = sizes(keys, max_position=1024, has_plain_heads=True), NormSpec(**NORM, has_bias=True)
    inner = feed(keys, activation="gelu", is_gated=False, has_bias=True)
    scale = found.hidden_size**0.5 if keys.flag("scale_embedding", True) else 1.0
    return _decoder(keys, found, inner, norm, final_norm=norm, has_bias=True, scale=scale)


def _decoder(
    keys: ConfigKeys,
    found: Sizes,
    inner: FeedSpec,
    norm: NormSpec,
    *,
    final_norm: NormSpec | None,
    has_bias: bool,
    is_post_norm: bool = False,
    scale: float = 1.0,
) -> DecoderSpec:
    mixer = attention(found, rope=None, has_qkv_bias=has_bias, has_output_bias=has_bias)
    layer = LayerSpec(mixer=mixer, feed=inner, pre_mixer=norm, pre_feed=norm, is_post_norm=is_post_norm)
    positions = LearnedPositions(rows=found.max_position + OFFSET, offset=OFFSET)
    embedding = EmbeddingSpec(scale=scale, positions=positions)
    layers = [layer] * found.num_layers
    return decoder(keys, found, layers, final_norm=final_norm, embedding=embedding, is_tied=True)


def names(spec: DecoderSpec) -> Names:
    """The same parts in both, below `model.decoder` or `biogpt`."""
    root, final_norm, head = ROOTS[spec.family]
    layer = f"{root}.layers.*"
    return {
        EMBEDDING: f"{root}.embed_tokens",
        POSITIONS: f"{root}.embed_positions",
        **{stem: f"{layer}.self_attn.{name}_proj" for stem, name in ((Q, "q"), (K, "k"), (V, "v"), (OUTPUT, "out"))},
        PRE_MIXER: f"{layer}.self_attn_layer_norm",
        PRE_FEED: f"{layer}.final_layer_norm",
        UP: f"{layer}.fc1",
        DOWN: f"{layer}.fc2",
        FINAL_NORM: f"{root}.{final_norm}",
        HEAD: head,
    }


ROOTS = {"opt": ("model.decoder", "final_layer_norm", HEAD), "biogpt": ("biogpt", "layer_norm", "output_projection")}
FAMILIES = {"opt": Family(spec=opt, names=names), "biogpt": Family(spec=biogpt, names=names, prefix="biogpt")}
