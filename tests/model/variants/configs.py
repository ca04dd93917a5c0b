"""Variants of config.json. Those that are refused name the key."""

from __future__ import annotations

from typing import Any

from tests.model.variants.runs import GONE, Variant

FOUR = {"num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DYNAMIC = {**LINEAR, "rope_type": "dynamic"}
LONG = {"max_model_len": 256}
AQLM = {"quant_method": "aqlm"}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8}


def rope(name: str, refused: str = "", key: str = "rope_parameters", family: str = "llama", **values: Any) -> Variant:
    return Variant(f"rope {name}", family, {key: values}, refused=refused)


def refused(key: str, value: Any, message: str = "", family: str = "llama") -> Variant:
    return Variant(f"{key} = {str(value)[:40]}", family, {key: value}, refused=f"{key}: {message}")


HEADS = [
    Variant("no group: null", keys={"num_key_value_heads": None}, made=FOUR),
    Variant("no group: absent", keys={"num_key_value_heads": GONE}, made=FOUR),
    Variant("no group of qwen2: null", "qwen2", {"num_key_value_heads": None}, made=FOUR),
    Variant("no group of qwen3: null", "qwen3", {"num_key_value_heads": None}, made=FOUR),
    refused("num_key_value_heads", GONE, "must divide", "qwen2"),
    refused("num_key_value_heads", 3, "must divide"),
    Variant("head size: null", keys={"head_dim": None}),
    Variant("head size: absent", keys={"head_dim": GONE}),
    Variant("head size of qwen2: said", "qwen2", {"head_dim": 8}),
    Variant("head size of its own", "qwen2", made={"head_dim": 16}),
    Variant("head size beyond the files", keys={"head_dim": 10**9}, refused="head_dim = 1000000000"),
    Variant("odd head size", keys={"head_dim": 7}, refused="head_dim = 7"),
    Variant(
        "more heads than the files", keys={"num_attention_heads": 8, "head_dim": 8}, refused="num_attention_heads = 8"
    ),
]

SIZES = [
    Variant("rows beyond the files", keys={"vocab_size": 10**6}, refused="vocab_size = 1000000"),
    Variant("fewer rows than the files", keys={"vocab_size": 95}, refused="vocab_size = 95"),
    Variant("another hidden size", keys={"hidden_size": 64}, refused="hidden_size = 64"),
    Variant("another inner size", keys={"intermediate_size": 2**31 - 1}, refused="intermediate_size = 2147483647"),
    refused("num_hidden_layers", 3, "must be 2, as many as the files hold, not 3"),
    refused("num_hidden_layers", 1, "must be 2, as many as the files hold, not 1"),
    refused("num_hidden_layers", 10**9, "must be a whole number from 1 to 1024, not 1000000000"),
    refused("num_hidden_layers", 0, "must be a whole number"),
    refused("hidden_size", 32.0, "must be a whole number"),
    refused("hidden_size", "32", "must be a whole number"),
    refused("hidden_size", True, "must be a whole number"),
    refused("hidden_size", GONE, "is missing"),
    refused("vocab_size", 10**400, "must be a whole number"),
    refused("intermediate_size", -1, "must be a whole number"),
    refused("max_position_embeddings", 0, "must be a whole number"),
    Variant("length: absent", keys={"max_position_embeddings": GONE}),
    Variant("length: a million", keys={"max_position_embeddings": 10**6}, settings={"max_model_len": 64}),
]

DTYPES = [
    Variant("dtype: auto", keys={"dtype": "auto"}, oracle_keys={"dtype": "float32"}),
    Variant("dtype: null", keys={"dtype": None}),
    Variant("dtype: absent", keys={"dtype": GONE}),
    Variant("torch_dtype: auto", keys={"dtype": GONE, "torch_dtype": "auto"}, oracle_keys={"torch_dtype": GONE}),
    Variant(
        "torch_dtype: torch.float32",
        keys={"dtype": GONE, "torch_dtype": "torch.float32"},
        oracle_keys={"torch_dtype": "float32"},
    ),
    Variant("torch_dtype: bfloat16", keys={"dtype": GONE, "torch_dtype": "bfloat16"}),
    Variant("dtype: float64", keys={"dtype": "float64"}),
    Variant("dtype: half", keys={"dtype": "half"}),
    Variant("dtype beside torch_dtype", keys={"dtype": "float32", "torch_dtype": "float16"}),
    refused("dtype", "int8", "'int8' is not supported"),
    refused("dtype", 7, "7 is not supported"),
]

TOKENS = [
    Variant("end: -1", keys={"eos_token_id": -1}),
    Variant("end: beyond the rows", keys={"eos_token_id": 10**6}),
    Variant("end: some of them", keys={"eos_token_id": [2, -1, 10**6]}),
    Variant("end: null", keys={"eos_token_id": None}),
    Variant("end: absent", keys={"eos_token_id": GONE}),
    Variant("begin: -1", keys={"bos_token_id": -1}),
    Variant("begin: null", keys={"bos_token_id": None}),
    refused("eos_token_id", "</s>", "must be a token id"),
    refused("eos_token_id", True, "must be a token id"),
    refused("eos_token_id", 2.5, "must be a token id"),
    refused("eos_token_id", [[2]], "must be a token id"),
]

ROPE = [
    Variant("theta of transformers 4", keys={"rope_parameters": GONE, "rope_theta": 500.0}),
    Variant("theta a whole number", keys={"rope_parameters": {"rope_type": "default", "rope_theta": 500}}),
    Variant("theta in both places", keys={"rope_theta": 100.0, "rope_parameters": {"rope_theta": 500.0}}),
    Variant("theta absent", keys={"rope_parameters": GONE}),
    Variant("scaling: null", keys={"rope_parameters": GONE, "rope_scaling": None, "rope_theta": 500.0}),
    Variant("scaling: empty", keys={"rope_parameters": GONE, "rope_scaling": {}, "rope_theta": 500.0}),
    rope("linear", **LINEAR),
    rope("linear of transformers 4", key="rope_scaling", type="linear", factor=2),
    rope("linear, shrunk", rope_type="linear", factor=0.5, rope_theta=1e4),
    rope("dynamic", **DYNAMIC),
    Variant("linear, beyond the trained length", keys={"rope_parameters": LINEAR}, num_tokens=200, settings=LONG),
    Variant("dynamic, beyond it", keys={"rope_parameters": DYNAMIC}, num_tokens=90, settings=LONG, is_stepwise=True),
    rope("llama3", **LLAMA3),
    rope("yarn", **YARN),
    rope("yarn of qwen3", family="qwen3", **YARN),
    rope("yarn by its length", **{**YARN, "original_max_position_embeddings": 64}),
    rope("yarn with a factor of its own", **YARN, attention_factor=1.5),
    rope("yarn with mscale", **YARN, mscale=0.7, mscale_all_dim=0.3),
    rope("yarn with betas", **YARN, beta_fast=8, beta_slow=2),
    rope("yarn with betas of 0", **YARN, beta_fast=0, beta_slow=0),
    rope("yarn, not truncated", **YARN, truncate=False),
    rope("yarn, truncate null", **YARN, truncate=None),
    rope("yarn without a factor", **{**YARN, "factor": None}),
    Variant("yarn, length beside", keys={"rope_parameters": YARN, "original_max_position_embeddings": 8}),
    Variant("llama3, length beside", keys={"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}),
    Variant("both keys", keys={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    rope("default with a share", rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    rope("longrope", "short_factor: must be a list of", rope_type="longrope", factor=2.0),
    rope("proportional", "rope_type: 'proportional'", rope_type="proportional"),
    rope("type null", "rope_type: None", rope_type=None),
    rope("linear without a factor", "factor: is missing", rope_type="linear"),
    rope("factor a text", "factor: must be a number", rope_type="linear", factor="4"),
    rope("factor beyond all positions", "factor: must be", **{**YARN, "factor": 1e308}),
    rope("factor of 400 digits", "factor: must be", **{**YARN, "factor": 10**400}),
    rope("factor infinite", "factor: must be", rope_type="linear", factor=float("inf")),
    rope("theta 0", "rope_theta: must be above 1", rope_type="default", rope_theta=0),
    rope("theta 1e308", "rope_theta: must be", rope_type="default", rope_theta=1e308),
    rope("frequencies crossed", "low_freq_factor: must be", **{**LLAMA3, "low_freq_factor": 8.0}),
    refused("rope_parameters", [1], "must be an object"),
    refused("rope_scaling", "linear", "must be an object"),
]

WINDOWS = [
    Variant("window of mistral", "mistral", {"sliding_window": 8}),
    Variant("window of mistral: null", "mistral", {"sliding_window": None}),
    Variant("window of mistral: absent", "mistral", {"sliding_window": GONE}),
    Variant(
        "types of mistral", "mistral", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    refused("sliding_window", 0, "must be a whole number", "mistral"),
    Variant("window of llama", keys={"sliding_window": 8}),
    refused("layer_types", ["sliding_attention"] * 2, "names 'sliding_attention'"),
    Variant("window not used", "qwen2", {"sliding_window": 8, "layer_types": GONE}),
    Variant("window from layer 1", "qwen2", {**WINDOWED, "max_window_layers": 1, "layer_types": GONE}),
    Variant("window from layer 0", "qwen2", {**WINDOWED, "max_window_layers": 0, "layer_types": GONE}),
    Variant("window from layer 28", "qwen2", {**WINDOWED, "layer_types": GONE}),
    Variant("window by types", "qwen3", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}),
    Variant("window null", "qwen3", {"use_sliding_window": True, "sliding_window": None, "layer_types": GONE}),
    refused("layer_types", ["full_attention"], "must list one type", "qwen2"),
    refused("layer_types", ["chunked_attention"] * 2, "'chunked_attention'", "qwen2"),
    Variant(
        "types without a window", "qwen2", {"layer_types": ["sliding_attention"] * 2}, refused="layer_types: names"
    ),
]

REST = [
    Variant("biases of llama", made={"attention_bias": True, "mlp_bias": True}),
    Variant("biases of qwen3", "qwen3", made={"attention_bias": True}),
    Variant("bias key of qwen2", "qwen2", {"attention_bias": False}),
    Variant(
        "biases that the key rules out",
        keys={"attention_bias": False},
        made={"attention_bias": True},
        refused="attention_bias = false",
    ),
    Variant("tied: absent", keys={"tie_word_embeddings": GONE}),
    Variant("tied, with a head that differs", keys={"tie_word_embeddings": True}),
    refused("tie_word_embeddings", "yes", "must be true or false"),
    Variant("eps absent", keys={"rms_norm_eps": GONE}),
    Variant("eps 0.01", keys={"rms_norm_eps": 0.01}),
    refused("rms_norm_eps", 1e308, "must be a number"),
    refused("rms_norm_eps", -1e-6, "must be a number"),
    Variant("silu absent", keys={"hidden_act": GONE}),
    Variant("silu as swish", keys={"hidden_act": "swish"}),
    refused("hidden_act", "mish", "'mish' is not supported"),
    Variant("architectures absent", keys={"architectures": GONE}),
    Variant("architectures null", keys={"architectures": None}),
    refused("architectures", 5, "must be a list"),
    refused("architectures", ["LlamaForSequenceClassification"], "['LlamaForSequenceClassification']"),
    refused("model_type", "glm9", "'glm9'"),
    refused("model_type", None, "None is not supported"),
    Variant("quantization null", keys={"quantization_config": None}),
    refused("quantization_config", AQLM, "quant_method = 'aqlm'"),
    Variant("code", keys={"auto_map": {"AutoModel": "x.Y"}}, refused="auto_map requires code"),
    Variant("keys that mean nothing", keys={"pretraining_tp": 2, "use_cache": False, "x": {"y": [1]}}),
]

CONFIGS = [*HEADS, *SIZES, *DTYPES, *TOKENS, *ROPE, *WINDOWS, *REST]
