"""gpt-oss: sinks, windows on every other layer, biases, and experts with a clamped SwiGLU, of the chosen logits."""

from __future__ import annotations

from dataclasses import replace

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec, FeedSpec, RouterSpec
from ..building import Family, biases, decoder, layers_of, rms_norm, rope
from ..names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, LAYER, ROUTER, Names, Rows
from ..reading import default_rope, refuse_other, sizes, windows
from .mixtures import mixture, under_either_name

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(keys: ConfigKeys) -> DecoderSpec:
    """The first layer has a window, the second has none, and so on."""
    refuse_other(keys, hidden_act="silu")
    keys = default_rope(under_either_name(keys, "num_experts", "num_local_experts"), **YARN)
    found = sizes(keys, num_kv_heads=8, head_dim=64, max_position=131_072)
    norm = rms_norm(keys, default=1e-5)
    expert = FeedSpec(
        intermediate_size=keys.count("intermediate_size", 2880),
        activation="swiglu_clamped",
        has_bias=True,
        alpha=keys.number("swiglu_alpha", 1.702),
        limit=keys.positive("swiglu_limit", 7.0),
    )
    router = RouterSpec(when="after_top_k", has_bias=True)
    moe = mixture(keys, router, num_experts=128, top_k=4, expert=expert)
    on = windows(keys, found.num_layers, 128, pattern=lambda layer: layer % 2 == 0)
    layers = layers_of(found, norm, moe, windows=on, has_sinks=True, **biases(keys, default=True))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=150_000.0),))


def names(spec: DecoderSpec) -> Names:
    """Experts are stacked, as [inputs, outputs]; rows of gate and up take turns."""
    moe, experts = spec.mixtures[0], f"{LAYER}.mlp.experts"
    size = moe.expert.intermediate_size
    stems = {
        EXPERT_GATE: ("gate_up_proj", slice(0, 2 * size, 2)),
        EXPERT_UP: ("gate_up_proj", slice(1, 2 * size, 2)),
        EXPERT_DOWN: ("down_proj", None),
    }
    found: dict[str, str | Rows] = {ROUTER: f"{LAYER}.mlp.router"}
    for stem, (name, rows) in stems.items():
        bias = Rows(f"{experts}.{name}_bias", rows, suffix="", num_stacked=moe.num_experts)
        found[f"{stem}.bias"] = bias
        found[f"{stem}.weight"] = replace(bias, stem=f"{experts}.{name}", is_transposed=True)
    return found


FAMILIES = {"gpt_oss": Family(spec=gpt_oss, names=names)}
