"""The configuration of a decoder, read from a checkpoint's config.json. Does not import torch.

Supports Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3 (dense), as written by transformers 4 (`rope_theta`,
`rope_scaling`, `torch_dtype`) and by transformers 5 (`rope_parameters`, `dtype`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import CheckpointError
from .files import read_json, refuse_code

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: `dim / 2` frequencies from `theta`, scaled by `kind`."""

    kind: str = "default"  # default | linear | dynamic | llama3 | yarn
    theta: float = 10_000.0
    dim: int  # rotated elements of a head, from its start; even
    factor: float = 1.0  # by which the context is stretched
    original_max_position: int  # context of the original training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp begins and ends at whole numbers
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and options of a decoder, independent of its family.

    KV bytes per token = 2 * num_layers * num_kv_heads * head_dim * dtype size.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # rows of the embedding; the tokenizer may have fewer ids
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int  # longest sequence, prompt and output together
    sliding_windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    tie_word_embeddings: bool
    has_head: bool = True  # False = no logits, as the checkpoint was saved without its output layer
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    has_qk_norm: bool  # RMSNorm over each head of q and k, before rotation
    dtype: str  # one of DTYPES, from the checkpoint; float32 if it names none
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, root: Path) -> ModelConfig:
        """The configuration of the checkpoint in `root`. Raises CheckpointError naming the wrong key."""
        values = read_json(root, "config.json")
        if values is None:
            raise CheckpointError(f"{root}: no config.json, so this is not a model directory in Hugging Face format")
        refuse_code(root, "config.json", values)
        return parse_config(values, f"config.json ({root})")

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class _Family:
    """The defaults of a model_type for keys that config.json lacks."""

    num_kv_heads: int | None = None  # None = as many as query heads
    head_dim: int | None = None  # None = hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    is_window_opt_in: bool = False  # a window applies only if `use_sliding_window` is true
    qkv_bias: bool | None = None  # None = the key `attention_bias`
    output_bias: bool | None = None  # None = the key `attention_bias`
    has_mlp_bias_key: bool = False
    has_qk_norm: bool = False


_FAMILIES = {
    "llama": _Family(has_mlp_bias_key=True),
    "mistral": _Family(
        num_kv_heads=8, max_position_embeddings=131_072, sliding_window=4096, qkv_bias=False, output_bias=False
    ),
    "qwen2": _Family(
        num_kv_heads=32,
        max_position_embeddings=32_768,
        sliding_window=4096,
        is_window_opt_in=True,
        qkv_bias=True,
        output_bias=False,
    ),
    "qwen3": _Family(
        num_kv_heads=32,
        head_dim=128,
        max_position_embeddings=32_768,
        sliding_window=4096,
        is_window_opt_in=True,
        has_qk_norm=True,
    ),
}


def parse_config(values: Mapping[str, Any], source: str) -> ModelConfig:
    """A ModelConfig from the contents of a config.json; `source` names it in errors."""
    keys = _Keys(values, source)
    family = _family(keys)
    _refuse_what_is_not_built(keys)
    num_layers = keys.count("num_hidden_layers")
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    head_dim = keys.count("head_dim", family.head_dim or hidden_size // num_heads)
    num_kv_heads = keys.count("num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        keys.fail("num_key_value_heads", f"must divide num_attention_heads ({num_heads}), but is {num_kv_heads}")
    max_position = keys.count("max_position_embeddings", family.max_position_embeddings)
    rope = _parse_rope(keys, head_dim, max_position)
    has_bias = keys.flag("attention_bias", False)
    return ModelConfig(
        model_type=values["model_type"],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.count("intermediate_size"),
        vocab_size=keys.count("vocab_size"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=_longest_sequence(rope, max_position),
        sliding_windows=_parse_windows(keys, family, num_layers),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=has_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.has_mlp_bias_key and keys.flag("mlp_bias", False),
        has_qk_norm=family.has_qk_norm,
        dtype=_parse_dtype(keys),
        bos_token_id=_first(keys.token_ids("bos_token_id")),
        eos_token_ids=keys.token_ids("eos_token_id"),
    )


def _family(keys: _Keys) -> _Family:
    model_type = keys.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        keys.fail("model_type", f"{model_type!r} is not supported; supported: {', '.join(sorted(_FAMILIES))}")
    architectures = keys.values.get("architectures") or []
    if architectures and not any(str(name).endswith(("ForCausalLM", "Model")) for name in architectures):
        keys.fail("architectures", f"{architectures} holds no ...ForCausalLM, so this checkpoint cannot generate text")
    return _FAMILIES[model_type]


def _refuse_what_is_not_built(keys: _Keys) -> None:
    if keys.values.get("quantization_config"):
        method = keys.values["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        keys.fail("quantization_config", f"{method!r} weights are not supported; use the unquantized checkpoint")
    activation = keys.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        keys.fail("hidden_act", f"{activation!r} is not supported; supported: 'silu'")


def _parse_windows(keys: _Keys, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: of all layers, of those in `layer_types`, or of those from max_window_layers on."""
    window: int | None = None
    if family.sliding_window is not None:
        is_on = keys.flag("use_sliding_window", False) if family.is_window_opt_in else True
        is_null = "sliding_window" in keys.values and keys.values["sliding_window"] is None
        window = keys.count("sliding_window", family.sliding_window) if is_on and not is_null else None
    layer_types = keys.values.get("layer_types")
    if layer_types is None:
        first = keys.count("max_window_layers", 28, least=0) if family.is_window_opt_in else 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        keys.fail("layer_types", f"must list one type for each of the {num_layers} layers")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            keys.fail("layer_types", f"{kind!r} is not supported; supported: 'full_attention', 'sliding_attention'")
        if kind == "sliding_attention" and window is None:
            keys.fail("layer_types", "names 'sliding_attention', but no sliding_window is in force")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _parse_rope(keys: _Keys, head_dim: int, max_position: int) -> RopeConfig:
    values = keys.values
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        keys.fail("rope_parameters" if values.get("rope_parameters") else "rope_scaling", "must be an object")
    if "full_attention" in scaling:  # transformers 5 may give them by layer type; the four families use one
        scaling = scaling["full_attention"]
    rope = _Keys(scaling, f"{keys.source}, rope parameters")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        rope.fail("rope_type", f"{kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn")
    dim = int(head_dim * rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0)))
    if dim % 2 or not 0 < dim <= head_dim:
        rope.fail("partial_rotary_factor", f"must give an even number of rotated elements up to {head_dim}, not {dim}")
    original = rope.count("original_max_position_embeddings", max_position)
    needs_factor = kind in ("linear", "dynamic", "llama3") or (kind == "yarn" and original == max_position)
    factor = rope.number("factor", None if needs_factor else max_position / original)
    low_freq = rope.number("low_freq_factor", None if kind == "llama3" else 1.0)
    high_freq = rope.number("high_freq_factor", None if kind == "llama3" else 4.0)
    if factor <= 0 or not 0 < low_freq < high_freq:
        rope.fail("factor", f"needs factor > 0 and 0 < low_freq_factor < high_freq_factor in {dict(scaling)}")
    return RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta", keys.number("rope_theta", 10_000.0)),
        dim=dim,
        factor=factor if kind != "default" else 1.0,
        original_max_position=original,
        low_freq_factor=low_freq,
        high_freq_factor=high_freq,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(rope: _Keys, factor: float) -> float:
    """YaRN's factor of cos and sin, which keeps attention equally sharp over a longer context."""

    def sharpness(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    default = sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1.0)
    return rope.number("attention_factor", default)


def _longest_sequence(rope: RopeConfig, max_position: int) -> int:
    """The longest sequence. YaRN checkpoints give the length before stretching (Qwen2.5) or after it."""
    return max(max_position, int(rope.factor * rope.original_max_position)) if rope.kind == "yarn" else max_position


def _parse_dtype(keys: _Keys) -> str:
    name = keys.values.get("dtype") or keys.values.get("torch_dtype") or "float32"
    if name not in DTYPES:
        keys.fail("dtype", f"{name!r} is not supported; supported: {', '.join(DTYPES)}")
    return str(name)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


class _Keys:
    """Typed access to a JSON object; errors name the source, the key and the value."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.source}: {key}: {problem}")

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            self.fail(key, f"must be a whole number from {least} to 2**31 - 1, not {value!r}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            self.fail(key, f"must be a finite number, 0 or more, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {value!r}")
        return bool(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """The ids of a key that holds one id, a list of ids, or nothing."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            self.fail(key, f"must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is missing")
        return value
