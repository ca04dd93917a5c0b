"""config.json and generation_config.json: what is read from each form, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.model.checkpoint.generation_defaults import GenerationDefaults
from millrace.model.errors import CheckpointError
from millrace.model.families.registry import parse_config, read_spec
from millrace.model.spec import DecoderSpec
from tests.model.checkpoints import FAMILIES, SHAPE

LLAMA: dict[str, Any] = {"model_type": "llama", **SHAPE}


def parse(**keys: Any) -> DecoderSpec:
    return parse_config({**LLAMA, **keys}, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]}, dtype="bfloat16")
    theirs.save_pretrained(tmp_path)
    ours = read_spec(tmp_path)
    assert (ours.family, ours.dtype) == (family, "bfloat16")
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head.is_tied == theirs.tie_word_embeddings
    assert ours.final_norm is not None and ours.final_norm.eps == theirs.rms_norm_eps
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert set(ours.windows) == {getattr(theirs, "sliding_window", None)}
    assert (ours.attention.has_qkv_bias, ours.attention.qk_norm is not None) == (family == "qwen2", family == "qwen3")
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))


def test_the_older_form_of_the_rope_keys_means_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}, torch_dtype="float16")
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="float16")
    assert old == new and old.ropes[0].theta == 5e5 and old.dtype == "float16"
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).ropes[0].kind == "linear"


def test_what_a_family_implies_holds_where_the_file_says_nothing() -> None:
    bare = {key: SHAPE[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")}
    bare["num_attention_heads"] = 32
    llama, mistral, qwen3 = (parse_config({"model_type": name, **bare}, "") for name in ("llama", "mistral", "qwen3"))
    assert (llama.num_kv_heads, llama.head_dim, llama.max_position_embeddings) == (32, 2, 2048)
    assert (mistral.num_kv_heads, mistral.windows) == (8, (4096,) * 3)
    assert (qwen3.num_kv_heads, qwen3.head_dim, qwen3.windows) == (32, 128, (None,) * 3)
    assert llama.dtype == "auto" and llama.eos_token_ids == () and llama.bos_token_id is None


def test_windows_hold_for_the_layers_the_file_names() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 16, "max_window_layers": 2}
    assert parse_config(qwen, "").windows == (None, None, None)
    assert parse_config({**qwen, "use_sliding_window": True}, "").windows == (None, None, 16)
    types = ["sliding_attention", "full_attention", "full_attention"]
    named = parse_config({**qwen, "use_sliding_window": True, "layer_types": types}, "")
    assert named.windows == (16, None, None)
    assert parse_config({**LLAMA, "model_type": "mistral", "sliding_window": None}, "").windows == (None,) * 3


@pytest.mark.parametrize(("stated", "longest"), [(32, 128), (128, 128)])
def test_yarn_stretches_the_longest_sequence_once(stated: int, longest: int) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = parse(rope_parameters=yarn, max_position_embeddings=stated)
    assert config.max_position_embeddings == longest
    assert config.ropes[0].attention_factor == pytest.approx(1.1386, abs=1e-4)  # 0.1 ln 4 + 1


@pytest.mark.parametrize(("kind", "longest"), [("linear", 8192), ("dynamic", 8192), ("default", 2048)])
def test_scaling_by_a_factor_serves_that_many_times_the_length_on_request(kind: str, longest: int) -> None:
    config = parse(rope_parameters={"rope_type": kind, "factor": 4.0})
    assert (config.max_position_embeddings, config.longest_on_request) == (2048, longest)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "t5"}, "model_type: 't5' is not supported; the supported types are in deploy/docs/models.md"),
    ({"model_type": "olmo_2"}, "models.md, among them 'olmo2', "),
    ({"model_type": None}, "model_type"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ({"hidden_act": "mish"}, "hidden_act: 'mish'"),
    ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar: must be above 0"),
    ({"model_type": "gemma2", "final_logit_softcapping": 0.0}, "final_logit_softcapping: must be above 0"),
    ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling: must be above 0"),
    (
        {"model_type": "hunyuan_v1_dense", "head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 9.0}},
        "alpha: needs heads of at least 4 numbers, not 2",
    ),
    ({"hidden_size": "64"}, "hidden_size: must be a whole number"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size: is missing"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"vocab_size": 2**40}, "vocab_size"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: must divide num_attention_heads"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"torch_dtype": "int8"}, "dtype: 'int8'"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type: 'proportional'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor: must be a list of 8 numbers"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor: is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: is missing"),
    ({"rope_scaling": "linear"}, "rope_scaling: must be an object"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.2}},
        "partial_rotary_factor: must give an even number",
    ),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types: must list one type for each"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "no sliding_window is in force"),
    ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3}, "layer_types: 'chunked_attention'"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_not_built_or_not_valid_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**keys)
    assert message in str(caught.value) and str(caught.value).startswith("config.json")


@pytest.mark.parametrize(
    "keys",
    [
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
        {"auto_map": {"AutoModel": "modeling_llama.LlamaEncoderModel"}},
        {"auto_map": {"AutoConfig": "x.LlamaConfig", "AutoModelForCausalLM": "x.MyLlamaForCausalLM"}},
        {"_attn_implementation_internal": "someone/kernel"},
        {"text_config": {"auto_map": {"AutoConfig": "x.Y"}}},
        {"parts": [{"custom_pipelines": {"x": {}}}]},
    ],
)
def test_code_in_a_checkpoint_is_refused_at_any_depth(keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **keys}))
    with pytest.raises(CheckpointError, match="auto_map|_attn_implementation_internal|custom_pipelines"):
        read_spec(tmp_path)


def test_the_code_that_a_built_in_class_came_from_is_no_reason_to_refuse(tmp_path: Path) -> None:
    classes = {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "x.LlamaForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "auto_map": classes | {"AutoTokenizer": ["x.Y", None]}}))
    assert read_spec(tmp_path).family == "llama"


def test_end_tokens_of_a_wrapper_and_of_its_text_half_are_joined() -> None:
    inner = {**SHAPE, "model_type": "gemma3_text", "eos_token_id": 1}
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": inner}
    assert parse_config(config, "config.json").eos_token_ids == (1, 106)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", "[" * 100_000, '{"a": ' * 100_000, "{" + "1" * 5000])
def test_a_file_that_is_no_json_object_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="config.json"):
        read_spec(tmp_path)


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        read_spec(tmp_path)


def test_generation_defaults_are_read_and_checked(tmp_path: Path) -> None:
    config = parse()
    file = tmp_path / "generation_config.json"
    assert GenerationDefaults.read(tmp_path, config) == GenerationDefaults(eos_token_ids=(2,))
    file.write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [2, 5]}))
    found = GenerationDefaults.read(tmp_path, config)
    assert found == GenerationDefaults(sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 20}, eos_token_ids=(2, 5))
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}))
    found = GenerationDefaults.read(tmp_path, config)
    assert (found.sampling, found.eos_token_ids) == ({"temperature": 0.0, "repetition_penalty": 1.1}, (2,))
    for keys in ({"top_p": 1.5}, {"temperature": "hot"}, {"top_k": -2}, {"eos_token_id": [1.5]}, {"eos_token_id": "x"}):
        file.write_text(json.dumps(keys))
        with pytest.raises(CheckpointError, match=next(iter(keys))):
            GenerationDefaults.read(tmp_path, config)
