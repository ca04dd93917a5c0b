"""What most families share when they read a config.json: sizes, norms, windows, feeds, dtype, ids.

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
    NormSpec,
)
from .names import Names

DTYPES = ("float32", "bfloat16", "float16")
OTHER_DTYPES = {"float": "float32", "float64": "float32", "double": "float32", "half": "float16"}  # names of torch
MAX_LAYERS = 1024  # most layers; the deepest published decoders have some 130
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that every config.json gives."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # max_position_embeddings


def sizes(
    keys: ConfigKeys,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    max_position: int = 2048,
    has_plain_heads: bool = False,
) -> Sizes:
    """The sizes. The arguments are defaults.

    None: as many key/value heads as heads, which share the hidden size; the other keys have to be there. With
    `has_plain_heads` that holds whatever the file says, as the family has no keys for it.
    """
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads", num_heads)
    if has_plain_heads:
        values = {key: value for key, value in keys.values.items() if key not in ("num_key_value_heads", "head_dim")}
        keys = ConfigKeys(values, keys.source, keys.stored_names)
    default_kv_heads = None if keys.is_null("num_key_value_heads") else num_kv_heads
    default_dim = None if keys.is_null("head_dim") else head_dim
    kv_heads = keys.count("num_key_value_heads", default_kv_heads or num_heads)
    if num_heads % kv_heads:
        keys.fail("num_key_value_heads", f"must divide num_attention_heads ({num_heads}), but is {kv_heads}")
    return Sizes(
        hidden_size=hidden_size,
        num_layers=keys.count("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=keys.count("head_dim", default_dim or hidden_size // num_heads),
        vocab_size=keys.count("vocab_size", vocab_size),
        max_position=keys.count("max_position_embeddings", max_position),
    )


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
    inner: FeedSpec,
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


def biases(keys: ConfigKeys, key: str = "attention_bias") -> dict[str, Any]:
    """The biases of all projections of attention, as one key says; the fields of `AttentionSpec`."""
    has_bias = keys.flag(key, False)
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


def windows(
    keys: ConfigKeys,
    num_layers: int,
    default: int | None,
    *,
    is_on: bool = True,
    first: int = 0,
    pattern: Callable[[int], bool] | None = None,
) -> tuple[int | None, ...]:
    """The window of each layer; None = it sees all keys.

    `layer_types` says which layers have one; without it those from `first` on, or those for which `pattern` holds.
    `default` is that of `sliding_window`; None: the family has no windows. `is_on` False: no layer has one.
    """
    window: int | None = None
    if default is not None and is_on:
        is_null = keys.is_null("sliding_window")
        window = None if is_null else keys.count("sliding_window", default)
    types = layer_types(keys, num_layers)
    if types is None:
        chosen = pattern or (lambda layer: layer >= first)
        return tuple(window if chosen(layer) else None for layer in range(num_layers))
    if "sliding_attention" in types and window is None:
        keys.fail("layer_types", "names 'sliding_attention', but no sliding_window is in force")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def layer_types(
    keys: ConfigKeys, num_layers: int, known: tuple[str, ...] = ("full_attention", "sliding_attention")
) -> list[str] | None:
    """The type of each layer, one of `known`; None if the file does not list them."""
    types = keys.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        keys.fail("layer_types", f"must list one type for each of the {num_layers} layers")
    for kind in types:
        if kind not in known:
            names = ", ".join(f"'{name}'" for name in known)
            keys.fail("layer_types", f"{quoted(kind)} is not supported; supported: {names}")
    return types


def refuse_other(keys: ConfigKeys, **values: Any) -> None:
    """Raises UnbuiltError for a key with another value than this one, which is also its default."""
    for name, value in values.items():
        if keys.values.get(name) not in (None, value):
            keys.refuse(name, f"{quoted(keys.values[name])} is not supported; supported: {quoted(value)}")


def refuse_true(keys: ConfigKeys, *names: str) -> None:
    """Raises UnbuiltError for a key that changes the computation in a way that is not built."""
    for name in names:
        if keys.values.get(name):
            keys.refuse(name, f"{quoted(keys.values[name])} is not supported for a model that generates text")


def rope(keys: ConfigKeys, sizes: Sizes, **defaults: Any) -> RopeConfig:
    """The rotary positions of all layers. `defaults`: see `parse_rope`."""
    return parse_rope(keys, sizes.head_dim, sizes.max_position, **defaults)


def default_rope(keys: ConfigKeys, **values: Any) -> ConfigKeys:
    """The keys with these rotary parameters, if the file has none."""
    if keys.values.get("rope_scaling") or keys.values.get("rope_parameters") is not None:
        return keys
    return ConfigKeys({**keys.values, "rope_parameters": values}, keys.source, keys.stored_names)


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


def parse_dtype(keys: ConfigKeys) -> str:
    """The dtype as torch names it, with or without "torch."; "auto": that of the weights."""
    key = "dtype" if keys.values.get("dtype") else "torch_dtype"
    name = keys.values.get(key) or "auto"
    chosen = str(name).removeprefix("torch.")
    chosen = OTHER_DTYPES.get(chosen, chosen)
    if chosen not in DTYPES and chosen != "auto":
        keys.fail(key, f"{quoted(name)} is not supported; supported: auto, {', '.join(DTYPES)}")
    return chosen


def renamed(keys: ConfigKeys, names: Mapping[str, str]) -> ConfigKeys:
    """The keys under the names that most families have. `names`: name here -> name in the file, which errors say."""
    found = {name: stored for name, stored in names.items() if stored in keys.values}
    values = {**keys.values, **{name: keys.values[stored] for name, stored in found.items()}}
    return ConfigKeys(values, keys.source, {**keys.stored_names, **found})
