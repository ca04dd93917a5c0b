"""Tiny GGUF files of decoders without experts or latents, and of Dots and Ernie: see `made_recurrent.py`.

As llama.cpp's converter does, fused rows of each head are put in the order [queries; keys; values], GPT-2's matrices
transposed, the rows of heads that rotate in pairs put in pairs, and norms stored as 1 + w.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.families.row import Row, layer_types, row
from tests.model.gguf.made_files import _factors, _in_pairs
from tests.model.gguf.made_recurrent import PARTS, Numbers, names_of, write_both

GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "num_key_value_heads": 4,
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.25, 1.5, 2.0]},
    "long_factor": [1.5, 2.5, 4.0, 8.0],
}
MULTIPLIED = {"embedding_multiplier": 12.0, "residual_multiplier": 0.35, "logits_scaling": 1.5}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4}


def partial(share: float, theta: float = 1e4) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}


# one row of each architecture: its name, and a checkpoint
MADE: dict[str, Row] = {
    "gpt2": row("gpt2", "gpt2", **GPT, n_inner=40),
    "starcoder": row("starcoder", "gpt_bigcode", **GPT),
    "gptneox": row("gptneox", "gpt_neox", num_attention_heads=2, rope_parameters=partial(0.25)),
    "gptneox-serial": row("gptneox-serial", "gpt_neox", use_parallel_residual=False, rope_parameters=partial(1.0)),
    "bloom": row("bloom", "bloom", hidden_size=32, n_layer=3, n_head=4),
    "falcon": row("falcon", "falcon", num_kv_heads=1),
    "falcon-40b": row("falcon-40b", "falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": row("falcon-11b", "falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "mpt": row("mpt", "mpt", gain=3, d_model=48, n_heads=6, n_layers=3, max_seq_len=256),
    "phi2": row("phi2", "phi", num_key_value_heads=4, rope_parameters=partial(0.5)),
    "phi2-fused": row("phi2-fused", "phi", num_key_value_heads=4, rope_parameters=partial(0.5)),
    "stablelm": row("stablelm", "stablelm", hidden_size=64, rope_parameters=partial(0.25)),
    "stablelm-12b": row(
        "stablelm-12b",
        "stablelm",
        **{"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
        rope_parameters=partial(0.5),
    ),
    "nemotron": row("nemotron", "nemotron", head_dim=8, rope_parameters=partial(0.5)),
    "glm4": row("glm4", "glm4", head_dim=8, rope_parameters=partial(0.5)),
    "glm4-sections": row("glm4-sections", "glm4", head_dim=8, rope_parameters=partial(0.5)),
    "chatglm": row("chatglm", "glm", head_dim=8, rope_parameters=partial(0.5)),
    "chatglm-fused": row("chatglm-fused", "glm", head_dim=8, rope_parameters=partial(0.5)),
    "exaone": row("exaone", "exaone", head_dim=8, rope_parameters=LLAMA3),
    "exaone4": row("exaone4", "exaone4", num_hidden_layers=4, sliding_window=16, layer_types=layer_types("sssf")),
    "exaone4-full": row(
        "exaone4-full", "exaone4", sliding_window=None, layer_types=layer_types("fff"), rope_parameters=LLAMA3
    ),
    "ernie4_5": row("ernie4_5", "ernie4_5", head_dim=12, tie_word_embeddings=True),
    "ernie4_5-bias": row("ernie4_5-bias", "ernie4_5", head_dim=8, use_bias=True),
    "ernie4_5-moe": row(
        "ernie4_5-moe",
        "ernie4_5_moe",
        seed=2,
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
        **{"moe_num_shared_experts": 2, "moe_layer_end_index": -1, "intermediate_size": 64},
    ),
    "dots1": row(
        "dots1",
        "dots1",
        **{"num_key_value_heads": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True},
        **{"n_group": 1, "routed_scaling_factor": 1.5, **EXPERTS},
    ),
    "hunyuan-dense": row("hunyuan-dense", "hunyuan_v1_dense", head_dim=8),
    "minicpm": row("minicpm", "granite", attention_multiplier=8**-0.5, **MULTIPLIED),
    "minicpm-long": row(
        "minicpm-long",
        "granite",
        attention_multiplier=8**-0.5,
        **{"max_position_embeddings": 256, **MULTIPLIED},
        rope_parameters={**LONG, "original_max_position_embeddings": 256},
    ),
    "minicpm3-long": row(
        "minicpm3-long",
        "minicpm3",
        **{"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, **LATENT},
        max_position_embeddings=256,
        rope_parameters={
            **{**LONG, "short_factor": [1.0, 1.25], "long_factor": [1.5, 2.5]},
            "original_max_position_embeddings": 64,
        },
    ),
    "minicpm3": row("minicpm3", "minicpm3", scale_emb=12, dim_model_base=256, scale_depth=1.4, **LATENT),
    "internlm2": row("internlm2", "llama"),
    "baichuan": row("baichuan", "llama", num_key_value_heads=4),
    "arcee": row("arcee", "arcee"),
    "olmo": row("olmo", "olmo"),
    "qwen2vl": row("qwen2vl", "qwen2"),
    "qwen3vl": row("qwen3vl", "qwen3", head_dim=12),
    "qwen3vlmoe": row(
        "qwen3vlmoe",
        "qwen3_moe",
        **{"norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
PAIRED = ("internlm2", "baichuan", "arcee", "olmo", "minicpm")
FUSED = re.compile(r"(query_key_value|c_attn|Wqkv)\.(weight|bias)$")
STACKED = re.compile(r"layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight$")


def architecture_of(name: str) -> str:
    """The part of a row's name that is an architecture's."""
    return name if name in gguf.MODEL_ARCH_NAMES.values() else name.rpartition("-")[0]


def write_gguf(name: str, root: Path, packed: str = "F32") -> tuple[Path, Path]:
    """As `made_recurrent.write_gguf`, of a row of `MADE` here."""

    def converted(architecture: str, tensors: dict[str, Numbers], config: Any) -> Iterator[tuple[str, Numbers]]:
        return _converted(name, architecture, tensors, config)

    def write_keys(writer: Any, architecture: str, config: Any) -> None:
        _write_keys(writer, architecture, config)
        if name == "glm4-sections":
            writer.add_rope_dimension_sections([1, 1, 0, 0])

    return write_both(name, MADE[name], root, packed, converted, write_keys, architecture_of(name))


def _converted(name: str, architecture: str, tensors: dict[str, Numbers], config: Any) -> Iterator[tuple[str, Numbers]]:
    names = names_of(architecture, config)
    experts: dict[str, dict[int, Numbers]] = defaultdict(dict)  # name of a stack -> number of a part -> the part
    apart: dict[str, Numbers] = {}
    for stored, numbers in tensors.items():
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if match := re.fullmatch(r".*layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight", stored):
            experts[f"blk.{match[1]}.ffn_{PARTS[match[3]]}_exps.weight"][int(match[2])] = numbers
        elif match := STACKED.search(stored):
            experts[f"blk.{match[1]}.attn_{match[2]}_norm.weight"][int(match[3])] = numbers
        else:
            written, numbers = _single(name, architecture, stored, numbers, config, names)
            apart[written] = numbers
    if name.endswith("-fused"):
        _fuse(apart)
    yield from apart.items()
    for kind, factors in _factors("llama", config).items():
        yield f"{kind}.weight", factors
    for written, parts in experts.items():
        yield written, np.stack([parts[number] for number in range(len(parts))])


def _single(
    name: str, architecture: str, stored: str, numbers: Numbers, config: Any, names: Any
) -> tuple[str, Numbers]:
    heads, kv_heads = _heads(config)
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", stored):
        numbers = numbers.T
    if FUSED.search(stored) and architecture in ("gptneox", "bloom", "falcon"):
        grouped = numbers.reshape(kv_heads, heads // kv_heads + 2, -1, *numbers.shape[1:])
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        numbers = np.concatenate([part.reshape(-1, *numbers.shape[1:]) for part in parts])
    if match := re.search(r"self_attn\.([qk])_proj\.(weight|bias)$", stored):
        count = heads if match[1] == "q" else kv_heads
        if architecture in PAIRED:
            numbers = _in_pairs(numbers, count)
        if name == "glm4-sections":
            numbers = _in_halves(numbers, count, 4)
    if architecture == "nemotron" and stored.endswith("norm.weight"):
        numbers = numbers + 1
    stored = stored.removeprefix("transformer.") if architecture == "bloom" else stored
    stored = stored.replace("e_score_correction_bias", "e_score_correction.bias")
    written: str | None = names.get_name(stored, try_suffixes=(".weight", ".bias"))
    assert written is not None, f"{architecture} has no name for {stored}"
    return written, numbers


def _in_halves(numbers: Numbers, num_heads: int, rotated: int) -> Numbers:
    """The first `rotated` rows of each head, which rotate in pairs: the even ones, then the odd ones."""
    heads = numbers.reshape(num_heads, -1, *numbers.shape[1:])
    parts = [heads[:, 0:rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]]
    return np.concatenate(parts, axis=1).reshape(numbers.shape)


def _fuse(tensors: dict[str, Numbers]) -> None:
    """Queries, keys and values of each layer in one tensor, as older files have them."""
    for stored in [stored for stored in tensors if ".attn_q." in stored]:
        parts = [tensors.pop(stored.replace("attn_q", f"attn_{letter}")) for letter in "qkv"]
        tensors[stored.replace("attn_q", "attn_qkv")] = np.concatenate(parts)


def _heads(config: Any) -> tuple[int, int]:
    heads = config.num_attention_heads
    if config.model_type == "falcon":
        return heads, config.num_kv_heads if config.new_decoder_architecture else 1
    if config.model_type == "gpt_bigcode":
        return heads, 1
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _write_keys(writer: Any, architecture: str, config: Any) -> None:
    heads, kv_heads = _heads(config)
    inner = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = config.ffn_hidden_size if architecture == "falcon" else inner
    names = ("max_position_embeddings", "max_seq_len")
    writer.add_context_length(next((getattr(config, name) for name in names if hasattr(config, name)), 2048))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if architecture == "minicpm3":
        _write_latents(writer, config)
    elif head_dim is not None and not architecture.startswith(("gpt", "bloom", "falcon", "mpt", "star")):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = getattr(config, "rope_parameters", None)
    if rope and architecture != "minicpm3":
        dim = head_dim or config.hidden_size // heads
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    if rope and rope["rope_type"] == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "olmo":
        writer.add_layer_norm_eps(1e-5)
    if architecture == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if architecture in ("qwen2vl", "qwen3vl", "qwen3vlmoe"):
        writer.add_rope_dimension_sections([1, 1, 2, 0])
    if architecture.startswith("qwen3vl"):
        writer.add_num_deepstack_layers(0)
    if architecture == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
    if architecture == "exaone4" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "minicpm":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    _write_experts(writer, architecture, config)


def _write_latents(writer: Any, config: Any) -> None:
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def _write_experts(writer: Any, architecture: str, config: Any) -> None:
    if architecture == "qwen3vlmoe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "ernie4_5-moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
    if architecture == "dots1":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
