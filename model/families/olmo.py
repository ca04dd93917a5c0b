"""OLMo 1, 2 and 3, and EXAONE 4: norms without weights, or norms behind attention and feed instead of before them."""

from __future__ import annotations

from typing import Any

from ..config_keys import ConfigKeys
from ..rope_config import RopeConfig, rope_keys_by_type
from ..spec import DecoderSpec, NormSpec, QkNorm
from .building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from .names import LAYER, POST_FEED, POST_MIXER, Names
from .reading import Sizes, refuse_true, sizes, windows

OLMO3_THETA = 5e5


def olmo(keys: ConfigKeys) -> DecoderSpec:
    """OLMo 1: LayerNorm that learns nothing."""
    refuse_true(keys, "clip_qkv")
    found, norm = sizes(keys), NormSpec(kind="layer", eps=1e-5, weight="none", is_exact=True)
    layers = layers_of(found, norm, feed(keys), **biases(keys))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found),))


def olmo2(keys: ConfigKeys) -> DecoderSpec:
    """OLMo 2: a norm over all heads of q, and one over all of k."""
    found = sizes(keys)
    return _decoder(keys, found, (rope(keys, found),), qk_norm=_row_norm(keys), **biases(keys))


def olmo3(keys: ConfigKeys) -> DecoderSpec:
    """OLMo 3: windows on three layers of four; only the layers without one have stretched positions."""
    found = sizes(keys)
    on = windows(keys, found.num_layers, 4096, pattern=lambda layer: (layer + 1) % 4 != 0)
    full = rope(keys, found, theta=OLMO3_THETA, layer_type="full_attention")
    local = rope(_local_keys(keys), found, theta=OLMO3_THETA, layer_type="sliding_attention")
    each = [0 if window is None else 1 for window in on]
    return _decoder(keys, found, (full, local), windows=on, ropes=each, qk_norm=_row_norm(keys), **biases(keys))


def _local_keys(keys: ConfigKeys) -> ConfigKeys:
    """The keys as the layers with a window see them. What `rope_theta` is for them depends on the version."""
    theta = keys.number("rope_theta", OLMO3_THETA)
    own = rope_keys_by_type(keys, "sliding_attention").values
    if theta != OLMO3_THETA and own.get("rope_theta") is None:
        others = f"transformers 4 gives {theta:g} to all layers, and 5 only to those without a window"
        keys.fail("rope_theta", f"{others}: write a rope_theta into each of rope_parameters' objects by type of layer")
    return ConfigKeys({**keys.values, "rope_theta": None}, keys.source, keys.stored_names)


def exaone4(keys: ConfigKeys) -> DecoderSpec:
    """EXAONE 4: norms of each head; if some layers have a window, the others do not rotate."""
    found = sizes(keys, num_kv_heads=32)
    period = keys.count("sliding_window_pattern", 4) if keys.values.get("layer_types") is None else 1
    has_windows = not keys.is_null("sliding_window")
    on = windows(keys, found.num_layers, 4096, is_on=has_windows, pattern=lambda layer: (layer + 1) % period != 0)
    ropes = [None if has_windows and window is None else 0 for window in on]
    norm = QkNorm(norm=rms_norm(keys, default=1e-5))
    return _decoder(keys, found, (rope(keys, found),), is_exact=False, windows=on, ropes=ropes, qk_norm=norm)


def _decoder(
    keys: ConfigKeys, found: Sizes, positions: tuple[RopeConfig, ...], *, is_exact: bool = True, **changes: Any
) -> DecoderSpec:
    """Norms behind attention and feed. `changes`: of `layers_of`."""
    norm = rms_norm(keys, default=1e-5, is_exact=is_exact)
    layers = layers_of(found, None, feed(keys), around={"post_mixer": norm, "post_feed": norm}, **changes)
    return decoder(keys, found, layers, final_norm=norm, ropes=positions)


def _row_norm(keys: ConfigKeys) -> QkNorm:
    return QkNorm(norm=rms_norm(keys, default=1e-5, is_exact=True), over="row")


def names(spec: DecoderSpec) -> Names:
    """The norm behind attention has the name that Llama's norm before the feed has."""
    return {
        POST_MIXER: f"{LAYER}.post_attention_layernorm",
        POST_FEED: f"{LAYER}.post_feedforward_layernorm",
    }


FAMILIES = {
    "exaone4": Family(spec=exaone4, names=names),
    "olmo": Family(spec=olmo),
    "olmo2": Family(spec=olmo2, names=names),
    "olmo3": Family(spec=olmo3, names=names),
}
