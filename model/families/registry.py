"""Which file describes which `model_type`, and the spec of a checkpoint from its config.json. Does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config_keys import ConfigKeys
from ..errors import SHOWN_CHARS, CheckpointError, quoted
from ..files import read_json, refuse_code
from ..foreign import describe_folder, refuse_mlx
from ..quantized.formats import read_format
from ..spec import DecoderSpec
from .building import Family
from .wrappers import WRAPPERS, text_half, with_own_head

# model_type -> the module below this folder that describes it, which is imported only then
MODULES = {
    "apertus": "hunyuan",
    "apertus1p5_text": "hunyuan",
    "arcee": "llama",
    "bamba": "recurrent.bamba",
    "biogpt": "gpt.opt",
    "bloom": "gpt.bloom",
    "codegen": "gpt.gpt_neox",
    "cohere": "cohere",
    "cohere2": "cohere",
    "cwm": "llama",
    "deepseek_v2": "experts.deepseek",
    "deepseek_v3": "experts.deepseek",
    "dots1": "experts.glm",
    "ernie4_5": "glm",
    "ernie4_5_moe": "experts.glm",
    "exaone": "llama",
    "exaone4": "olmo",
    "falcon": "gpt.bloom",
    "flex_olmo": "experts.mixtral",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gemma4_text": "experts.gemma4",
    "gemma4_unified_text": "experts.gemma4",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "experts.glm",
    "glm4_moe_lite": "experts.deepseek",
    "gpt2": "gpt.gpt2",
    "gpt_bigcode": "gpt.gpt2",
    "gpt_neo": "gpt.gpt2",
    "gpt_neox": "gpt.gpt_neox",
    "gpt_neox_japanese": "gpt.gpt_neox",
    "gpt_oss": "experts.gpt_oss",
    "gptj": "gpt.gpt_neox",
    "granite": "granite",
    "granite_swa": "granite",
    "granitemoe": "experts.granite",
    "granitemoe_swa": "experts.granite",
    "granitemoehybrid": "recurrent.granite4",
    "granitemoeshared": "experts.granite",
    "helium": "glm",
    "hunyuan_v1_dense": "hunyuan",
    "hyperclovax": "granite",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "lfm2": "recurrent.lfm2",
    "lfm2_moe": "recurrent.lfm2",
    "llama": "llama",
    "minicpm3": "latents",
    "ministral": "mistral",
    "ministral3": "mistral",
    "mistral": "mistral",
    "mixtral": "experts.mixtral",
    "mpt": "gpt.bloom",
    "nanochat": "hunyuan",
    "nemotron": "gpt.stablelm",
    "nemotron_h": "recurrent.nemotron_h",
    "olmo": "olmo",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "olmoe": "experts.mixtral",
    "opt": "gpt.opt",
    "persimmon": "gpt.stablelm",
    "phi": "phi",
    "phi3": "phi",
    "qwen2": "mistral",
    "qwen2_5_vl_text": "mistral",
    "qwen2_moe": "experts.mixtral",
    "qwen2_vl_text": "mistral",
    "qwen3": "mistral",
    "qwen3_moe": "experts.mixtral",
    "qwen3_5_moe_text": "recurrent.qwen_next",
    "qwen3_5_text": "recurrent.qwen_next",
    "qwen3_next": "recurrent.qwen_next",
    "qwen3_vl_text": "mistral",
    "seed_oss": "llama",
    "smollm3": "llama",
    "solar_open": "experts.glm",
    "stablelm": "gpt.stablelm",
    "starcoder2": "gpt.stablelm",
    "vaultgemma": "gemma",
}


def family_of(model_type: str) -> Family:
    """The family of a model type that `MODULES` names."""
    module = importlib.import_module(f".{MODULES[model_type]}", __package__)
    family = module.FAMILIES[model_type]
    assert isinstance(family, Family)
    return family


def has_family(values: Mapping[str, Any]) -> bool:
    """Whether the contents of a config.json name a model type, or a wrapper of one, that a family describes."""
    model_type, inner = str(values.get("model_type")), values.get("text_config")
    if model_type in WRAPPERS:
        model_type = str(isinstance(inner, dict) and inner.get("model_type") or WRAPPERS[model_type].text)
    return model_type in MODULES


def read_spec(root: Path) -> DecoderSpec:
    """The spec of the checkpoint in `root`. Raises CheckpointError naming the wrong key."""
    values = read_json(root, "config.json")
    if values is None:
        nothing = f"{root}: no config.json, so this is not a model directory in Hugging Face format"
        raise CheckpointError(describe_folder(root) or nothing)
    refuse_code(root, "config.json", values)
    refuse_mlx(root, values)
    read_format(values, root)
    return parse_config(values, f"config.json ({root})")


def what_is_supported(model_type: object) -> str:
    """For messages: the types with names like this one, and the page that lists all."""
    import difflib

    like = difflib.get_close_matches(str(model_type)[:SHOWN_CHARS], sorted({*MODULES, *WRAPPERS}), cutoff=0.7)
    listed = "the supported types are in deploy/docs/models.md"
    return f"{listed}, among them {', '.join(map(repr, like))}" if like else listed


def parse_config(values: Mapping[str, Any], source: str) -> DecoderSpec:
    """The spec from the contents of a config.json; `source` names it in errors."""
    keys = ConfigKeys(values, source)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODULES and model_type not in WRAPPERS:
        keys.fail("model_type", f"{quoted(model_type)} is not supported; {what_is_supported(model_type)}")
    _check_is_generative(keys)
    if model_type not in WRAPPERS:
        return family_of(model_type).spec(keys)
    keys = text_half(keys)
    inner_type = keys.values["model_type"]
    if not isinstance(inner_type, str) or inner_type not in MODULES:
        keys.fail("model_type", f"{quoted(inner_type)} is not supported; {what_is_supported(inner_type)}")
    return with_own_head(family_of(inner_type).spec(keys), model_type)


def _check_is_generative(keys: ConfigKeys) -> None:
    architectures = keys.values.get("architectures") or []
    if not isinstance(architectures, list):
        keys.fail("architectures", f"must be a list of names, not {quoted(architectures)}")
    endings = ("ForCausalLM", "Model", "LMHeadModel", "ForConditionalGeneration")
    if architectures and not any(str(name).endswith(endings) for name in architectures):
        names = quoted(architectures)
        keys.fail("architectures", f"{names} holds no ...ForCausalLM, so this checkpoint cannot generate text")
