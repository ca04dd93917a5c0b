"""Attention over latents (multi-head latent attention) as config.json describes it; and MiniCPM3, a dense family."""

from __future__ import annotations

import math
from typing import Any

from ..config_keys import ConfigKeys
from ..rope_config import RopeConfig, parse_rope, rope_keys
from ..spec import DecoderSpec, EmbeddingSpec, HeadSpec, LatentSpec, LayerSpec, NormSpec
from .building import Family, decoder, feed, rms_norm
from .names import Names, interleaved_latents
from .reading import Sizes, refuse_other, sizes

NORM = NormSpec(eps=1e-6)  # of the ranks, whatever `rms_norm_eps` says of the others


def latent_sizes(keys: ConfigKeys, *, max_position: int) -> Sizes:
    """The sizes of a decoder with latents, which heads of keys and values do not count for."""
    found = sizes(keys, max_position=max_position, has_plain_heads=True)
    refuse_other(keys, num_key_value_heads=found.num_heads)
    return found


def latent_attention(
    keys: ConfigKeys,
    found: Sizes,
    *,
    q_rank: int,
    kv_rank: int = 512,
    nope_dim: int = 128,
    rope_dim: int = 64,
    value_dim: int = 128,
) -> tuple[LatentSpec, RopeConfig]:
    """The attention of all layers, and its rotary positions. The arguments are defaults.

    With rotary positions stretched by yarn, scores are multiplied by the square of `mscale_all_dim`'s sharpness.
    """
    rank = None if keys.is_null("q_lora_rank") else keys.count("q_lora_rank", q_rank)
    nope_dim, rope_dim = keys.count("qk_nope_head_dim", nope_dim), keys.count("qk_rope_head_dim", rope_dim)
    has_bias = keys.flag("attention_bias", False)
    if has_bias and rank is None:
        keys.refuse("attention_bias", "true beside q_lora_rank = null is not supported; false is")
    rope = parse_rope(keys, rope_dim, found.max_position, share=1.0)
    if rope.dim != rope_dim:
        keys.refuse("partial_rotary_factor", f"rotates {rope.dim} of qk_rope_head_dim = {rope_dim} numbers; must be 1")
    mixer = LatentSpec(
        num_heads=found.num_heads,
        q_rank=rank,
        kv_rank=keys.count("kv_lora_rank", kv_rank),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=keys.count("v_head_dim", value_dim),
        scale=(nope_dim + rope_dim) ** -0.5 * _sharpness(keys, rope) ** 2,
        norm=NORM,
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    return mixer, rope


def _sharpness(keys: ConfigKeys, rope: RopeConfig) -> float:
    strength = rope_keys(keys).number("mscale_all_dim", 0.0, most=1e6)
    if rope.kind == "default" or not strength or rope.factor <= 1:
        return 1.0
    return 0.1 * strength * math.log(rope.factor) + 1.0


def neighbours(spec: DecoderSpec) -> Names:
    """The rows of a checkpoint that rotates neighbours."""
    return interleaved_latents(spec.latents[0])


def minicpm3(keys: ConfigKeys) -> DecoderSpec:
    """MiniCPM3: embedding, residuals and logits are multiplied; halves rotate."""
    found, norm = latent_sizes(keys, max_position=32_768), rms_norm(keys, default=1e-5)
    value_dim = found.hidden_size // found.num_heads
    ranks: dict[str, Any] = {"q_rank": 768, "kv_rank": 256, "nope_dim": 64, "rope_dim": 32}
    mixer, rope = latent_attention(keys, found, value_dim=value_dim, **ranks)
    root = math.sqrt(found.num_layers)
    depth = 1.0 if keys.is_null("scale_depth") else keys.positive("scale_depth", 1.4) / root
    base = found.hidden_size if keys.is_null("dim_model_base") else keys.count("dim_model_base", 256)
    inner = feed(keys, has_bias=keys.flag("mlp_bias", False))
    layer = LayerSpec(mixer=mixer, feed=inner, pre_mixer=norm, pre_feed=norm, residual_scale=depth)
    return decoder(
        keys,
        found,
        [layer] * found.num_layers,
        final_norm=norm,
        ropes=(rope,),
        embedding=EmbeddingSpec(scale=keys.positive("scale_emb", 12.0)),
        head=HeadSpec(is_tied=keys.flag("tie_word_embeddings", True), scale=base / found.hidden_size),
    )


FAMILIES = {"minicpm3": Family(spec=minicpm3)}
