"""Keys of a config.json that most families read: sizes, layer types, windows, dtype; and keys that are refused.

A default is what transformers' class of the `model_type` takes for a key that the file lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config_keys import ConfigKeys
from ..errors import quoted

DTYPES = ("float32", "bfloat16", "float16")
OTHER_DTYPES = {"float": "float32", "float64": "float32", "double": "float32", "half": "float16"}  # names of torch
MAX_LAYERS = 1024  # most layers; the deepest published decoders have some 130


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
    keys: ConfigKeys,
    num_layers: int,
    known: tuple[str, ...] = ("full_attention", "sliding_attention"),
    key: str = "layer_types",
) -> list[str] | None:
    """The type of each layer, one of `known`; None if the file does not list them."""
    types = keys.values.get(key)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        keys.fail(key, f"must list one type for each of the {num_layers} layers")
    for kind in types:
        if kind not in known:
            names = ", ".join(f"'{name}'" for name in known)
            keys.fail(key, f"{quoted(kind)} is not supported; supported: {names}")
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


def default_rope(keys: ConfigKeys, **values: Any) -> ConfigKeys:
    """The keys with these rotary parameters, if the file has none."""
    if keys.values.get("rope_scaling") or keys.values.get("rope_parameters") is not None:
        return keys
    return ConfigKeys({**keys.values, "rope_parameters": values}, keys.source, keys.stored_names)


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
