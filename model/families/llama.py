"""Llama, and what differs from it by a few keys: Arcee, Seed-OSS, SmolLM3, InternLM3, IQuest-Coder, CWM, EXAONE 3.

RMS norms before attention and feed, rotary halves, a feed gated by SiLU: the line that the other families are compared
with.
"""

from __future__ import annotations

from typing import Any

from ..config_keys import ConfigKeys
from ..spec import DecoderSpec
from .building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from .names import DOWN, EMBEDDING, FINAL_NORM, GATE, OUTPUT, PRE_FEED, PRE_MIXER, UP, K, Names, Q, V
from .reading import Sizes, default_rope, refuse_true, renamed, sizes, windows


def llama(keys: ConfigKeys) -> DecoderSpec:
    """Llama: no windows; one key for all biases of attention, one for those of the feed."""
    return _decoder(keys, sizes(keys), eps=1e-6)


def arcee(keys: ConfigKeys) -> DecoderSpec:
    """Arcee: a feed without a gate, by the square of ReLU."""
    return _decoder(keys, sizes(keys, max_position=4096), activation="relu2", is_gated=False)


def seed_oss(keys: ConfigKeys) -> DecoderSpec:
    """Seed-OSS: a key of its own for the bias after attention."""
    found = sizes(keys, num_kv_heads=8, head_dim=128, max_position=524_288)
    has_bias, has_output_bias = keys.flag("attention_bias", True), keys.flag("attention_out_bias", False)
    return _decoder(keys, found, eps=1e-6, has_qkv_bias=has_bias, has_output_bias=has_output_bias)


def smollm3(keys: ConfigKeys) -> DecoderSpec:
    """SmolLM3: some layers do not rotate; windows, if there are any, are theirs."""
    found = sizes(keys, num_kv_heads=4, max_position=32_768)
    rotates = _rotating(keys, found.num_layers)
    is_on = keys.flag("use_sliding_window", False) and keys.values.get("sliding_window") is not None
    on = windows(keys, found.num_layers, 4096, is_on=is_on, pattern=lambda layer: not rotates[layer])
    ropes = [0 if does else None for does in rotates]
    return _decoder(keys, found, eps=1e-6, theta=2e6, is_tied=True, windows=on, ropes=ropes)


def _rotating(keys: ConfigKeys, num_layers: int) -> list[bool]:
    """Whether each layer rotates. In `no_rope_layers` 1 says that it does."""
    listed = keys.values.get("no_rope_layers")
    if listed is None:
        interval = keys.count("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(one not in (0, 1) for one in listed):
        keys.fail("no_rope_layers", f"must list 1, if it rotates, or 0 for each of the {num_layers} layers")
    return [bool(one) for one in listed[:num_layers]]


def internlm3(keys: ConfigKeys) -> DecoderSpec:
    """InternLM3: other names of the keys for biases."""
    keys = renamed(keys, {"attention_bias": "qkv_bias", "mlp_bias": "bias"})
    return _decoder(keys, sizes(keys, num_kv_heads=2, head_dim=128, max_position=32_768))


def iquestcoder(keys: ConfigKeys) -> DecoderSpec:
    """IQuest-Coder: a head size of its own. No checkpoint uses the windows and the clipping of its first code."""
    refuse_true(keys, "clip_qkv", "use_sliding_window")
    return _decoder(keys, sizes(keys, num_kv_heads=8, head_dim=128, max_position=131_072))


def cwm(keys: ConfigKeys) -> DecoderSpec:
    """CWM: windows on all layers but every fourth, from the first on; long positions as in Llama 3."""
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    keys = default_rope(keys, **scaling, rope_theta=1e6, original_max_position_embeddings=8192)
    found = sizes(keys, num_kv_heads=8, head_dim=128, max_position=131_072)
    on = windows(keys, found.num_layers, 8192, pattern=lambda layer: layer % 4 != 0)
    return _decoder(keys, found, theta=1e6, windows=on, has_qkv_bias=False, has_output_bias=False)


def exaone(keys: ConfigKeys) -> DecoderSpec:
    """EXAONE 3: other names of keys and tensors."""
    names = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"}
    keys = renamed(keys, {**names, "hidden_act": "activation_function"})
    return _decoder(keys, sizes(keys, num_kv_heads=8, max_position=4096), theta=5e5)


def exaone_names(spec: DecoderSpec) -> Names:
    """The names of EXAONE 3's own code, which its checkpoints have."""
    layer = "transformer.h.*"
    attention = {
        stem: f"{layer}.attn.attention.{name}_proj" for stem, name in ((Q, "q"), (K, "k"), (V, "v"), (OUTPUT, "out"))
    }
    mlp = {GATE: f"{layer}.mlp.c_fc_0", UP: f"{layer}.mlp.c_fc_1", DOWN: f"{layer}.mlp.c_proj"}
    norms = {PRE_MIXER: f"{layer}.ln_1", PRE_FEED: f"{layer}.ln_2", FINAL_NORM: "transformer.ln_f"}
    return {EMBEDDING: "transformer.wte", **norms, **attention, **mlp}


def _decoder(
    keys: ConfigKeys,
    found: Sizes,
    *,
    eps: float = 1e-5,
    theta: float = 1e4,
    activation: str = "silu",
    is_gated: bool = True,
    is_tied: bool = False,
    **changes: Any,
) -> DecoderSpec:
    """The defaults of keys, and of `layers_of`."""
    norm = rms_norm(keys, default=eps)
    inner = feed(keys, activation=activation, is_gated=is_gated, has_bias=keys.flag("mlp_bias", False))
    layers = layers_of(found, norm, inner, **{**biases(keys), **changes})
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=theta),), is_tied=is_tied)


FAMILIES = {
    "llama": Family(spec=llama),
    "arcee": Family(spec=arcee),
    "cwm": Family(spec=cwm),
    "exaone": Family(spec=exaone, names=exaone_names, prefix="transformer"),
    "internlm3": Family(spec=internlm3),
    "iquestcoder": Family(spec=iquestcoder),
    "seed_oss": Family(spec=seed_oss),
    "smollm3": Family(spec=smollm3),
}
