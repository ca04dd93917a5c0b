"""Gemma 1, 2 and 3 (text) and VaultGemma: scaled embeddings, tied heads, norms stored as w - 1, feeds gated by GELU.

Gemma 2 and 3 also norm what attention and feed return, and alternate windows. Gemma 2 caps scores and logits. Gemma 3
norms heads of q and k instead, and its layers with a window rotate by a base of their own.
"""

from __future__ import annotations

from functools import partial

from ..config_keys import ConfigKeys
from ..rope_config import RopeConfig
from ..spec import DecoderSpec, EmbeddingSpec, HeadSpec, NormSpec, QkNorm
from .building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from .names import LAYER, POST_FEED, POST_MIXER, PRE_FEED, Names
from .reading import Sizes, refuse_true, sizes, windows

GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4  # of Gemma 3


def gemma(keys: ConfigKeys) -> DecoderSpec:
    """Gemma 1: Llama's layers. Its "gelu" means the tanh form, as the official releases say it."""
    found, norm = sizes(keys, num_kv_heads=16, head_dim=256, max_position=8192), _norm(keys)
    refuse_true(keys, "use_bidirectional_attention")
    inner = feed(keys, activation="gelu_pytorch_tanh", renamed={"gelu": "gelu_tanh"})
    positions, embedding = (rope(keys, found),), EmbeddingSpec(scale=found.hidden_size**0.5)
    layers = layers_of(found, norm, inner, **biases(keys))
    return decoder(keys, found, layers, final_norm=norm, ropes=positions, embedding=embedding, is_tied=True)


def gemma2(keys: ConfigKeys, *, has_post_norms: bool = True) -> DecoderSpec:
    """Gemma 2: caps; a window on every other layer, the first included. VaultGemma has no norms after."""
    found = sizes(keys, num_kv_heads=4, head_dim=256, max_position=8192)
    on = windows(keys, found.num_layers, 4096, pattern=lambda layer: layer % 2 == 0)
    positions = (rope(keys, found),)
    caps = (50.0, 30.0)
    return _sandwich(keys, found, caps=caps, ropes=positions, windows_of=on, local=0, has_post_norms=has_post_norms)


def gemma3(keys: ConfigKeys) -> DecoderSpec:
    """Gemma 3: norms of q and k; five layers with a window, then one without."""
    found = sizes(keys, num_heads=8, num_kv_heads=4, head_dim=256, vocab_size=262_208, max_position=131_072)
    period = keys.count("sliding_window_pattern", 6)
    on = windows(keys, found.num_layers, 4096, pattern=lambda layer: (layer + 1) % period != 0)
    full = rope(keys, found, theta=GLOBAL_THETA, layer_type="full_attention")
    local = rope(_local_keys(keys), found, theta=LOCAL_THETA, layer_type="sliding_attention")
    return _sandwich(keys, found, caps=(None, None), ropes=(full, local), windows_of=on, local=1, has_qk_norm=True)


def _local_keys(keys: ConfigKeys) -> ConfigKeys:
    """The keys as the layers with a window see them: a base of their own."""
    values = {**keys.values, "rope_theta": keys.values.get("rope_local_base_freq")}
    return ConfigKeys(values, keys.source, {**keys.stored_names, "rope_theta": "rope_local_base_freq"})


def _sandwich(
    keys: ConfigKeys,
    found: Sizes,
    *,
    caps: tuple[float | None, float | None],
    ropes: tuple[RopeConfig, ...],
    windows_of: tuple[int | None, ...],
    local: int,
    has_qk_norm: bool = False,
    has_post_norms: bool = True,
) -> DecoderSpec:
    """Norms before and perhaps after; `local` is the index of the rotary positions of layers with a window."""
    refuse_true(keys, "use_bidirectional_attention")
    norm, inner = _norm(keys), feed(keys, activation="gelu_pytorch_tanh", key="hidden_activation")
    score_cap, logit_cap = caps
    layers = layers_of(
        found,
        norm,
        inner,
        windows=windows_of,
        ropes=[0 if window is None else local for window in windows_of],
        around={"post_mixer": norm, "post_feed": norm} if has_post_norms else None,
        scale=keys.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        # transformers caps no scores of Gemma 3, whatever its file says
        soft_cap=None if score_cap is None else keys.cap("attn_logit_softcapping", score_cap),
        qk_norm=QkNorm(norm=norm) if has_qk_norm else None,
        **biases(keys),
    )
    head = HeadSpec(
        is_tied=keys.flag("tie_word_embeddings", True), soft_cap=keys.cap("final_logit_softcapping", logit_cap)
    )
    embedding = EmbeddingSpec(scale=found.hidden_size**0.5)
    return decoder(keys, found, layers, final_norm=norm, ropes=ropes, embedding=embedding, head=head)


def _norm(keys: ConfigKeys) -> NormSpec:
    return rms_norm(keys, weight="one_plus", is_exact=True)


def names(spec: DecoderSpec) -> Names:
    """The norm after attention has the name that Llama's norm before the feed has."""
    return {
        POST_MIXER: f"{LAYER}.post_attention_layernorm",
        PRE_FEED: f"{LAYER}.pre_feedforward_layernorm",
        POST_FEED: f"{LAYER}.post_feedforward_layernorm",
    }


FAMILIES = {
    "gemma": Family(spec=gemma),
    "gemma2": Family(spec=gemma2, names=names),
    "gemma3_text": Family(spec=gemma3, names=names),
    "vaultgemma": Family(spec=partial(gemma2, has_post_norms=False), names=names),
}
