"""Mistral, Ministral, Qwen2, Qwen2.5 and Qwen3 (dense): Llama with windows, biases of q, k and v, or norms of heads.

Ministral 3 tempers its queries beyond the length of the first training. The text halves of Qwen2-VL, Qwen2.5-VL and
Qwen3-VL are Qwen2 and Qwen3 with other defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config_keys import ConfigKeys
from ..rope_config import rope_keys
from ..spec import DecoderSpec, QkNorm
from .building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from .reading import default_rope, sizes, windows


def mistral(keys: ConfigKeys) -> DecoderSpec:
    """Mistral: a window on all layers, unless it is null."""
    found, norm = sizes(keys, num_kv_heads=8, max_position=131_072), rms_norm(keys)
    layers = layers_of(found, norm, feed(keys), windows=windows(keys, found.num_layers, 4096))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found),))


def ministral3(keys: ConfigKeys) -> DecoderSpec:
    """Ministral 3: queries grow with the logarithm of their position; no windows."""
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16_384}
    mscale = {"mscale": 1.0, "mscale_all_dim": 1.0}
    keys = default_rope(keys, **yarn, **mscale, rope_theta=1e6, llama_4_scaling_beta=0.1)
    found = sizes(keys, num_kv_heads=8, head_dim=128, max_position=262_144)
    norm, positions = rms_norm(keys, default=1e-5), rope(keys, found)
    strength = rope_keys(keys).number("llama_4_scaling_beta")
    temper = (strength, positions.original_max_position) if strength else None
    on = windows(keys, found.num_layers, 4096, is_on=keys.values.get("sliding_window") is not None)
    layers = layers_of(found, norm, feed(keys), windows=on, query_temper=temper)
    return decoder(keys, found, layers, final_norm=norm, ropes=(positions,))


def qwen2(keys: ConfigKeys) -> DecoderSpec:
    """Qwen2: biases of q, k and v."""
    return _qwen(keys, head_dim=None, has_qkv_bias=True)


def qwen3(keys: ConfigKeys) -> DecoderSpec:
    """Qwen3: norms of q and k, a head size of its own."""
    return _qwen(keys, head_dim=128, qk_norm=QkNorm(norm=rms_norm(keys)), **biases(keys))


def qwen2_vl(keys: ConfigKeys) -> DecoderSpec:
    """The text half of Qwen2-VL and Qwen2.5-VL."""
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
    return qwen2(_of_text(keys, defaults))


def qwen3_vl(keys: ConfigKeys) -> DecoderSpec:
    """The text half of Qwen3-VL, which has no windows."""
    values = {key: value for key, value in keys.values.items() if key not in ("use_sliding_window", "layer_types")}
    defaults = {"rope_theta": 5e5, "max_position_embeddings": 128_000}
    return qwen3(_of_text(ConfigKeys(values, keys.source, keys.stored_names), defaults))


def _of_text(keys: ConfigKeys, defaults: Mapping[str, Any]) -> ConfigKeys:
    """The keys with other defaults, and the rotary positions of text: sections for height and width are no kind."""
    values = {**defaults, **keys.values}
    for name in ("rope_scaling", "rope_parameters"):
        scaling, kinds = values.get(name), ("rope_type", "type")
        if isinstance(scaling, dict) and "mrope" in map(scaling.get, kinds):
            values[name] = {key: "default" if key in kinds else value for key, value in scaling.items()}
    return ConfigKeys(values, keys.source, keys.stored_names)


def _qwen(keys: ConfigKeys, head_dim: int | None, **changes: Any) -> DecoderSpec:
    """Windows have to be switched on. `changes`: fields of `AttentionSpec`."""
    found, norm = sizes(keys, num_kv_heads=32, head_dim=head_dim, max_position=32_768), rms_norm(keys)
    is_on, first = keys.flag("use_sliding_window", False), keys.count("max_window_layers", 28, least=0)
    on = windows(keys, found.num_layers, 4096, is_on=is_on, first=first)
    layers = layers_of(found, norm, feed(keys), windows=on, **changes)
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found),))


FAMILIES = {
    "ministral": Family(spec=mistral),
    "ministral3": Family(spec=ministral3),
    "mistral": Family(spec=mistral),
    "qwen2": Family(spec=qwen2),
    "qwen2_5_vl_text": Family(spec=qwen2_vl),
    "qwen2_vl_text": Family(spec=qwen2_vl),
    "qwen3": Family(spec=qwen3),
    "qwen3_vl_text": Family(spec=qwen3_vl),
}
