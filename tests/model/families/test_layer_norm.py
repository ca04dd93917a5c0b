"""Families with LayerNorm: what the zoo's rows cannot show, as keys that are refused and forms of older files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from millrace.model.backend_gaps import missing
from millrace.model.checkpoint.canonical import TensorSources
from millrace.model.checkpoint.tensor_shapes import open_source
from millrace.model.errors import CheckpointError
from millrace.model.families.names import tensors_of
from millrace.model.families.registry import family_of, parse_config
from millrace.model.spec import DecoderSpec

GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
MPT: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 96}
KEYS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96},
    "codegen": {**GPT, "rotary_dim": 4},
    "falcon": SIZES,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 96,
        "attention_types": [[["global", "local"], 2]],
    },
    "gpt_neox": {**SIZES, "intermediate_size": 48},
    "gptj": {**GPT, "rotary_dim": 4},
    "mpt": MPT,
    "opt": {**SIZES, "ffn_dim": 48},
}


def parse(model_type: str, **keys: Any) -> DecoderSpec:
    return parse_config({"model_type": model_type, **KEYS[model_type], **keys}, "config.json")


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm: True"),
        ("codegen", {"n_embd": 30, "n_head": 5}, "n_embd: must be a multiple of 4, not 30"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn: must be true"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn: must be 1"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function: 'tanh' is not supported"),
        ("gpt_neo", {"attention_types": [[["global"], 3]]}, "attention_types: must give 'global' or 'local' for 4"),
        ("gpt_neo", {"attention_types": [[["near"], 4]]}, "attention_types: must give 'global' or 'local' for 4"),
        ("gpt_neo", {"attention_types": [4]}, "attention_types: must be a list"),
        ("gptj", {"rotary_dim": None}, "rotary_dim: must be a whole number|rotary_dim: is missing"),
        ("gptj", {"rotary_dim": 16}, "rotary_dim: must be even and at most 8"),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "attn_config: clip_qkv: 6 is not supported"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi: False is not supported; supported: True"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max: 16 is not supported; supported: 8"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type: 'rmsnorm' is not supported"),
        ("mpt", {"no_bias": False}, "no_bias: False is not supported"),
    ],
)
def test_what_is_not_built_is_refused_by_name(model_type: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(model_type, **keys)


def test_what_a_family_implies_holds_where_the_file_says_nothing() -> None:
    assert parse("gpt2").intermediate_size == 128 and parse("gpt2").head.is_tied
    assert (parse("gpt_bigcode").num_kv_heads, parse("gpt_bigcode", multi_query=False).num_kv_heads) == (1, 4)
    assert parse("gpt_neo").windows == (None, 256, None, 256)
    assert (parse("falcon").num_kv_heads, parse("falcon", new_decoder_architecture=True).num_kv_heads) == (1, 4)
    assert parse("falcon", num_kv_heads=2).num_kv_heads == 1  # the key is of the newer architecture
    assert (parse("bloom").max_position_embeddings, parse("mpt", max_seq_len=99).max_position_embeddings) == (2048, 99)
    assert parse("gptj").head.has_bias and parse("gptj").ropes[0].dim == 4


@pytest.mark.parametrize(
    ("keys", "lacks"),
    [
        ({"do_layer_norm_before": False}, ["norms after the residual is added"]),
        ({"word_embed_proj_dim": 16}, ["an embedding of 16 numbers beside layers of 32"]),
        ({"word_embed_proj_dim": 32}, []),
    ],
)
def test_the_350m_opt_is_left_to_transformers(keys: dict[str, Any], lacks: list[str]) -> None:
    assert missing(parse("opt", **keys), "torch") == lacks


def test_the_rotary_keys_of_gpt_neox_replace_the_usual_ones() -> None:
    rope = parse("gpt_neox", rotary_pct=0.5, rotary_emb_base=500, rope_theta=9.0, partial_rotary_factor=1.0).ropes[0]
    assert (rope.dim, rope.theta) == (4, 500.0)
    rope = parse("gpt_neox", rope_parameters={"rope_type": "default", "rope_theta": 700.0}).ropes[0]
    assert (rope.dim, rope.theta) == (2, 700.0)


def test_older_names_of_the_hidden_size_are_read() -> None:
    bloom = {key: value for key, value in KEYS["bloom"].items() if key != "hidden_size"}
    assert parse_config({"model_type": "bloom", **bloom, "n_embed": 32}, "").hidden_size == 32


def save(root: Path, model_type: str, **others: Any) -> DecoderSpec:
    """A checkpoint with the tensors that a model of this type has, each of its own number, and `others`."""
    spec, family = parse(model_type), family_of(model_type)
    shapes = TensorSources(tensors_of(spec), family.names(spec)).stored_shapes()
    stored = {name: torch.full(shape, float(index)) for index, (name, shape) in enumerate(shapes.items())}
    renamed = others.pop("renamed", lambda name: name)
    (root / "config.json").write_text(json.dumps({"model_type": model_type, **KEYS[model_type]}))
    save_file({**{renamed(name): tensor for name, tensor in stored.items()}, **others}, root / "model.safetensors")
    return spec


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "falcon", "opt"])
def test_a_checkpoint_without_prefix_is_read(model_type: str, tmp_path: Path) -> None:
    prefix = f"{family_of(model_type).prefix}."
    spec = save(tmp_path, model_type, renamed=lambda name: name.removeprefix(prefix))
    source, _ = open_source(tmp_path, spec, "auto")
    assert (source.array("model.embed_tokens.weight") == 0).all() and source.warnings == []


@pytest.mark.parametrize(
    ("model_type", "buffer"),
    [
        ("gpt2", "h.0.attn.bias"),
        ("gpt2", "transformer.h.1.attn.masked_bias"),
        ("gpt_neo", "transformer.h.0.attn.attention.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("gptj", "transformer.h.0.attn.bias"),
        ("bloom", "transformer.h.2.self_attention.rotary_emb.inv_freq"),
    ],
)
def test_the_buffers_of_older_files_are_no_weights(model_type: str, buffer: str, tmp_path: Path) -> None:
    source, _ = open_source(tmp_path, save(tmp_path, model_type, **{buffer: torch.ones(1, 1, 4, 4)}), "auto")
    assert source.warnings == []


def test_the_older_name_of_the_output_layer_of_gpt_neox_is_read(tmp_path: Path) -> None:
    spec = save(tmp_path, "gpt_neox", renamed=lambda name: name.replace("lm_head", "embed_out"))
    source, spec = open_source(tmp_path, spec, "auto")
    assert spec.head.exists and not spec.head.is_tied and (source.array("lm_head.weight") > 0).all()
