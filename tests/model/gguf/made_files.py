"""Tiny GGUF files of checkpoints that transformers makes, written by the `gguf` package as llama.cpp's converter does.

The names of tensors are the package's. Rows that llama.cpp rotates in pairs and norms that it stores as 1 + w are
changed here, as its converter changes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.families.checkpoint import make_model
from tests.families.row import Row, row

INNER_OF_OSS = 40  # inner numbers of gpt-oss's experts, by which its transposed stacks are known
NUM_GUESSING = 0  # of the last layers, which the file says are for guessing further tokens
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(125))]

FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# one row of each architecture: its name, and a checkpoint in which what its keys say differs from all defaults
MADE: dict[str, Row] = {
    "llama": row("llama", "llama", head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 5e4}),
    "llama3": row(
        "llama3",
        "llama",
        rope_parameters={
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        },
    ),
    "llama-linear": row(
        "llama-linear", "llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "mistral3": row(
        "mistral3",
        "ministral3",
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32},
            **{"beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "qwen2": row("qwen2", "qwen2"),
    "qwen3": row("qwen3", "qwen3", head_dim=12, tie_word_embeddings=True),
    "gemma": row("gemma", "gemma", head_dim=12),
    "gemma2": row(
        "gemma2",
        "gemma2",
        **{"head_dim": 12, "query_pre_attn_scalar": 12, "num_hidden_layers": 4, "sliding_window": 16},
        **{"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": row(
        "gemma3", "gemma3_text", head_dim=12, query_pre_attn_scalar=12, num_hidden_layers=7, sliding_window=16
    ),
    "phi3": row("phi3", "phi3", sliding_window=24),
    "phi3-long": row(
        "phi3-long",
        "phi3",
        **{"hidden_size": 64, "max_position_embeddings": 256, "original_max_position_embeddings": 32},
        rope_parameters={  # 12 of 16 elements of a head rotate, as in Phi-4-mini
            **{"rope_type": "longrope", "rope_theta": 5e4, "partial_rotary_factor": 0.75},
            **{"short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0], "long_factor": [1.5, 2.5, 4.0, 8.0, 16.0, 32.0]},
        },
    ),
    "granite": row(
        "granite",
        "granite",
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    ),
    "smollm3": row("smollm3", "smollm3", num_hidden_layers=5),
    "olmo2": row("olmo2", "olmo2"),
    "olmo3": row(
        "olmo3",
        "olmo3",
        **{"num_hidden_layers": 4, "sliding_window": 16},
        rope_parameters={
            "full_attention": {
                **{"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 32},
                **{"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
    ),
    "command-r": row("command-r", "cohere", logit_scale=0.5),
    "cohere2": row("cohere2", "cohere2", logit_scale=0.5, num_hidden_layers=5, sliding_window=16),
    "starcoder2": row("starcoder2", "starcoder2", sliding_window=None),
    "seed_oss": row("seed_oss", "seed_oss", head_dim=8),
    "mixtral": row("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2moe": row("qwen2moe", "qwen2_moe", shared_expert_intermediate_size=24, **FOUR),
    "qwen3moe": row("qwen3moe", "qwen3_moe", norm_topk_prob=True, **FOUR),
    "olmoe": row("olmoe", "olmoe", num_experts=4, num_experts_per_tok=2),
    "gpt-oss": row(
        "gpt-oss",
        "gpt_oss",
        **{"head_dim": 12, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        intermediate_size=INNER_OF_OSS,
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 32},
            **{"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        },
    ),
    "granitemoe": row(
        "granitemoe",
        "granitemoeshared",
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 4.0},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "glm4moe": row(
        "glm4moe",
        "glm4_moe",
        **{"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1},
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "n_shared_experts": 2},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
ARCHITECTURE = {"mixtral": "llama", "llama3": "llama", "llama-linear": "llama", "olmo3": "olmo2", "phi3-long": "phi3"}
PAIRED = ("llama", "mistral3", "granite", "granitemoe", "smollm3")  # rows of q and k in pairs


def architecture_of(name: str) -> str:
    return ARCHITECTURE.get(name, name)


def write_gguf(name: str, root: Path, packed: str = "F32") -> tuple[Path, Path]:
    """Writes one of `MADE` in both forms: (a folder by transformers, a GGUF file).

    `packed`: the type of the matrices whose rows are whole blocks.
    """
    model = make_model(MADE[name])
    folder = root / "folder"
    model.save_pretrained(folder)
    file = root / f"{name}.gguf"
    _write(file, architecture_of(name), model, gguf.GGMLQuantizationType[packed])
    return folder, file


def _write(file: Path, architecture: str, model: Any, packed: gguf.GGMLQuantizationType) -> None:
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    _write_keys(writer, architecture, config)
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    is_tied = bool(config.tie_word_embeddings)
    tensors = {name: part for stored in model.state_dict().items() for name, part in _split(*stored)}
    for stored, tensor in tensors.items():
        if is_tied and stored == "lm_head.weight":
            continue
        written = stored if stored.startswith("blk.") else names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert written is not None, f"{architecture} has no name for {stored}"
        numbers = _as_written(architecture, written, tensor, config)
        if numbers.ndim > 1 and numbers.shape[-1] % gguf.GGML_QUANT_SIZES[packed][0] == 0:
            writer.add_tensor(written, gguf.quantize(numbers, packed), raw_dtype=packed)
        else:
            writer.add_tensor(written, numbers)
    for index, factors in _factors(architecture, config).items():
        writer.add_tensor(f"{index}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _split(stored: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of transformers as the converter names and cuts it: stacks of experts by gate, up and down."""
    name = stored.rpartition(".experts.")[2]
    layer = f"blk.{stored.split('.')[2]}" if stored.startswith("model.layers.") else ""
    suffix = "bias" if name.endswith("_bias") else "weight"
    if name.startswith("gate_up_proj"):
        is_paired = tensor.shape[-1] == 2 * INNER_OF_OSS
        tensor = tensor.transpose(1, 2) if is_paired and suffix == "weight" else tensor
        size = tensor.shape[1] // 2
        gate, up = (tensor[:, ::2], tensor[:, 1::2]) if is_paired else (tensor[:, :size], tensor[:, size:])
        yield f"{layer}.ffn_gate_exps.{suffix}", gate
        yield f"{layer}.ffn_up_exps.{suffix}", up
    elif name.startswith("down_proj"):
        is_transposed = suffix == "weight" and tensor.shape[1] == INNER_OF_OSS
        yield f"{layer}.ffn_down_exps.{suffix}", tensor.transpose(1, 2) if is_transposed else tensor
    elif "shared_mlp.input_linear" in stored:
        gate, up = tensor.chunk(2)
        yield f"{layer}.ffn_gate_shexp.weight", gate
        yield f"{layer}.ffn_up_shexp.weight", up
    elif stored.endswith("shared_expert_gate.weight"):
        yield f"{layer}.ffn_gate_inp_shexp.weight", tensor[0]
    elif stored.endswith(".sinks"):
        yield f"{layer}.attn_sinks.weight", tensor
    else:
        renamed = {"e_score_correction_bias": "e_score_correction.bias", "moe.router.weight": "moe.router.layer.weight"}
        end = next((end for end in renamed if stored.endswith(end)), "")
        yield (stored.removesuffix(end) + renamed[end] if end else stored), tensor


def _as_written(architecture: str, written: str, tensor: torch.Tensor, config: Any) -> np.ndarray:
    numbers = tensor.numpy().astype(np.float32)
    if architecture in PAIRED and ".attn_q." in written:
        numbers = _in_pairs(numbers, config.num_attention_heads)
    if architecture in PAIRED and ".attn_k." in written:
        numbers = _in_pairs(numbers, config.num_key_value_heads)
    if architecture.startswith("gemma") and written.endswith("norm.weight"):
        numbers = numbers + 1
    return np.ascontiguousarray(numbers)


def _in_pairs(numbers: np.ndarray, num_heads: int) -> np.ndarray:
    rows = numbers.shape[0]
    return numbers.reshape(num_heads, 2, rows // num_heads // 2, -1).swapaxes(1, 2).reshape(numbers.shape)


def _factors(architecture: str, config: Any) -> dict[str, np.ndarray]:
    """Llama 3's factors, from the frequencies that transformers computes; LongRoPE's as they are."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")}
    if architecture != "llama" or rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    count = len(frequencies)
    plain = rope["rope_theta"] ** -(np.arange(count) / count)
    return {"rope_freqs": (plain / frequencies.numpy()).astype(np.float32)}


def _write_yarn(writer: Any, architecture: str, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _write_expert_keys(writer: Any, config: Any, head_dim: int) -> None:
    count = next((found for name in COUNTS if (found := getattr(config, name, None))), None)
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if hasattr(config, name):
            writer.add_expert_shared_feed_forward_length(getattr(config, name))
    if config.model_type == "glm4_moe":
        writer.add_rope_dimension_count(head_dim // 2)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _write_keys(writer: Any, architecture: str, config: Any) -> None:
    rope = config.rope_parameters
    whole = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if NUM_GUESSING:
        writer.add_nextn_predict_layers(NUM_GUESSING)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(whole["rope_theta"])
    if whole.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole["factor"])
    if whole.get("rope_type") == "yarn":
        _write_yarn(writer, architecture, whole)
    if whole.get("rope_type") == "longrope":
        original = config.original_max_position_embeddings
        writer.add_rope_dimension_count(int(head_dim * whole["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    if config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    for name in ("layer_norm_eps", "norm_epsilon"):
        if architecture in ("command-r", "cohere2", "starcoder2") and hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None) and architecture in ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    _write_expert_keys(writer, config, head_dim)
    write_tokenizer(writer)


def write_tokenizer(writer: Any) -> None:
    """A vocabulary of bytes."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([2, 3, 3, *([6] * 125)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
