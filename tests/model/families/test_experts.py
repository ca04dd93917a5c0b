"""Keys of experts under all their names, layers with and without experts, and keys that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.model.errors import CheckpointError
from millrace.model.families.registry import parse_config
from millrace.model.spec import DecoderSpec, MoeSpec
from tests.model.checkpoints import SHAPE

SIZES: dict[str, Any] = {**SHAPE, "num_hidden_layers": 5, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
DOTS: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1}
GLM: dict[str, Any] = {**DOTS, "head_dim": 16}


def spec_of(model_type: str, **keys: Any) -> DecoderSpec:
    return parse_config({"model_type": model_type, **SIZES, **keys}, "config.json")


def layers_with_experts(spec: DecoderSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if isinstance(layer.feed, MoeSpec)]


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe"])
def test_the_number_of_experts_has_two_names(model_type: str) -> None:
    local, plain = (spec_of(model_type, **{name: 6}) for name in ("num_local_experts", "num_experts"))
    assert local == plain and local.mixtures[0].num_experts == 6


@pytest.mark.parametrize(
    ("model_type", "keys", "layers"),
    [
        ("qwen3_moe", {}, [0, 1, 2, 3, 4]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [1, 3]),
        ("qwen2_moe", {"mlp_only_layers": [0, 3, 99]}, [1, 2, 4]),
        ("qwen2_moe", {"mlp_only_layers": None, "decoder_sparse_step": 3}, [2]),
        ("glm4_moe", GLM, [1, 2, 3, 4]),
        ("glm4_moe", {**GLM, "first_k_dense_replace": 3}, [3, 4]),
        ("dots1", DOTS, [0, 1, 2, 3, 4]),
        ("ernie4_5_moe", {"moe_k": 2, "moe_num_experts": 8}, [1, 2, 3, 4]),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_layer_end_index": -1}, [1, 3]),
        ("ernie4_5_moe", {"moe_layer_end_index": 2}, [1, 2]),
    ],
)
def test_experts_are_in_the_layers_that_the_keys_say(model_type: str, keys: dict[str, Any], layers: list[int]) -> None:
    assert layers_with_experts(spec_of(model_type, **keys)) == layers


@pytest.mark.parametrize(
    ("model_type", "is_normed"),
    [("mixtral", True), ("qwen2_moe", False), ("qwen3_moe", False), ("olmoe", False), ("flex_olmo", False)],
)
def test_without_a_key_only_mixtral_divides_the_weights_by_their_sum(model_type: str, is_normed: bool) -> None:
    assert spec_of(model_type).mixtures[0].router.norm_top_k == is_normed
    assert spec_of(model_type, norm_topk_prob=True).mixtures[0].router.norm_top_k


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9, "num_local_experts": 8}, "num_experts_per_tok: must be at most 8, as"),
        ("glm4_moe", {**GLM, "n_group": 3}, "n_group: must divide the 8 experts, but is 3"),
        ("glm4_moe", {**GLM, "n_group": 4, "topk_group": 5}, "topk_group: must be at most n_group = 4, but is 5"),
        (
            "glm4_moe",
            {**GLM, "n_group": 4, "num_experts_per_tok": 3},
            "num_experts_per_tok: must be at most 2, as many as 1 groups of 4 have, but is 3",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers: must list numbers of the 5 layers"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit: must be above 0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ("ernie4_5_moe", {"moe_num_experts": 0}, "moe_num_experts: must be a whole number from 1 to 4096"),
    ],
)
def test_keys_that_cannot_be_used_are_named(model_type: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(model_type, **keys)
