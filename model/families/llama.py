"""Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3 (dense): the line that the other families are compared with.

RMS norms before attention and feed, rotary halves, a feed gated by SiLU. Mistral has windows, Qwen2 biases of q, k and
v, Qwen3 norms of each head of q and k.
"""

from __future__ import annotations

from ..config_keys import ConfigKeys
from ..spec import DecoderSpec, LayerSpec, QkNorm
from .building import Family, Sizes, attention, decoder, feed, rms_norm, rope, sizes, windows


def llama(keys: ConfigKeys) -> DecoderSpec:
    """Llama: no windows; one key for all biases of attention, one for those of the feed."""
    has_bias = keys.flag("attention_bias", False)
    return _decoder(keys, sizes(keys), has_qkv_bias=has_bias, has_output_bias=has_bias, has_mlp_bias_key=True)


def mistral(keys: ConfigKeys) -> DecoderSpec:
    """Mistral: a window on all layers, unless it is null."""
    return _decoder(keys, sizes(keys, num_kv_heads=8, max_position=131_072), window=4096)


def qwen2(keys: ConfigKeys) -> DecoderSpec:
    """Qwen2: biases of q, k and v."""
    return _decoder(
        keys, sizes(keys, num_kv_heads=32, max_position=32_768), window=4096, is_window_opt_in=True, has_qkv_bias=True
    )


def qwen3(keys: ConfigKeys) -> DecoderSpec:
    """Qwen3: norms of q and k, a head size of its own."""
    has_bias = keys.flag("attention_bias", False)
    return _decoder(
        keys,
        sizes(keys, num_kv_heads=32, head_dim=128, max_position=32_768),
        window=4096,
        is_window_opt_in=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
    )


def _decoder(
    keys: ConfigKeys,
    found: Sizes,
    *,
    window: int | None = None,
    is_window_opt_in: bool = False,  # a window applies only if `use_sliding_window` is true
    has_qkv_bias: bool = False,
    has_output_bias: bool = False,
    has_mlp_bias_key: bool = False,
    has_qk_norm: bool = False,
) -> DecoderSpec:
    norm, positions = rms_norm(keys), rope(keys, found)
    inner = feed(keys, has_bias=has_mlp_bias_key and keys.flag("mlp_bias", False))
    is_on = not is_window_opt_in or keys.flag("use_sliding_window", False)
    first = keys.count("max_window_layers", 28, least=0) if is_window_opt_in else 0
    layers = (
        LayerSpec(
            mixer=attention(
                found,
                window=size,
                has_qkv_bias=has_qkv_bias,
                has_output_bias=has_output_bias,
                qk_norm=QkNorm(norm=norm) if has_qk_norm else None,
            ),
            feed=inner,
            pre_mixer=norm,
            pre_feed=norm,
        )
        for size in windows(keys, found.num_layers, window, is_on=is_on, first=first)
    )
    return decoder(keys, found, layers, final_norm=norm, ropes=(positions,))


FAMILIES = {
    "llama": Family(spec=llama),
    "mistral": Family(spec=mistral),
    "qwen2": Family(spec=qwen2),
    "qwen3": Family(spec=qwen3),
}
