"""Tiny GGUF files of models with recurrent layers, made of what transformers saves as llama.cpp's converter does.

Names are the `gguf` package's. What the converter changes of numbers is done here: decays instead of logarithms, norms
as 1 + w, heads of values side by side, rows in pairs, axes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.families.checkpoint import make_model
from tests.families.row import Row, layer_types, row
from tests.families.zoo import quiet
from tests.model.gguf.made_files import _in_pairs, write_tokenizer

Numbers = np.ndarray
GDN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": layer_types("lflf"),
}
SPARSE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "shared_expert_intermediate_size": 24,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
MULTIPLIED = {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.3}
NEMOTRON: dict[str, Any] = {
    **{"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8},
    "chunk_size": 16,
}
LFM2: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": layer_types("vfvf")}
# one row of each architecture: its name, and a checkpoint
MADE: dict[str, Row] = {
    "lfm2": row("lfm2", "lfm2", block_auto_adjust_ff_dim=False, **LFM2),
    "lfm2-bias": row("lfm2-bias", "lfm2", block_multiple_of=16, conv_bias=True, conv_L_cache=4, **LFM2),
    "lfm2moe": row(
        "lfm2moe",
        "lfm2_moe",
        **{"num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **LFM2,
    ),
    "granitehybrid": row(
        "granitehybrid",
        "granitemoehybrid",
        **{"num_hidden_layers": 4, "layer_types": layer_types("lflf"), "mamba_n_groups": 2, "logits_scaling": 4.0},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
        **{**MAMBA2, **MULTIPLIED},
    ),
    "granitehybrid-dense": row(
        "granitehybrid-dense",
        "granitemoehybrid",
        **{"num_hidden_layers": 3, "layer_types": layer_types("lfl"), "mamba_n_groups": 1, "logits_scaling": 2.0},
        **{"num_local_experts": 0, "shared_intermediate_size": 24, "intermediate_size": 24, "mamba_conv_bias": False},
        **{**MAMBA2, **MULTIPLIED},
    ),
    "nemotron_h": row(
        "nemotron_h", "nemotron_h", layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"], **NEMOTRON
    ),
    "nemotron_h_moe": row(
        "nemotron_h_moe",
        "nemotron_h",
        layers_block_type=["linear_attention", "moe", "full_attention"],
        **{"n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24},
        **{"num_experts_per_tok": 2, "routed_scaling_factor": 1.5},
        **NEMOTRON,
    ),
    "qwen3next": row("qwen3next", "qwen3_next", **GDN, **SPARSE),
    "qwen35": row("qwen35", "qwen3_5_text", **GDN),
    "qwen35moe": row("qwen35moe", "qwen3_5_moe_text", **GDN, **SPARSE),
}
ENDINGS = {
    ".dt_bias": ".dt_proj.bias",
    ".expert_bias": ".expert_bias.bias",
    ".e_score_correction_bias": ".e_score_correction.bias",
}
PARTS = {
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    **{f"{part}_proj": part for part in ("gate", "up", "down")},
    "output_linear": "down",
}


def architecture_of(name: str) -> str:
    return name.partition("-")[0]


def write_gguf(name: str, root: Path, packed: str = "F32") -> tuple[Path, Path]:
    """Writes one of `MADE` in both forms: (a folder by transformers, a GGUF file).

    `packed`: the type of the matrices whose rows are whole blocks.
    """
    return write_both(name, MADE[name], root, packed, _converted, _write_keys)


def write_both(
    name: str,
    made: Row,
    root: Path,
    packed: str,
    converted: Callable[[str, dict[str, Numbers], Any], Iterable[tuple[str, Numbers]]],
    write_keys: Callable[[Any, str, Any], None],
    architecture: str | None = None,
) -> tuple[Path, Path]:
    """The folder of a row, and the GGUF file of what `converted` makes of the folder's tensors.

    `architecture`: None = that of `architecture_of`.
    """
    with quiet():
        model = make_model(made)
        folder, file = root / "folder", root / f"{name}.gguf"
        model.save_pretrained(folder)
    config, architecture = model.config, architecture or architecture_of(name)
    kind = gguf.GGMLQuantizationType[packed]
    writer = gguf.GGUFWriter(file, architecture)
    write_keys(writer, architecture, config)
    write_tokenizer(writer)
    tensors = {name: numbers for part in folder.glob("*.safetensors") for name, numbers in load_file(part).items()}
    for written, numbers in converted(architecture, tensors, config):
        numbers = np.ascontiguousarray(numbers, np.float32)
        is_packed = numbers.ndim > 1 and numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        if is_packed and "conv" not in written and "norm" not in written:
            writer.add_tensor(written, gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(written, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, file


def _converted(architecture: str, tensors: dict[str, Numbers], config: Any) -> Iterator[tuple[str, Numbers]]:
    names = names_of(architecture, config)
    experts: dict[str, dict[int, Numbers]] = defaultdict(dict)  # name of a stack -> expert -> its part
    for stored, numbers in tensors.items():
        if match := re.fullmatch(r".*\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight", stored):
            experts[f"blk.{match[1]}.ffn_{PARTS[match[3]]}_exps.weight"][int(match[2])] = numbers
        elif re.search(r"experts\.\w+$|_(linear|mlp)\.\w+_linear\.weight$|moe\.(in|out)put_linear\.weight$", stored):
            yield from _stacks(stored, numbers, has_experts=bool(getattr(config, "num_local_experts", 1)))
        else:
            yield from _single(architecture, stored, numbers, config, names)
    for written, parts in experts.items():
        yield written, np.stack([parts[expert] for expert in range(len(parts))])


def names_of(architecture: str, config: Any) -> Any:
    """The package's names of tensors."""
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    return gguf.get_tensor_name_map(arch, config.num_hidden_layers)


def _stacks(stored: str, numbers: Numbers, *, has_experts: bool) -> Iterator[tuple[str, Numbers]]:
    """Experts in one tensor, gate and up behind one another; and what they share, or all there is."""
    layer = re.search(r"layers\.(\d+)\.", stored)
    assert layer is not None
    end = "_exps" if "shared" not in stored else "_shexp" if has_experts else ""
    stem = stored.removesuffix(".weight").rpartition(".")[2]
    if stem in PARTS:
        yield f"blk.{layer[1]}.ffn_{PARTS[stem]}{end}.weight", numbers
        return
    gate, up = np.split(numbers, 2, axis=-2)
    yield f"blk.{layer[1]}.ffn_gate{end}.weight", gate
    yield f"blk.{layer[1]}.ffn_up{end}.weight", up


def _single(architecture: str, stored: str, numbers: Numbers, config: Any, names: Any) -> Iterator[tuple[str, Numbers]]:
    if stored.endswith("linear_attn.in_proj_qkvz.weight"):
        layer = stored.split(".")[2]
        mixed, gate = _by_parts(numbers, config)
        yield f"blk.{layer}.attn_qkv.weight", mixed
        yield f"blk.{layer}.attn_gate.weight", gate
        return
    if architecture.startswith("qwen"):
        numbers = _as_qwen(architecture, stored, numbers, config)
    elif "conv" in stored and stored.endswith("conv.weight") or stored.endswith("conv1d.weight"):
        numbers = numbers[:, 0]
    if stored.endswith("A_log"):
        numbers = -np.exp(numbers)
    if architecture.startswith(("granite", "nemotron")):
        numbers = _as_mamba2(stored, numbers, config)
    end = next((end for end in ENDINGS if stored.endswith(end)), "")
    stored = stored.removesuffix(end) + ENDINGS[end] if end else stored
    written = names.get_name(stored, try_suffixes=(".weight", ".bias"))
    assert written is not None, f"{architecture} has no name for {stored}"
    yield written, numbers


def _as_mamba2(stored: str, numbers: Numbers, config: Any) -> Numbers:
    if stored.endswith(("A_log", ".D")):
        return numbers.reshape(-1, 1)
    if stored.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.n_groups if hasattr(config, "n_groups") else config.mamba_n_groups
        return numbers.reshape(groups, -1)
    for name, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if stored.endswith(f"{name}.weight"):
            return _in_pairs(numbers, heads)
    return numbers


def _as_qwen(architecture: str, stored: str, numbers: Numbers, config: Any) -> Numbers:
    if stored.endswith("conv1d.weight"):
        numbers = numbers[:, 0]
    elif stored.endswith("norm.weight") and "linear_attn" not in stored:
        return numbers + 1
    if architecture == "qwen3next" or "linear_attn" not in stored:
        return numbers
    size, before = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if "in_proj_qkv" in stored or "conv1d" in stored:
        return np.concatenate([numbers[:before], _tiled(numbers[before:], size, config)])
    if "in_proj_z" in stored:
        return _tiled(numbers, size, config)
    if "out_proj" in stored:
        return _tiled(numbers.T, size, config).T
    return numbers if "norm" in stored else _tiled(numbers, 1, config)


def _tiled(numbers: Numbers, size: int, config: Any) -> Numbers:
    """Heads of `size` rows: from those of one head of keys together, to the first of each, then the second."""
    keys = config.linear_num_key_heads
    heads = numbers.reshape(keys, config.linear_num_value_heads // keys, size, -1)
    return heads.swapaxes(0, 1).reshape(numbers.shape)


def _by_parts(numbers: Numbers, config: Any) -> tuple[Numbers, Numbers]:
    """Queries, keys, values and gates of each head of keys, as [q; k; v] of all, and gates."""
    keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    inner = config.linear_num_value_heads // keys * config.linear_value_head_dim
    heads = numbers.reshape(keys, 2 * (dim + inner), -1)
    q, k, v, z = np.split(heads, np.cumsum([dim, dim, inner]), axis=1)
    columns = numbers.shape[1]
    return np.concatenate([part.reshape(-1, columns) for part in (q, k, v)]), z.reshape(-1, columns)


def _write_keys(writer: Any, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = getattr(config, "rope_parameters", None)
    if rope is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    eps = next(
        getattr(config, name) for name in ("norm_eps", "layer_norm_epsilon", "rms_norm_eps") if name in dir(config)
    )
    (writer.add_layer_norm_eps if architecture.startswith("nemotron") else writer.add_layer_norm_rms_eps)(eps)
    if architecture.startswith("lfm2"):
        _write_lfm2(writer, architecture, config)
    elif architecture.startswith("qwen"):
        _write_qwen(writer, config, head_dim, rope)
    elif architecture.startswith("nemotron"):
        _write_nemotron(writer, architecture, config)
    else:
        _write_granite(writer, config)


def _kv_heads(writer: Any, config: Any, kinds: list[str]) -> None:
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])


def _write_lfm2(writer: Any, architecture: str, config: Any) -> None:
    _kv_heads(writer, config, config.layer_types)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    inner = config.intermediate_size
    if architecture == "lfm2" and config.block_auto_adjust_ff_dim:
        multiple = config.block_multiple_of
        inner = -(-int(config.block_ffn_dim_multiplier * int(2 * inner / 3)) // multiple) * multiple
    writer.add_feed_forward_length(inner)
    if architecture == "lfm2moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _write_granite(writer: Any, config: Any) -> None:
    _kv_heads(writer, config, config.layer_types)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_rope_scaling_finetuned(False)


def _write_nemotron(writer: Any, architecture: str, config: Any) -> None:
    kinds = config.layers_block_type
    _kv_heads(writer, config, kinds)
    feed, inner = "mlp", config.intermediate_size
    if architecture == "nemotron_h_moe":
        feed, inner = "moe", config.moe_intermediate_size
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(inner)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
    writer.add_feed_forward_length([inner * (kind == feed) for kind in kinds])
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_rope_scaling_finetuned(False)


def _write_qwen(writer: Any, config: Any, head_dim: int, rope: dict[str, Any]) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 0) or 0)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    rotated = int(head_dim * rope.get("partial_rotary_factor", 0.25))
    writer.add_rope_dimension_sections([rotated // 2, 0, 0, 0])
    writer.add_rope_dimension_count(rotated)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
