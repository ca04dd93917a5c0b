"""GPT-2, StarCoder 1 (`gpt_bigcode`) and GPT-Neo: LayerNorm, learned positions, ungated feeds, tied heads.

GPT-2's matrices are stored transposed. StarCoder 1 has one key/value head. GPT-Neo does not scale scores, and every
other layer of it has a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...config_keys import ConfigKeys
from ...errors import quoted
from ...spec import AttentionSpec, DecoderSpec, EmbeddingSpec, LayerSpec, LearnedPositions
from ..building import Family, attention, decoder, feed, layer_norm
from ..names import (
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    POSITIONS,
    PRE_FEED,
    PRE_MIXER,
    UP,
    K,
    Names,
    Q,
    Rows,
    V,
    fused_qkv,
    split,
)
from ..reading import Sizes, refuse_true, renamed, sizes

LAYER = "transformer.h.*"
GPT_KEYS = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def gpt2(keys: ConfigKeys) -> DecoderSpec:
    """GPT-2. Its scores are computed in float32 in any case, which `reorder_and_upcast_attn` asks for."""
    keys = renamed(keys, GPT_KEYS)
    found = sizes(keys, max_position=1024, has_plain_heads=True)
    scale = _scale(keys, found)
    divisors = range(1, found.num_layers + 1) if keys.flag("scale_attn_by_inverse_layer_idx", False) else [1]
    return _decoder(keys, found, [attention(found, scale=scale / divisor, has_qkv_bias=True) for divisor in divisors])


def gpt_bigcode(keys: ConfigKeys) -> DecoderSpec:
    """StarCoder 1."""
    keys = renamed(keys, GPT_KEYS)
    num_kv_heads = 1 if keys.flag("multi_query", True) else None  # None: as many as heads
    keys = ConfigKeys({**keys.values, "num_key_value_heads": num_kv_heads}, keys.source, keys.stored_names)
    found = sizes(keys, max_position=1024)
    mixer = attention(found, scale=_scale(keys, found), has_qkv_bias=True)
    return _decoder(keys, found, [mixer], activation="gelu_pytorch_tanh")


def gpt_neo(keys: ConfigKeys) -> DecoderSpec:
    """GPT-Neo: `attention_types` says which layers see `window_size` keys only."""
    keys = renamed(keys, {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"})
    found = sizes(keys, has_plain_heads=True)
    window = keys.count("window_size", 256)
    kinds = _kinds(keys, found.num_layers)
    mixers = [attention(found, scale=1.0, window=window if kind == "local" else None) for kind in kinds]
    return _decoder(keys, found, mixers, size="intermediate_size")


def _scale(keys: ConfigKeys, found: Sizes) -> float:
    return found.head_dim**-0.5 if keys.flag("scale_attn_weights", True) else 1.0


def _kinds(keys: ConfigKeys, num_layers: int) -> list[str]:
    """The kind of each layer: `attention_layers`, else from a list of (kinds, how often they follow each other)."""
    listed = keys.values.get("attention_layers")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers or not {*map(str, listed)} <= {"global", "local"}:
            keys.fail(
                "attention_layers", f"must list 'global' or 'local' for {num_layers} layers, not {quoted(listed)}"
            )
        return listed
    groups = keys.values.get("attention_types") or [[["global", "local"], 12]]
    try:
        kinds = [kind for names, count in groups for _ in range(min(count, num_layers)) for kind in names]
    except (TypeError, ValueError):
        keys.fail("attention_types", f"must be a list of [[kinds], count], not {quoted(groups)}")
    if len(kinds) != num_layers or not {*map(str, kinds)} <= {"global", "local"}:
        keys.fail("attention_types", f"must give 'global' or 'local' for {num_layers} layers, not {quoted(groups)}")
    return kinds


def _decoder(
    keys: ConfigKeys,
    found: Sizes,
    mixers: Sequence[AttentionSpec],  # of each layer, or one
    activation: str = "gelu_new",
    size: str = "n_inner",
) -> DecoderSpec:
    refuse_true(keys, "add_cross_attention")
    norm = layer_norm(keys, "layer_norm_epsilon")
    inner = feed(
        keys,
        activation=activation,
        key="activation_function",
        size=size,
        inner=4 * found.hidden_size,
        is_gated=False,
        has_bias=True,
    )
    mixers = mixers if len(mixers) > 1 else [mixers[0]] * found.num_layers
    layers = [
        LayerSpec(mixer=replace(mixer, rope=None, has_output_bias=True), feed=inner, pre_mixer=norm, pre_feed=norm)
        for mixer in mixers
    ]
    embedding = EmbeddingSpec(positions=LearnedPositions(rows=found.max_position))
    return decoder(keys, found, layers, final_norm=norm, embedding=embedding, is_tied=True)


def names(spec: DecoderSpec) -> Names:
    """Where the tensors lie: all of GPT-2 but its embeddings and norms are transposed."""
    is_transposed = spec.family == "gpt2"
    places: Names = {
        EMBEDDING: "transformer.wte",
        POSITIONS: "transformer.wpe",
        PRE_MIXER: f"{LAYER}.ln_1",
        PRE_FEED: f"{LAYER}.ln_2",
        UP: Rows(f"{LAYER}.mlp.c_fc", is_transposed=is_transposed),
        DOWN: Rows(f"{LAYER}.mlp.c_proj", is_transposed=is_transposed),
        FINAL_NORM: "transformer.ln_f",
    }
    if spec.family == "gpt_neo":
        inner = f"{LAYER}.attn.attention"
        return {
            **places,
            **{stem: f"{inner}.{name}_proj" for stem, name in ((Q, "q"), (K, "k"), (V, "v"), (OUTPUT, "out"))},
        }
    is_by_head = spec.family == "gpt_bigcode" and spec.num_kv_heads > 1
    rows = fused_qkv(spec.attention, is_by_group=is_by_head)
    return {
        **places,
        **split(f"{LAYER}.attn.c_attn", (Q, K, V), rows, is_transposed=is_transposed),
        OUTPUT: Rows(f"{LAYER}.attn.c_proj", is_transposed=is_transposed),
    }


FAMILIES = {
    "gpt2": Family(spec=gpt2, names=names, prefix="transformer"),
    "gpt_bigcode": Family(spec=gpt_bigcode, names=names, prefix="transformer"),
    "gpt_neo": Family(spec=gpt_neo, names=names, prefix="transformer"),
}
