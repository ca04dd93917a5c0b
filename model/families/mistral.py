"""Mistral, Ministral, Qwen2, Qwen2.5 and Qwen3 (dense): Llama with windows, biases of q, k and v, or norms of heads.

Ministral 3 tempers its queries beyond the length of the first training.
"""

from __future__ import annotations

from typing import Any

from ..config_keys import ConfigKeys
from ..rope_config import rope_keys
from ..spec import DecoderSpec, QkNorm
from .building import Family, biases, decoder, default_rope, feed, layers_of, rms_norm, rope, sizes, windows


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
    "qwen3": Family(spec=qwen3),
}
