"""Makes a Hugging Face folder of a GGUF file: weights, config.json, tokenizer, chat template. Llama and Gemma 3.

In float32 the weights are those that the packed numbers stand for, exactly. transformers converts the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

Dtype = Literal["float32", "bfloat16"]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_LLAMA_NAMES = _NAMES | {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NAMES = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def write_folder(file: Path, root: Path, dtype: Dtype) -> None:
    """Writes the model in `file` into the existing folder `root`."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    values = {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.t")
    }
    kind = values["general.architecture"]
    values = {name.removeprefix(f"{kind}."): value for name, value in values.items()}
    tensors = _tensors(reader, kind, values)
    config = _shared(values) | {"llama": _llama, "gemma3": _gemma3}[kind](values)
    config["vocab_size"] = len(tensors["model.embed_tokens.weight"])
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["dtype"] = dtype
    typed = {name: torch.from_numpy(array).to(getattr(torch, dtype)) for name, array in tensors.items()}
    save_file(typed, root / "model.safetensors", {"format": "pt"})
    (root / "config.json").write_text(json.dumps(config, indent=1))
    (root / "generation_config.json").write_text(json.dumps(_token_ids(values)))
    _write_tokenizer(file, root, values)


def _tensors(reader: Any, kind: str, values: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf import dequantize

    names, tensors = {"llama": _LLAMA_NAMES, "gemma3": _GEMMA_NAMES}[kind], {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *layer, name, _ = tensor.name.split(".")
        if kind == "llama" and name in ("attn_q", "attn_k"):
            heads = values["attention.head_count" if name == "attn_q" else "attention.head_count_kv"]
            weight = _in_halves(weight, heads)
        if kind == "gemma3" and name.endswith("norm"):
            weight = weight - 1  # the file has 1 + w
        place = f"model.layers.{layer[1]}." if layer else ""
        tensors[f"{place}{names[name]}.weight"] = np.ascontiguousarray(weight)
    return tensors


def _in_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of each head with the rotated pairs in two halves, as in Hugging Face files, instead of side by side."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _token_ids(values: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: values[f"tokenizer.ggml.{name}_token_id"] for key, name in names.items()}


def _shared(values: dict[str, Any]) -> dict[str, Any]:
    return _token_ids(values) | {
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": values["attention.head_count"],
        "num_key_value_heads": values["attention.head_count_kv"],
        "rms_norm_eps": float(f"{values['attention.layer_norm_rms_epsilon']:.6g}"),  # a float32 in the file
        "max_position_embeddings": values["context_length"],
    }


def _llama(values: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": values["rope.freq_base"]}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": values["rope.dimension_count"],
        "hidden_act": "silu",
        "rope_parameters": rope,
    }


def _gemma3(values: dict[str, Any]) -> dict[str, Any]:
    """The file has neither the base of the windowed layers' rotation nor which layers those are: five of six."""
    bases = {"full_attention": values["rope.freq_base"], "sliding_attention": 10_000.0}
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(values["block_count"])]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": values["attention.key_length"],
        "query_pre_attn_scalar": values["attention.key_length"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": values["attention.sliding_window"],
        "layer_types": kinds,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
    }


def _write_tokenizer(file: Path, root: Path, values: dict[str, Any]) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if values.get("tokenizer.ggml.pre") == "smollm":  # digits apart, which transformers does not know
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    tokenizer.save_pretrained(root)
