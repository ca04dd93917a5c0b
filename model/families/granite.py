"""Granite 3, Granite with windows, and HyperCLOVA X: Llama with multipliers for steady training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_keys import ConfigKeys
from ..rope_config import MAX_THETA, RopeConfig
from ..spec import DecoderSpec, EmbeddingSpec, FeedSpec, HeadSpec, MoeSpec
from .building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from .names import LAYER, POST_FEED, POST_MIXER, Names
from .reading import Sizes, sizes, windows


def granite(keys: ConfigKeys) -> DecoderSpec:
    """Granite: logits are divided."""
    found = sizes(keys)
    return granite_decoder(keys, found, (rope(keys, found),), logits=1 / keys.positive("logits_scaling", 1.0))


def granite_swa(keys: ConfigKeys) -> DecoderSpec:
    """Granite with windows and sinks, where each layer may have a base of its own, or 0 for no rotation."""
    found = sizes(keys, num_kv_heads=4, max_position=8192)
    positions = rope(keys, found)
    on = windows(keys, found.num_layers, 128, pattern=lambda layer: layer % 4 != 0)
    thetas = layer_thetas(keys, found.num_layers, positions.theta)
    bases = list(dict.fromkeys(theta for theta in thetas if theta))
    return granite_decoder(
        keys,
        found,
        tuple(replace(positions, theta=theta) for theta in bases),
        logits=1 / keys.positive("logits_scaling", 1.0),
        eps=1e-5,
        is_tied=True,
        windows=on,
        ropes=[bases.index(theta) if theta else None for theta in thetas],
        has_sinks=True,
    )


def layer_thetas(keys: ConfigKeys, num_layers: int, default: float) -> list[float]:
    """The base of each layer's rotary positions; 0 = none."""
    listed = keys.values.get("layer_rope_theta")
    if listed is None:
        return [default] * num_layers
    is_list = isinstance(listed, list) and len(listed) == num_layers
    if not is_list or any(isinstance(one, bool) or not isinstance(one, int | float) for one in listed):
        keys.fail("layer_rope_theta", f"must list a number for each of the {num_layers} layers")
    if not all(one == 0 or 1 < one <= MAX_THETA for one in listed):
        keys.fail("layer_rope_theta", f"must hold 0 or numbers above 1 and at most {MAX_THETA:g}")
    return [float(one) for one in listed]


def hyperclovax(keys: ConfigKeys) -> DecoderSpec:
    """HyperCLOVA X: logits are multiplied; more norms behind attention and feed."""
    found, norm = sizes(keys), rms_norm(keys)
    post = norm if keys.flag("use_post_norm", True) else None
    scale = keys.optional_number("attention_multiplier")
    return granite_decoder(
        keys,
        found,
        (rope(keys, found),),
        logits=keys.positive("logits_scaling", 1.0),
        scale=found.head_dim**-0.5 if scale is None else scale,
        around={"post_mixer": post, "post_feed": post},
    )


def hyperclovax_names(spec: DecoderSpec) -> Names:
    """Names of the norms behind attention and feed."""
    return {POST_MIXER: f"{LAYER}.post_norm1", POST_FEED: f"{LAYER}.post_norm2"}


def granite_decoder(
    keys: ConfigKeys,
    found: Sizes,
    positions: tuple[RopeConfig, ...],
    *,
    logits: float,
    eps: float = 1e-6,
    is_tied: bool = False,
    inner: FeedSpec | MoeSpec | None = None,
    around: dict[str, Any] | None = None,
    **changes: Any,
) -> DecoderSpec:
    """A decoder with multipliers; `logits` is that of logits. `around` and `changes`: of `layers_of`."""
    norm = rms_norm(keys, default=eps)
    layers = layers_of(
        found,
        norm,
        inner or feed(keys, has_bias=keys.flag("mlp_bias", False)),
        around={"residual_scale": keys.positive("residual_multiplier", 1.0), **(around or {})},
        **{"scale": keys.positive("attention_multiplier", 1.0), **biases(keys), **changes},
    )
    embedding = EmbeddingSpec(scale=keys.positive("embedding_multiplier", 1.0))
    head = HeadSpec(is_tied=keys.flag("tie_word_embeddings", is_tied), scale=logits)
    return decoder(keys, found, layers, final_norm=norm, ropes=positions, embedding=embedding, head=head)


FAMILIES = {
    "granite": Family(spec=granite),
    "granite_swa": Family(spec=granite_swa),
    "hyperclovax": Family(spec=hyperclovax, names=hyperclovax_names),
}
