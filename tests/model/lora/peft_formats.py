"""Tiny adapters in PEFT's format, one kind each, and their bases. Written without PEFT, torch or transformers.

Names, shapes and keys are those that PEFT 0.21 saves.

`test_peft.py` loads each with PEFT itself, where that is installed, so what is written here is what PEFT reads.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from millrace.model.checkpoint.whole_model import WholeModel
from millrace.model.families.registry import read_spec

Tensors = dict[str, NDArray[Any]]
Base = Mapping[str, NDArray[Any]]  # the base's checkpoint: name -> tensor, of which some kinds hold copies
PREFIX = "base_model.model."
RANK, ALPHA = 4, 10
STRENGTH = 0.5  # of an update, beside a weight of the base
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 159,
    "torch_dtype": "float32",
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16,
        "query_pre_attn_scalar": 16, "sliding_window": 24, "sliding_window_pattern": 3,
    },
    "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "gpt_neox": {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]},
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 160, "n_embd": 32, "n_layer": 3,
        "n_head": 4, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 159,
    },
}  # fmt: skip
DEFAULTS: dict[str, Any] = {  # what PEFT writes for plain LoRA
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": ALPHA, "lora_bias": False, "lora_dropout": 0.0,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": RANK,
    "rank_pattern": {}, "revision": None, "target_modules": list(LINEARS), "target_parameters": None,
    "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip


@dataclass
class Writer:
    """The adapter of one kind for one base, as it grows."""

    base: Base
    draws: np.random.Generator
    tensors: Tensors = field(default_factory=dict)

    def modules(self, *ends: str, layer: int | None = None) -> list[str]:
        """The paths of the base's modules with these last names, in one layer or all."""
        paths = [name.removesuffix(".weight") for name in self.base if name.endswith(".weight")]
        at = "" if layer is None else f".{layer}."
        return sorted(path for path in paths if path.rpartition(".")[2] in ends and at in path)

    def normal(self, *shape: int, std: float = 1.0) -> NDArray[np.float32]:
        return np.asarray(self.draws.standard_normal(shape) * std, np.float32)

    def lora(self, *paths: str, rank: int = RANK, alpha: float = ALPHA) -> None:
        """A and B for modules; their product is about as large as STRENGTH times the weight."""
        for path in paths:
            rows, columns = self.base[f"{path}.weight"].shape
            size = STRENGTH * float(np.std(self.base[f"{path}.weight"])) * math.sqrt(rank) / alpha
            self.tensors[f"{PREFIX}{path}.lora_A.weight"] = self.normal(rank, columns)
            self.tensors[f"{PREFIX}{path}.lora_B.weight"] = self.normal(rows, rank, std=size)

    def embedding(self, path: str) -> None:
        """A and B of an embedding, and the copy of the base that PEFT saves beside them."""
        weight = self.base[f"{path}.weight"]
        size = STRENGTH * float(np.std(weight)) * math.sqrt(RANK) / ALPHA
        self.tensors[f"{PREFIX}{path}.lora_embedding_A"] = self.normal(RANK, weight.shape[0])
        self.tensors[f"{PREFIX}{path}.lora_embedding_B"] = self.normal(weight.shape[1], RANK, std=size)
        self.tensors[f"{PREFIX}{path}.base_layer.weight"] = weight

    def vector(self, path: str, end: str, of: str = "bias", std: float = 0.3) -> None:
        """A vector as long as the base's bias, or as another tensor of the module."""
        self.tensors[f"{PREFIX}{path}.{end}"] = self.normal(self.base[f"{path}.{of}"].shape[0], std=std)

    def copy(self, name: str, noise: float = 0.3) -> None:
        """A trained tensor in place of one of the base."""
        weight = self.base[name]
        self.tensors[PREFIX + name] = weight + self.normal(*weight.shape, std=noise * float(np.std(weight) or 1.0))


@dataclass(frozen=True)
class Kind:
    """One kind of adapter: the keys that are not PEFT's defaults, and how its tensors are made."""

    write: Callable[[Writer], None]
    keys: dict[str, Any] = field(default_factory=dict)
    at_run_time: bool = True  # False: served merged only
    needs_bias: bool = False  # of the base's q, k and v


EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def _plain(writer: Writer) -> None:
    writer.lora(*writer.modules(*LINEARS))


def _patterns(writer: Writer) -> None:
    for path in writer.modules(*LINEARS):
        writer.lora(path, rank=2 if path.endswith("q_proj") else 7 if ".1.mlp." in path else RANK)


def _dora(writer: Writer) -> None:
    _plain(writer)
    for path in writer.modules(*LINEARS):
        norm = np.linalg.norm(writer.base[f"{path}.weight"].astype(np.float32), axis=1)
        factor = 1 + 0.2 * writer.normal(len(norm))
        writer.tensors[f"{PREFIX}{path}.lora_magnitude_vector"] = np.asarray(norm * factor, np.float32)


def _lora_bias(writer: Writer) -> None:
    writer.lora(*writer.modules("q_proj", "v_proj"))
    for path in writer.modules("q_proj", "v_proj"):
        writer.vector(path, "lora_B.bias")


def _biases(writer: Writer, *ends: str) -> None:
    writer.lora(*writer.modules("q_proj", "v_proj"))
    for path in writer.modules(*ends):
        writer.vector(path, "bias" if path.endswith("k_proj") else "base_layer.bias")


def _embedding(writer: Writer) -> None:
    writer.lora(*writer.modules("q_proj"))
    writer.embedding(EMBEDDING)


def _dora_embedding(writer: Writer) -> None:
    """DoRA's lengths of an embedding are those of its columns."""
    _embedding(writer)
    for path in (EMBEDDING, *writer.modules("q_proj")):
        axis = 0 if path == EMBEDDING else 1
        norm = np.linalg.norm(writer.base[f"{path}.weight"].astype(np.float32), axis=axis)
        factor = 1 + 0.2 * writer.normal(len(norm))
        writer.tensors[f"{PREFIX}{path}.lora_magnitude_vector"] = np.asarray(norm * factor, np.float32)


def _tied_embedding(writer: Writer) -> None:
    """What is trained of a tied embedding is written for the head as well, transposed."""
    _embedding(writer)
    if "lm_head.weight" not in writer.base:
        a, b = (writer.tensors[f"{PREFIX}{EMBEDDING}.lora_embedding_{which}"] for which in "AB")
        writer.tensors[f"{PREFIX}lm_head.lora_A.weight"] = b.T
        writer.tensors[f"{PREFIX}lm_head.lora_B.weight"] = a.T
        writer.tensors[f"{PREFIX}lm_head.base_layer.weight"] = writer.base[f"{EMBEDDING}.weight"]


def _tied_saved(writer: Writer) -> None:
    _saved(writer, f"{EMBEDDING}.weight")
    if "lm_head.weight" not in writer.base:
        writer.tensors[f"{PREFIX}lm_head.weight"] = writer.tensors[f"{PREFIX}{EMBEDDING}.weight"]


def _head(writer: Writer) -> None:
    """As PEFT saves it: with a copy of the head's base."""
    writer.lora(*writer.modules("down_proj"))
    base = {**writer.base, "lm_head.weight": writer.base.get("lm_head.weight", writer.base[f"{EMBEDDING}.weight"])}
    whole = Writer(base, writer.draws, writer.tensors)
    whole.lora(HEAD)
    writer.tensors[f"{PREFIX}lm_head.base_layer.weight"] = base["lm_head.weight"]


def _saved(writer: Writer, *names: str) -> None:
    writer.lora(*writer.modules("v_proj"))
    for name in names:
        if name == "lm_head.weight" and name not in writer.base:
            writer = Writer({name: writer.base[f"{EMBEDDING}.weight"]}, writer.draws, writer.tensors)
        writer.copy(name)


def _norms(writer: Writer) -> None:
    _saved(writer, *(f"{path}.weight" for path in writer.modules("input_layernorm")))


TOKENS = (3, 70, 71)


def _tokens(writer: Writer) -> None:
    writer.lora(*writer.modules("o_proj"))
    weight = writer.base[f"{EMBEDDING}.weight"]
    name = f"{PREFIX}{EMBEDDING}.token_adapter.trainable_tokens_delta"
    writer.tensors[name] = writer.normal(len(TOKENS), weight.shape[1], std=float(np.std(weight)))


MERGED: dict[str, Any] = {"at_run_time": False}
KINDS: Mapping[str, Kind] = {
    "plain": Kind(_plain),
    "q_v": Kind(lambda w: w.lora(*w.modules("q_proj", "v_proj")), {"target_modules": ["q_proj", "v_proj"]}),
    "rslora": Kind(lambda w: w.lora(*w.modules(*LINEARS), alpha=ALPHA * math.sqrt(RANK)), {"use_rslora": True}),
    "patterns": Kind(
        _patterns,
        {"rank_pattern": {"q_proj": 2, r"model.layers.1.mlp.\w+": 7}, "alpha_pattern": {"down_proj": 3, "q_.*": 5}},
    ),
    "layers": Kind(
        lambda w: w.lora(*w.modules(*LINEARS, layer=1)), {"layers_to_transform": [1], "layers_pattern": "layers"}
    ),
    "regex": Kind(
        lambda w: w.lora(*w.modules("k_proj", "down_proj", layer=2)),
        {"target_modules": r".*\.2\.(self_attn\.k|mlp\.down)_proj"},
    ),
    "whole_path": Kind(
        lambda w: w.lora(*w.modules("up_proj", layer=0)), {"target_modules": ["model.layers.0.mlp.up_proj"]}
    ),
    "all_linear": Kind(_plain, {"target_modules": "all-linear"}),
    "dora": Kind(_dora, {"use_dora": True}, **MERGED),
    "lora_bias": Kind(
        _lora_bias, {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}, **MERGED, needs_bias=True
    ),
    "bias_all": Kind(
        lambda w: _biases(w, "q_proj", "k_proj", "v_proj"),
        {"bias": "all", "target_modules": ["q_proj", "v_proj"]},
        **MERGED,
        needs_bias=True,
    ),
    "bias_lora_only": Kind(
        lambda w: _biases(w, "q_proj", "v_proj"),
        {"bias": "lora_only", "target_modules": ["q_proj", "v_proj"]},
        **MERGED,
        needs_bias=True,
    ),
    "embedding": Kind(_embedding, {"target_modules": ["q_proj", "embed_tokens"]}, **MERGED),
    "head": Kind(_head, {"target_modules": ["down_proj", "lm_head"]}, **MERGED),
    "dora_embedding": Kind(_dora_embedding, {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}, **MERGED),
    "tied_embedding": Kind(
        _tied_embedding,
        {"target_modules": ["q_proj", "embed_tokens", EMBEDDING], "ensure_weight_tying": True},
        **MERGED,
    ),
    "tied_saved": Kind(
        _tied_saved,
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", EMBEDDING], "ensure_weight_tying": True},
        **MERGED,
    ),
    "saved_head": Kind(
        lambda w: _saved(w, "lm_head.weight"),
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
        **MERGED,
    ),
    "saved_embedding": Kind(
        lambda w: _saved(w, f"{EMBEDDING}.weight"),
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
        **MERGED,
    ),
    "saved_norms": Kind(_norms, {"target_modules": ["v_proj"], "modules_to_save": ["input_layernorm"]}, **MERGED),
    "tokens": Kind(_tokens, {"target_modules": ["o_proj"], "trainable_token_indices": list(TOKENS)}, **MERGED),
}


def write_base(name: str, folder: Path) -> Path:
    """A tiny checkpoint of random numbers, in `folder`, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**({} if name == "gpt2" else SHAPE), **BASES[name]}))
    spec, draws = read_spec(folder), np.random.default_rng(zlib.crc32(name.encode()))
    tensors = {}
    for stored, shape in WholeModel(spec).shapes.items():
        noise = np.asarray(draws.standard_normal(shape), np.float32)
        is_norm = len(shape) == 1 and stored.endswith(".weight")
        tensors[stored] = (
            noise * 0.1 + (name != "gemma3") * is_norm if len(shape) == 1 else noise * 1.5 / shape[-1] ** 0.5
        )
    if spec.head.is_tied:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_adapter(kind: str, base: Path, folder: Path, **keys: Any) -> Path:
    """The adapter of a kind for the checkpoint in `base`, in `folder`, which is returned. `keys`: of its config."""
    writer = Writer(load_file(base / "model.safetensors"), np.random.default_rng(zlib.crc32(kind.encode())))
    KINDS[kind].write(writer)
    return save_adapter(folder, writer.tensors, **{**KINDS[kind].keys, **keys})


def save_adapter(folder: Path, tensors: Tensors, **keys: Any) -> Path:
    """An adapter of these tensors, with PEFT's defaults for all keys that are not given."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps({**DEFAULTS, **keys}))
    return folder
