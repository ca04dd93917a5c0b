"""Architectures of GGUF files with LayerNorm: GPT-2 and its descendants, Falcon, BLOOM, MPT, Phi-2, StableLM, Nemotron.

Most hold queries, keys and values in one tensor, the rows of each behind those of the one before, whatever the order in
their checkpoints is; and no matrix is transposed. So these have canonical names here (`families/names.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from .architecture import SHARED_NAMES, SPLIT_QKV, Architecture
from .dense_architectures import has_qkv_bias, some_of_each_head
from .keys import Config, Keys

EPSILON, EPS = "layer_norm_epsilon", "layer_norm_eps"
GPT_NAMES = SHARED_NAMES | {"attn_qkv": SPLIT_QKV}
GPT2_NAMES = GPT_NAMES | {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "transformer.h.{}.ln_1",
    "ffn_norm": "transformer.h.{}.ln_2",
}
_NEOX, _BLOOM, _MPT = "gpt_neox.layers.{}", "transformer.h.{}", "transformer.blocks.{}"
NEOX_NAMES = GPT_NAMES | {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "attn_norm": f"{_NEOX}.input_layernorm",
    "attn_output": f"{_NEOX}.attention.dense",
    "ffn_norm": f"{_NEOX}.post_attention_layernorm",
    "ffn_up": f"{_NEOX}.mlp.dense_h_to_4h",
    "ffn_down": f"{_NEOX}.mlp.dense_4h_to_h",
}
BLOOM_NAMES = GPT_NAMES | {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "attn_norm": f"{_BLOOM}.input_layernorm",
    "attn_output": f"{_BLOOM}.self_attention.dense",
    "ffn_norm": f"{_BLOOM}.post_attention_layernorm",
    "ffn_up": f"{_BLOOM}.mlp.dense_h_to_4h",
    "ffn_down": f"{_BLOOM}.mlp.dense_4h_to_h",
}
FALCON_NAMES = {name: other for name, other in BLOOM_NAMES.items() if name not in ("token_embd_norm", "ffn_norm")}
MPT_NAMES = GPT_NAMES | {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "attn_norm": f"{_MPT}.norm_1",
    "attn_output": f"{_MPT}.attn.out_proj",
    "ffn_norm": f"{_MPT}.norm_2",
    "ffn_up": f"{_MPT}.ffn.up_proj",
    "ffn_down": f"{_MPT}.ffn.down_proj",
}
PHI_NAMES = GPT_NAMES | {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _gpt2(keys: Keys) -> Config:
    return {"n_inner": keys.need("feed_forward_length")}


def _starcoder(keys: Keys) -> Config:
    return {**_gpt2(keys), "multi_query": keys.most("attention.head_count_kv") == 1}


def _gptneox(keys: Keys) -> Config:
    return {
        "head_dim": None,
        "attention_bias": has_qkv_bias(keys),
        "rope_parameters": some_of_each_head(keys),
        "use_parallel_residual": bool(keys.get("use_parallel_residual", True)),
    }


def _mpt(keys: Keys) -> Config:
    """What transformers knows of MPT."""
    bias, heads = keys.get("attention.max_alibi_bias", 0.0), keys.need("attention.head_count")
    if bias != 8.0 or (keys.most("attention.head_count_kv") or heads) != heads:
        raise ValueError(f"mpt.attention.max_alibi_bias = {bias:g}: only 8 is read, with keys for each head")
    return {"attn_config": {"clip_qkv": keys.get("attention.clamp_kqv") or None}}


def _falcon(keys: Keys) -> Config:
    """The 40B model has groups of heads, and a norm of its own before attention."""
    kv_heads = keys.most("attention.head_count_kv") or keys.need("attention.head_count")
    return {
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in keys.tensors else 1,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": keys.need("feed_forward_length"),
    }


def _falcon_norms(keys: Keys) -> Mapping[str, str]:
    if "blk.0.attn_norm_2.weight" not in keys.tensors:
        return {}
    return {"attn_norm": f"{_BLOOM}.ln_mlp", "attn_norm_2": f"{_BLOOM}.ln_attn"}


def _phi2(keys: Keys) -> Config:
    return {"rope_parameters": some_of_each_head(keys)}


def _stablelm(keys: Keys) -> Config:
    return {
        "rope_parameters": some_of_each_head(keys),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in keys.tensors,
        "use_qkv_bias": has_qkv_bias(keys),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in keys.tensors,
    }


def _nemotron(keys: Keys) -> Config:
    return {"rope_parameters": some_of_each_head(keys), "mlp_bias": "blk.0.ffn_up.bias" in keys.tensors}


ARCHITECTURES = {
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", _gpt2, GPT2_NAMES, norm=EPSILON, is_layer_norm=True),
    "starcoder": Architecture(
        "gpt_bigcode", "GPTBigCodeForCausalLM", _starcoder, GPT2_NAMES, norm=EPSILON, is_layer_norm=True
    ),
    "gptneox": Architecture("gpt_neox", "GPTNeoXForCausalLM", _gptneox, NEOX_NAMES, norm=EPS, is_layer_norm=True),
    "bloom": Architecture("bloom", "BloomForCausalLM", names=BLOOM_NAMES, norm=EPSILON, is_layer_norm=True),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        _falcon,
        FALCON_NAMES,
        norm=EPSILON,
        is_layer_norm=True,
        more_names=_falcon_norms,
    ),
    "mpt": Architecture("mpt", "MptForCausalLM", _mpt, MPT_NAMES, norm=EPSILON, is_layer_norm=True),
    "phi2": Architecture("phi", "PhiForCausalLM", _phi2, PHI_NAMES, norm=EPS, is_layer_norm=True),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", _stablelm, norm=EPS, is_layer_norm=True),
    "nemotron": Architecture(
        "nemotron", "NemotronForCausalLM", _nemotron, norm="norm_eps", is_layer_norm=True, adds_one=True
    ),
}
