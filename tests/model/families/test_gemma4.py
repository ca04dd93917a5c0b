"""What Gemma 4's files say of each layer, in both forms that files have, and what is refused of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from millrace.model.checkpoint.canonical import TensorSources
from millrace.model.checkpoint.tensor_shapes import open_source
from millrace.model.decoder.rope import inverse_frequencies
from millrace.model.errors import CheckpointError, ModelError
from millrace.model.families.names import tensors_of
from millrace.model.families.registry import family_of, parse_config, read_spec

CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size_per_layer_input": 0,
}
LARGE = {"head_dim": 16, "num_key_value_heads": 1}


def test_layers_that_see_all_have_heads_of_their_own_in_either_form() -> None:
    keys = {"attention_k_eq_v": True, "global_head_dim": 16, "num_global_key_value_heads": 1}
    published = parse_config({**CONFIG, **keys}, "")
    saved = {"attention_k_eq_v": True, "per_layer_config": {"5": LARGE, "11": LARGE}}
    assert published == parse_config({**CONFIG, **saved}, "")
    sizes = [(one.num_kv_heads, one.head_dim, one.window, one.is_k_v) for one in published.attentions]
    assert sizes == [*[(2, 8, 512, False)] * 5, (1, 16, None, True)] * 2


def test_heads_of_all_keys_are_those_of_windows_where_keys_have_their_own_values() -> None:
    spec = parse_config({**CONFIG, "global_head_dim": 16, "num_global_key_value_heads": 1}, "")
    assert {one.num_kv_heads for one in spec.attentions} == {2} and spec.attentions[5].head_dim == 16


def test_the_last_layer_sees_all_keys_whatever_the_file_says() -> None:
    types = [*["full_attention"] * 6, *["sliding_attention"] * 6]
    spec = parse_config({**CONFIG, "layer_types": types, "per_layer_config": {}}, "")
    assert [one.window for one in spec.attentions] == [None] * 6 + [512] * 5 + [None]


def test_the_last_layers_read_the_last_of_their_type_that_has_a_cache() -> None:
    spec = parse_config({**CONFIG, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}, "")
    assert spec.donors == {8: 7, 9: 7, 10: 7, 11: 5} and spec.kv_layers == tuple(range(8))
    assert [feed.intermediate_size for feed in spec.feeds()] == [48] * 8 + [96] * 4
    assert [one.v_norm is None for one in spec.attentions] == [False] * 8 + [True] * 4


def test_the_first_pairs_of_a_large_head_turn_by_the_frequencies_of_whole_heads() -> None:
    full, local = parse_config({**CONFIG, "global_head_dim": 16}, "").ropes
    np.testing.assert_allclose(inverse_frequencies(full), [1, 1e6 ** (-2 / 16), 0, 0, 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(local), 1e4 ** (-np.arange(4) / 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers: must leave a layer of each type before the last 9"),
        ({"num_kv_shared_layers": 13}, "num_kv_shared_layers: must leave a layer of each type before the last 13"),
        ({"per_layer_config": {"5": {"sliding_window": 4}}}, "per_layer_config: 'sliding_window' of layer 5 is not"),
        ({"per_layer_config": {"5": {"num_key_value_heads": 3}}}, "5: num_key_value_heads: must divide"),
        ({"per_layer_config": {"5": LARGE}}, "per_layer_config: layers of type full_attention with head_dim of"),
        ({"per_layer_config": 8}, "per_layer_config: must hold an object for each number"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all' is not supported"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 95}, "must be at least vocab_size = 96"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**CONFIG, **keys}, "")


def test_projections_of_keys_that_no_layer_uses_are_accepted_where_a_donor_has_them(tmp_path: Path) -> None:
    keys = {**CONFIG, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "per_layer_config": {}}
    keys["layer_types"] = ["full_attention"] * 6
    (tmp_path / "config.json").write_text(json.dumps(keys))
    spec = read_spec(tmp_path)
    shapes = TensorSources(tensors_of(spec), family_of(spec.family).names(spec)).stored_shapes()
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    extra = np.zeros((16, 32), np.float32)
    save_file({**tensors, "model.layers.5.self_attn.k_proj.weight": extra}, tmp_path / "model.safetensors")
    open_source(tmp_path, spec, "safetensors")
    save_file({**tensors, "model.layers.5.self_attn.o_norm.weight": extra}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.5\.self_attn\.o_norm\.weight is not part"):
        open_source(tmp_path, spec, "safetensors")
