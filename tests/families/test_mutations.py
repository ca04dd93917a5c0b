"""That rows notice faults: each fault here is planted in a family, and the row with its part differs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from millrace.model.families.names import POST_MIXER, PRE_MIXER, SINKS, Rows
from millrace.model.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, MoeSpec, NormSpec, RouterSpec
from tests.families.checkpoint import make_model, randomise
from tests.families.planted import SpecChange, in_layers, plant
from tests.families.row import Row, row
from tests.families.ways import Outcome, run_way
from tests.families.zoo import Entry, Zoo, chosen, quiet

NUM_NEW, LENGTHS = 8, (41,)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"), NUM_NEW, LENGTHS)


def outcome(zoo: Zoo, name: str) -> Outcome:
    """Of a row on torch, as its family is now."""
    return run_way(zoo.entry(chosen([name])[0]), "plain", "torch")


def no_rotary_scaling(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, ropes=tuple(replace(rope, kind="default", factor=1.0) for rope in spec.ropes))


def as_stored(norm: NormSpec | None) -> NormSpec | None:
    return None if norm is None else replace(norm, weight="w")


def stored_norms(layer: LayerSpec) -> LayerSpec:
    names = ("pre_mixer", "post_mixer", "pre_feed", "post_feed")
    return replace(layer, **{name: as_stored(getattr(layer, name)) for name in names})


def in_experts(layer: LayerSpec, **changes: Any) -> LayerSpec:
    return replace(layer, feed=replace(layer.feed, **changes)) if isinstance(layer.feed, MoeSpec) else layer


def unclamped(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.feed, MoeSpec)
    return in_experts(layer, expert=replace(layer.feed.expert, limit=1e6))


def another_donor(layer: LayerSpec) -> LayerSpec:
    """Layers that read layer 1 read layer 0."""
    assert isinstance(layer.mixer, AttentionSpec)
    is_other = layer.mixer.kv_of == 1
    return replace(layer, mixer=replace(layer.mixer, kv_of=0)) if is_other else layer


def in_attention(**changes: Any) -> SpecChange:
    def changed(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, AttentionSpec)
        return replace(layer, mixer=replace(layer.mixer, **changes))

    return in_layers(changed)


def in_latents(**changes: Any) -> SpecChange:
    def changed(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, LatentSpec)
        return replace(layer, mixer=replace(layer.mixer, **changes))

    return in_layers(changed)


FAULTS: dict[str, tuple[str, SpecChange]] = {
    "the scale of the residual": ("granite", in_layers(lambda layer: replace(layer, residual_scale=1.0))),
    "the scale of the embedding": ("gemma", lambda spec: replace(spec, embedding=replace(spec.embedding, scale=1.0))),
    "the scale of logits": ("granite", lambda spec: replace(spec, head=replace(spec.head, scale=1.0))),
    "the cap of logits": ("gemma2", lambda spec: replace(spec, head=replace(spec.head, soft_cap=None))),
    "the cap of scores": ("gemma2", in_attention(soft_cap=None)),
    "the scale of scores": ("granite", in_attention(scale=8**-0.5)),
    "the kind of rotation": ("llama-llama3", no_rotary_scaling),
    "windows": ("mistral-window", in_attention(window=None)),
    "the rotation of a layer": ("smollm3", in_attention(rope=0)),
    "the 1 of norms": ("gemma", in_layers(stored_norms)),
    "the sum of experts' weights": ("mixtral", in_layers(partial(in_experts, router=RouterSpec()))),
    "the norm of values": ("gemma4-dense", in_attention(v_norm=None)),
    "the pairs that do not turn": ("gemma4-dense", no_rotary_scaling),
    "the layer whose cache is read": ("gemma4-one-size", in_layers(another_donor)),
    "the sharpness of yarn in scores over latents": ("deepseek-v3", in_latents(scale=12**-0.5)),
    "the clamp of experts": ("gpt-oss-clamped", in_layers(unclamped)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_dropped_part_turns_its_row_red(fault: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = FAULTS[fault]
    assert outcome(zoo, name) == Outcome("equal")
    plant(monkeypatch, chosen([name])[0].model_type, change)
    assert outcome(zoo, name).state == "differs"


def test_a_norm_after_attention_instead_of_before_turns_a_row_red(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    change = in_layers(lambda layer: replace(layer, pre_mixer=None, post_mixer=layer.pre_mixer))
    plant(monkeypatch, "llama", change, lambda names: {**names, POST_MIXER: PRE_MIXER})
    assert outcome(zoo, "llama").state == "differs"


@pytest.mark.parametrize("name", ["cohere", "deepseek-v2"])
def test_neighbours_rotated_as_halves_turn_a_row_red(name: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, chosen([name])[0].model_type, names=lambda _: {})
    assert outcome(zoo, name).state == "differs"


# -- sinks, which no dense family has: Llama with gpt-oss's attention


def sunk_llama(sunk: Row) -> PreTrainedModel:
    """A Llama whose attention has sinks."""
    AttentionInterface.register("eager_sinks", eager_attention_forward)
    AttentionMaskInterface.register("eager_sinks", eager_mask)
    model = make_model(sunk)
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.ones(model.config.num_attention_heads))
    randomise(model, sunk)
    model.config._attn_implementation = "eager_sinks"
    return model


def test_sinks_that_are_left_out_turn_a_row_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sunk = row("llama-sinks", "llama")
    with quiet():
        entry = Entry(sunk, tmp_path, NUM_NEW, LENGTHS, sunk_llama(sunk))
    plant(monkeypatch, "llama", in_attention(has_sinks=True))
    assert run_way(entry, "plain", "torch") == Outcome("equal")
    plant(monkeypatch, "llama", names=lambda names: {**names, SINKS: Rows(SINKS, apply=lambda sinks: sinks - 1e4)})
    assert run_way(entry, "plain", "torch").state == "differs"
