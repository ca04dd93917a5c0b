"""The configuration of a decoder, read from a checkpoint's config.json. Does not import torch.

Supports Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3 (dense), as written by transformers 4 (`rope_theta`,
`rope_scaling`, `torch_dtype`) and by transformers 5 (`rope_parameters`, `dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_keys import ConfigKeys
from .errors import CheckpointError, quoted
from .files import read_json, refuse_code
from .foreign import describe_folder, refuse_quantized
from .rope_config import RopeConfig, longest_sequence, parse_rope

DTYPES = ("float32", "bfloat16", "float16")
OTHER_DTYPES = {"float": "float32", "float64": "float32", "double": "float32", "half": "float16"}  # names of torch
MAX_LAYERS = 1024  # most layers; the deepest published decoders have some 130


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
    dtype: str  # one of DTYPES; "auto", if config.json names none, until `open_source` has seen the weights
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, root: Path) -> ModelConfig:
        """The configuration of the checkpoint in `root`. Raises CheckpointError naming the wrong key."""
        values = read_json(root, "config.json")
        if values is None:
            nothing = f"{root}: no config.json, so this is not a model directory in Hugging Face format"
            raise CheckpointError(describe_folder(root) or nothing)
        refuse_code(root, "config.json", values)
        refuse_quantized(root, values)
        return parse_config(values, f"config.json ({root})")

    @property
    def longest_on_request(self) -> int:
        """The longest sequence that a setting may ask for: rotary scaling may stretch the trained length."""
        is_stretched = self.rope.kind in ("linear", "dynamic")
        return max(self.max_position_embeddings, int(self.rope.factor * self.max_position_embeddings * is_stretched))

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
    keys = ConfigKeys(values, source)
    family = _family(keys)
    _refuse_what_is_not_built(keys)
    num_layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    head_dim = keys.count("head_dim", family.head_dim or hidden_size // num_heads)
    default_kv_heads = None if keys.is_null("num_key_value_heads") else family.num_kv_heads
    num_kv_heads = keys.count("num_key_value_heads", default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        keys.fail("num_key_value_heads", f"must divide num_attention_heads ({num_heads}), but is {num_kv_heads}")
    max_position = keys.count("max_position_embeddings", family.max_position_embeddings)
    rope = parse_rope(keys, head_dim, max_position)
    has_bias = keys.flag("attention_bias", False)
    vocab_size = keys.count("vocab_size")
    return ModelConfig(
        model_type=values["model_type"],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.count("intermediate_size"),
        vocab_size=vocab_size,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6, most=1.0),
        rope=rope,
        max_position_embeddings=longest_sequence(rope, max_position),
        sliding_windows=_parse_windows(keys, family, num_layers),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=has_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.has_mlp_bias_key and keys.flag("mlp_bias", False),
        has_qk_norm=family.has_qk_norm,
        dtype=_parse_dtype(keys),
        bos_token_id=_first(keys.token_ids("bos_token_id", vocab_size)),
        eos_token_ids=keys.token_ids("eos_token_id", vocab_size),
    )


def _family(keys: ConfigKeys) -> _Family:
    model_type = keys.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        keys.fail("model_type", f"{quoted(model_type)} is not supported; supported: {known}")
    architectures = keys.values.get("architectures") or []
    if not isinstance(architectures, list):
        keys.fail("architectures", f"must be a list of names, not {quoted(architectures)}")
    if architectures and not any(str(name).endswith(("ForCausalLM", "Model")) for name in architectures):
        names = quoted(architectures)
        keys.fail("architectures", f"{names} holds no ...ForCausalLM, so this checkpoint cannot generate text")
    return _FAMILIES[model_type]


def _refuse_what_is_not_built(keys: ConfigKeys) -> None:
    if keys.values.get("quantization_config"):
        method = keys.values["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        name = quoted(method)
        keys.fail("quantization_config", f"{name} weights are not supported; use the unquantized checkpoint")
    activation = keys.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        keys.fail("hidden_act", f"{quoted(activation)} is not supported; supported: 'silu'")


def _parse_windows(keys: ConfigKeys, family: _Family, num_layers: int) -> tuple[int | None, ...]:
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
            known = "'full_attention', 'sliding_attention'"
            keys.fail("layer_types", f"{quoted(kind)} is not supported; supported: {known}")
        if kind == "sliding_attention" and window is None:
            keys.fail("layer_types", "names 'sliding_attention', but no sliding_window is in force")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _parse_dtype(keys: ConfigKeys) -> str:
    """The dtype as torch names it, with or without "torch."; "auto": that of the weights."""
    key = "dtype" if keys.values.get("dtype") else "torch_dtype"
    name = keys.values.get(key) or "auto"
    chosen = str(name).removeprefix("torch.")
    chosen = OTHER_DTYPES.get(chosen, chosen)
    if chosen not in DTYPES and chosen != "auto":
        keys.fail(key, f"{quoted(name)} is not supported; supported: auto, {', '.join(DTYPES)}")
    return chosen


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
