"""What most families make of a config.json: attention, feeds, norms, layers, the whole decoder.

Every function takes the `ConfigKeys` of the file and the defaults of the family. A default is what transformers' class
of the `model_type` takes for a key that the file lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config_keys import ConfigKeys
from ..errors import quoted
from ..rope_config import RopeConfig, longest_sequence, parse_rope
from ..spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    FeedSpec,
    HeadSpec,
    LayerSpec,
    MoeSpec,
    NormSpec,
)
from .names import Names
from .reading import Sizes, parse_dtype

ACTIVATIONS: dict[str, Activation] = {  # names in config.json
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the checkpoints of one or more model types are read."""

    spec: Callable[[ConfigKeys], DecoderSpec]
    names: Callable[[DecoderSpec], Names] = lambda spec: {}  # sources of tensors that have no canonical name
    prefix: str = "model"  # of the tensors but the head's; as in transformers, files may leave it out
    constants: Mapping[str, float] = field(default_factory=dict)  # names of tensors -> the number that each must hold
    older_names: Mapping[str, str] = field(default_factory=dict)  # stems in older files -> stems
    unused: Callable[[DecoderSpec], Iterable[str]] = lambda spec: ()  # tensors that files may hold, though none is read
    has_guessing_layers: bool = False  # files may have layers behind the last, to guess further tokens; not used


def attention(sizes: Sizes, **changes: Any) -> AttentionSpec:
    """Attention with these heads. `changes`: fields of `AttentionSpec`; the default scale is head_dim ** -0.5."""
    return AttentionSpec(
        **{
            "num_heads": sizes.num_heads,
            "num_kv_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "scale": sizes.head_dim**-0.5,
            **changes,
        }
    )


def layers_of(
    sizes: Sizes,
    norm: NormSpec | None,
    inner: FeedSpec | MoeSpec,
    *,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[int | None] | None = None,
    around: Mapping[str, Any] | None = None,
    **changes: Any,
) -> list[LayerSpec]:
    """Layers that differ in windows and rotary positions only, with `norm` before attention and feed.

    `windows`, `ropes`: of each layer; None: no windows, the first positions. `around`: fields of `LayerSpec`;
    `changes`: those of `AttentionSpec`.
    """
    windows, ropes = windows or [None] * sizes.num_layers, ropes or [0] * sizes.num_layers
    fields: dict[str, Any] = {"pre_mixer": norm, "feed": inner, "pre_feed": norm, **(around or {})}
    return [
        LayerSpec(mixer=attention(sizes, window=window, rope=rope, **changes), **fields)
        for window, rope in zip(windows, ropes, strict=True)
    ]


def biases(keys: ConfigKeys, key: str = "attention_bias", *, default: bool = False) -> dict[str, Any]:
    """The biases of all projections of attention, as one key says; the fields of `AttentionSpec`."""
    has_bias = keys.flag(key, default)
    return {"has_qkv_bias": has_bias, "has_output_bias": has_bias}


def feed(
    keys: ConfigKeys,
    *,
    activation: str = "silu",
    key: str = "hidden_act",
    size: str = "intermediate_size",
    inner: int | None = None,
    renamed: Mapping[str, Activation] | None = None,
    **changes: Any,
) -> FeedSpec:
    """The feed-forward network. `changes`: fields of `FeedSpec`.

    `activation` is the default of `key`, and `inner` that of `size`; `renamed`: names that mean something else in this
    family.
    """
    chosen = activation_of(keys, key, activation, renamed)
    return FeedSpec(**{"intermediate_size": keys.count(size, inner), "activation": chosen, **changes})


def activation_of(
    keys: ConfigKeys, key: str, default: str, renamed: Mapping[str, Activation] | None = None
) -> Activation:
    """The activation that a key names."""
    name = keys.values.get(key)
    name = default if name is None else name
    if isinstance(name, str) and renamed and name in renamed:
        return renamed[name]
    if not isinstance(name, str) or name not in ACTIVATIONS:
        keys.fail(key, f"{quoted(name)} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def rms_norm(keys: ConfigKeys, key: str = "rms_norm_eps", default: float = 1e-6, **changes: Any) -> NormSpec:
    """RMS norm. `changes`: fields of `NormSpec`."""
    return NormSpec(eps=keys.number(key, default, most=1.0), **changes)


def layer_norm(keys: ConfigKeys, key: str = "layer_norm_eps", default: float = 1e-5, **changes: Any) -> NormSpec:
    """LayerNorm with a bias. `changes`: fields of `NormSpec`."""
    fields: dict[str, Any] = {"kind": "layer", "has_bias": True, "is_exact": True, **changes}
    return NormSpec(eps=keys.number(key, default, most=1.0), **fields)


def rope(keys: ConfigKeys, sizes: Sizes, **defaults: Any) -> RopeConfig:
    """The rotary positions of all layers. `defaults`: see `parse_rope`."""
    return parse_rope(keys, sizes.head_dim, sizes.max_position, **defaults)


def decoder(
    keys: ConfigKeys,
    sizes: Sizes,
    layers: Iterable[LayerSpec],
    *,
    final_norm: NormSpec | None,
    ropes: tuple[RopeConfig, ...] = (),
    embedding: EmbeddingSpec | None = None,
    head: HeadSpec | None = None,
    is_tied: bool = False,
) -> DecoderSpec:
    """The spec of a file. `is_tied` is the default of `tie_word_embeddings`, which sets the head's."""
    unique: dict[LayerSpec, LayerSpec] = {}
    is_tied = keys.flag("tie_word_embeddings", is_tied)
    layers = tuple(unique.setdefault(layer, layer) for layer in layers)
    _check_types(keys, layers)
    if len(lengths := {one.original_max_position for one in ropes if one.kind == "longrope"}) > 1:
        either = " and ".join(map(str, sorted(lengths)))
        keys.refuse("rope_parameters", f"longrope of two original lengths, {either}, is not supported; one is")
    return DecoderSpec(
        family=str(keys.values["model_type"]),
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=layers,
        embedding=embedding or EmbeddingSpec(),
        final_norm=final_norm,
        head=HeadSpec(is_tied=is_tied) if head is None else head,
        ropes=ropes,
        max_position_embeddings=max(
            (longest_sequence(one, sizes.max_position) for one in ropes), default=sizes.max_position
        ),
        dtype=parse_dtype(keys),
        bos_token_id=next(iter(keys.token_ids("bos_token_id", sizes.vocab_size)), None),
        eos_token_ids=keys.token_ids("eos_token_id", sizes.vocab_size),
    )


def _check_types(keys: ConfigKeys, layers: tuple[LayerSpec, ...]) -> None:
    """Refuses layer types that limit what a layer sees, where the family has read no limit."""
    types = keys.values.get("layer_types")
    for kind, layer in zip(types if isinstance(types, list) else (), layers, strict=False):
        is_limited = isinstance(layer.mixer, AttentionSpec) and (layer.mixer.window or layer.mixer.chunk)
        if kind in ("sliding_attention", "chunked_attention") and not is_limited:
            keys.fail("layer_types", f"names '{kind}', but no window is in force")
