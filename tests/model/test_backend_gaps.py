"""What a backend lacks of a spec is said in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.model.backend_gaps import missing
from millrace.model.families.registry import parse_config
from millrace.model.spec import (
    DecoderSpec,
    EmbeddingSpec,
    FeedSpec,
    HeadSpec,
    LatentSpec,
    LayerSpec,
    LearnedPositions,
    MoeSpec,
    NormSpec,
    PerLayerInputs,
    QkNorm,
    RecurrentSpec,
    RouterSpec,
)
from tests.model.checkpoints import SHAPE

LLAMA = parse_config({"model_type": "llama", **SHAPE}, "")
ROPE = replace(LLAMA.ropes[0], kind="longrope", original_max_position=32)
LONGROPE = replace(LLAMA, ropes=(ROPE,))
LAYER = LLAMA.layers[0]
LATENT = LatentSpec(num_heads=4, q_rank=None, kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8, scale=1.0)
FEED, XIELU = FeedSpec(intermediate_size=8), FeedSpec(intermediate_size=8, activation="xielu")
INPUTS = PerLayerInputs(rows=9, width=4, activation="silu", norm=NormSpec(), scale=1.0, projection_scale=1.0)
EXPERTS = MoeSpec(num_experts=4, top_k=2, expert=FEED, router=RouterSpec())


def changed(**fields: Any) -> DecoderSpec:
    """Llama, with one layer that differs."""
    return replace(LLAMA, layers=(LAYER, replace(LAYER, **fields)))


def attending(**fields: Any) -> DecoderSpec:
    return changed(mixer=replace(LLAMA.attention, **fields))


@pytest.mark.parametrize("backend", ["native", "torch", "triton"])
def test_every_backend_has_all_of_llama(backend: Any) -> None:
    assert missing(LLAMA, backend) == []


@pytest.mark.parametrize("backend", ["native", "torch", "triton"])
@pytest.mark.parametrize(
    "spec",
    [
        *(changed(mixer=RecurrentSpec(kind=kind)) for kind in ("gdn", "mamba2", "short_conv")),
        changed(mixer=None),
        changed(feed=None),
        attending(has_output_gate=True),
        replace(LLAMA, layers=(replace(LAYER, mixer=LATENT),)),
        attending(kv_of=0),
        attending(is_k_v=True),
        attending(v_norm=NormSpec(weight="none")),
        attending(head_dim=32, window=8),
        changed(has_output_scale=True),
        replace(LLAMA, embedding=EmbeddingSpec(per_layer=INPUTS)),
    ],
)
def test_every_backend_has_the_layers_of_hybrids_of_latents_and_of_gemma_4(spec: DecoderSpec, backend: Any) -> None:
    assert missing(spec, backend) == []


@pytest.mark.parametrize("backend", ["native", "torch", "triton"])
@pytest.mark.parametrize(
    ("spec", "gap"),
    [
        (changed(mixer=RecurrentSpec(kind="kda")), "recurrent layers: kda"),
        (replace(LLAMA, layers=(replace(LAYER, mixer=RecurrentSpec(kind="gdn")),)), "decoders without any attention"),
        (changed(mixer=LATENT), "latents beside keys and values"),
        (attending(value_dim=8), "values of 8 numbers beside keys of 16"),
        (attending(v_norm=NormSpec()), "a norm of values with a weight"),
        (attending(head_dim=32), "layers whose heads have different sizes"),
        (replace(LONGROPE, ropes=(ROPE, replace(ROPE, original_max_position=64))), "factors that change at several"),
        (replace(LONGROPE, embedding=EmbeddingSpec(positions=LearnedPositions(rows=64))), "learned positions beside"),
        (replace(LONGROPE, layers=attending(query_temper=(0.1, 8)).layers), "queries scaled by position beside"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_backend_has_is_named(spec: DecoderSpec, gap: str, backend: Any) -> None:
    assert gap in " ".join(missing(spec, backend))


@pytest.mark.parametrize(
    ("spec", "gap"),
    [
        (attending(has_alibi=True), "alibi"),
        (attending(chunk=16), "attention in chunks of positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_native_step_lacks_of_attention_is_named(spec: DecoderSpec, gap: str) -> None:
    assert missing(spec, "torch") == missing(spec, "triton") == []
    assert missing(spec, "native") == [gap]


@pytest.mark.parametrize(
    ("spec", "gap"),
    [
        (
            attending(qk_norm=QkNorm(norm=NormSpec(), over="row", when="after_rope")),
            "norms over rows of heads after the rotation",
        ),
        (attending(scale=0.0), "scores times 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_triton_lacks_is_named(spec: DecoderSpec, gap: str) -> None:
    assert missing(spec, "torch") == missing(spec, "native") == []
    assert missing(spec, "triton") == [gap]


@pytest.mark.parametrize(
    ("spec", "gap"),
    [
        (replace(LLAMA, head=HeadSpec(scale=-1.0)), "logits times -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_the_native_step_lacks_is_named_for_it(spec: DecoderSpec, gap: str) -> None:
    assert missing(spec, "native") == [gap] and missing(spec, "torch") == missing(spec, "triton") == []


@pytest.mark.parametrize(
    ("changes", "gap"),
    [
        ({}, None),
        ({"expert": FeedSpec(intermediate_size=8, activation="swiglu_clamped", has_bias=True)}, None),
        ({"shared": FEED, "dense_beside": FEED}, "shared experts beside another network"),
        ({"router": RouterSpec(input_norm=NormSpec())}, "a norm of what the router reads"),
        ({"own_norms": NormSpec()}, "norms of experts whose router has none"),
        ({"router": RouterSpec(input_norm=NormSpec(), has_expert_scale=True), "own_norms": NormSpec()}, None),
        ({"expert": FeedSpec(intermediate_size=8, activation="xielu")}, "experts with the activation xielu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_native_step_lacks_of_experts_is_named(changes: dict[str, Any], gap: str | None) -> None:
    assert missing(changed(feed=replace(EXPERTS, **changes)), "native") == [gap] * (gap is not None)


def test_equal_layers_are_one_object() -> None:
    assert len(set(map(id, LLAMA.layers))) == 1 and isinstance(LAYER, LayerSpec)


@pytest.mark.parametrize(
    ("changes", "gap"),
    [
        ({}, None),
        ({"shared": FEED, "dense_beside": FEED}, None),
        ({"router": RouterSpec(scales_input=True)}, "weights of experts that multiply their input"),
        ({"router": RouterSpec(input_norm=NormSpec(), has_expert_scale=True), "own_norms": NormSpec()}, None),
        ({"shared": XIELU}, "experts with the activation xielu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_torch_and_triton_lack_of_experts_is_named(changes: dict[str, Any], gap: str | None) -> None:
    spec = changed(feed=replace(EXPERTS, **changes))
    assert missing(spec, "torch") == missing(spec, "triton") == [gap] * (gap is not None)
