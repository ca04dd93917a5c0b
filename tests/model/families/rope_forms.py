"""Random rotary keys of config.json, and the frequencies that transformers makes of them for each layer."""

from __future__ import annotations

import copy
import importlib.util
import logging
import random
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from millrace.model.decoder.rope import inverse_frequencies, rope_tables
from millrace.model.families.registry import MODULES, parse_config

UNROTATED = {"biogpt", "bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt"}  # or by no key
TYPES = [name for name in MODULES if name not in UNROTATED]
BY_TYPE = ["gemma3_text", "olmo3"]  # each type of layer has its own
BEYOND = 400  # a length behind all trained ones
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "sliding_window": 16,
}
OWN: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "exaone": {"num_layers": 4},
    "falcon": {"num_kv_heads": 2},
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"head_dim": 16},
}
BESIDE: dict[str, tuple[float, list[Any]]] = {  # key -> how often it is there, and its values
    "rope_theta": (0.4, [500.0, 3e4, 1_000_000]),
    "partial_rotary_factor": (0.15, [0.5, 0.25, 1.0]),
    "original_max_position_embeddings": (0.12, [64]),
    "rope_local_base_freq": (0.2, [300.0]),
    "rotary_pct": (0.3, [0.5, 1.0]),
    "rotary_emb_base": (0.3, [500, 3e4]),
    "head_dim": (0.2, [16, 32]),
}


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """How the queries and keys of a layer rotate."""

    frequencies: NDArray[np.float32]  # [dim / 2] radians a position
    factor: float  # of cos and sin
    beyond: NDArray[np.float32] | None = (
        None  # cos, sin of the last position of a long sequence, if it rotates otherwise
    )

    def is_like(self, other: Rotation) -> bool:
        """Whether two are the same but for rounding."""
        if self.frequencies.shape != other.frequencies.shape or abs(self.factor - other.factor) > 1e-5:
            return False
        if self.beyond is None or other.beyond is None:
            return self.beyond is other.beyond and np.allclose(self.frequencies, other.frequencies, rtol=1e-4, atol=0)
        return np.allclose(self.beyond, other.beyond, atol=1e-3)


def draw(model_type: str, rng: random.Random) -> dict[str, Any]:
    """The keys of a config.json, in the older form, the newer one, or both."""
    keys = {**SIZES, **OWN.get(model_type, {})}
    keys |= {key: rng.choice(values) for key, (share, values) in BESIDE.items() if rng.random() < share}
    size = keys.get("head_dim", 16) // (2 if model_type in ("glm", "glm4", "glm4_moe", "persimmon", "phi") else 1)
    if model_type in BY_TYPE and rng.random() < 0.6:
        keys["layer_types"] = rng.choices(["full_attention", "sliding_attention"], k=4)
    older, newer = rng.random(), rng.random()
    if older < 0.4:
        keys["rope_scaling"] = _parameters(rng, size) if older < 0.35 else rng.choice([None, {}])
    if newer < 0.4:
        keys["rope_parameters"] = _parameters(rng, size) if newer < 0.35 else rng.choice([None, {}])
    elif newer < (0.7 if model_type in BY_TYPE else 0.45):
        keys["rope_parameters"] = _by_type(rng, size)
    return keys


def _parameters(rng: random.Random, size: int) -> dict[str, Any]:
    kind = rng.choice(["default", "default", "linear", "dynamic", "llama3", "yarn", "longrope"])
    names = rng.choice([["rope_type"], ["rope_type"], ["type"], ["rope_type", "type"], []])
    found: dict[str, Any] = dict.fromkeys(names, kind)
    if rng.random() < 0.6:
        found["rope_theta"] = rng.choice([500.0, 1e4, 1e6, 20_000])
    if kind != "default" and rng.random() < 0.93:
        found["factor"] = rng.choice([2.0, 4, 8.0])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn", "longrope") and rng.random() < 0.7:
        found["original_max_position_embeddings"] = rng.choice([64, 128])
    if kind == "yarn":
        extra = [{"attention_factor": 1.25}, {"truncate": False}, {"mscale": 0.7, "mscale_all_dim": 0.4}, {}]
        found |= rng.choice(extra)
    if kind == "longrope":
        found |= {f"{name}_factor": [step + 0.1 * i for i in range(size // 2)] for name, step in LENGTHS.items()}
    if rng.random() < 0.15:
        found["partial_rotary_factor"] = rng.choice([0.5, 0.25, 1.0])
    return found


def _by_type(rng: random.Random, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("full_attention", "sliding_attention"):
        if (number := rng.random()) < 0.9:
            found[kind] = _parameters(rng, size) if number < 0.85 else None
    if rng.random() < 0.1:
        found |= {"rope_theta": 700.0, "rope_type": "linear", "factor": 2.0}
    return found


LENGTHS = {"short": 1.0, "long": 2.0}


def ours(model_type: str, keys: Mapping[str, Any]) -> list[Rotation | None]:
    """Of each layer; None: it does not rotate. Raises as `parse_config` does."""
    spec = parse_config({**keys, "model_type": model_type}, "config.json")
    found: list[Rotation | None] = []
    for attention in spec.attentions:
        if attention.rope is None:
            found.append(None)
            continue
        rope, beyond = spec.ropes[attention.rope], None
        if rope.kind in ("longrope", "dynamic"):
            tables = rope_tables(rope, BEYOND, is_long=rope.original_max_position < BEYOND)
            beyond = np.stack([table[-1] for table in tables]) / rope.attention_factor
        found.append(Rotation(inverse_frequencies(rope), rope.attention_factor, beyond))
    return found


def theirs(model_type: str, keys: Mapping[str, Any]) -> list[Rotation]:
    """Of each layer, by the module of transformers. Raises whatever that raises."""
    with _quiet():
        config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy({**keys, "model_type": model_type}))
        thetas = getattr(config, "layer_rope_theta", None) or [None] * config.num_hidden_layers
        return [_of_layer(model_type, config, layer, theta) for layer, theta in enumerate(thetas)]


def _of_layer(model_type: str, config: Any, layer: int, theta: float | None) -> Rotation:
    if theta is not None:  # Granite with windows
        config = copy.deepcopy(config)
        config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    module = _module(model_type)(config=config)
    is_by_type = isinstance(module.rope_type, dict)
    kind = config.layer_types[layer] if is_by_type else None
    prefix, chosen = (f"{kind}_", {"layer_type": kind}) if is_by_type else ("", {})
    rope_type = module.rope_type[kind] if is_by_type else module.rope_type
    frequencies = getattr(module, f"{prefix}inv_freq").numpy()
    factor, beyond = getattr(module, f"{prefix}attention_scaling"), None
    if rope_type in ("longrope", "dynamic"):
        longer, _ = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=BEYOND, **chosen)
        angles = np.float32(BEYOND - 1) * longer.numpy()
        beyond = np.stack([np.cos(angles), np.sin(angles)])
    return Rotation(frequencies, factor, beyond)


@cache
def _module(model_type: str) -> Any:
    """The class of transformers that makes the frequencies of a type's decoder."""
    config = CONFIG_MAPPING[model_type]
    name = config.__module__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(name) is None:  # a type whose modules are Llama's
        return LlamaRotaryEmbedding
    modeling = importlib.import_module(name)
    prefix = config.__name__.removesuffix("Config").removesuffix("Text").lower()
    names = [name for name in vars(modeling) if name.endswith("RotaryEmbedding") and "Vision" not in name]
    return getattr(modeling, next((name for name in names if name.lower().startswith(prefix)), names[0]))


@contextmanager
def _quiet() -> Any:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
