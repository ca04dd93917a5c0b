"""The probe lets a model through that gives its own logits on the paged cache, and refuses any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.kernels.reference import kernel_set
from millrace.model.fallback import paged_layers as paged_layers_module
from millrace.model.fallback import probe as probe_module
from millrace.model.fallback.attention_interface import AttentionCall
from millrace.model.fallback.errors import UnservableError
from millrace.model.fallback.paged_layers import PagedStep
from millrace.model.fallback.probe import probe
from tests.model.fallback.tiny_models import KINDS, LONGEST, loaded, make_model


@pytest.mark.parametrize("model_type", KINDS)
def test_a_model_on_the_paged_cache_passes(model_type: str) -> None:
    model = loaded(make_model(model_type))
    probe(model, kernel_set, LONGEST)
    assert getattr(model.model.config, "sliding_window", None) in (None, 24), "the windows are as before"


@pytest.mark.parametrize("model_type", ["gpt_oss", "llama4_text"])
def test_a_model_in_half_precision_passes(model_type: str) -> None:
    probe(loaded(make_model(model_type, dtype=torch.bfloat16)), kernel_set, LONGEST)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gpt_oss", {"sinks": None}),
        ("gemma3n_text", {"scale": 0.5}),
        ("deepseek_v3", {"scale": 1.0}),
    ],
)
def test_attention_with_another_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, model_type: str, change: dict[str, Any]
) -> None:
    attend = PagedStep.__call__
    monkeypatch.setattr(PagedStep, "__call__", lambda step, call: attend(step, replace(call, **change)))
    with pytest.raises(UnservableError, match="a prompt computed in parts differs from the same prompt computed whole"):
        probe(loaded(make_model(model_type)), kernel_set, LONGEST)


@pytest.mark.parametrize("model_type", ["gpt_oss", "phimoe", "llama4_text"])
def test_a_window_or_chunk_that_is_not_the_models_is_refused(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    model = loaded(make_model(model_type))
    monkeypatch.setattr(
        probe_module,
        "paged_layers",
        lambda calls, config: tuple(
            replace(layer, window=None, chunk=None) for layer in paged_layers_module.paged_layers(calls, config)
        ),
    )
    with pytest.raises(UnservableError, match="differs from the same prompt computed whole"):
        probe(model, kernel_set, LONGEST)


def mixing(change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A model whose last layer changes the hidden states [1, T, hidden] of a step."""
    model = make_model("qwen3_moe")
    model.model.layers[-1].register_forward_hook(lambda module, args, output: change(output))
    return model


def test_a_layer_that_mixes_the_tokens_of_a_step_is_refused() -> None:
    with pytest.raises(UnservableError, match="differs from the same prompt computed whole"):
        probe(loaded(mixing(lambda hidden: hidden + 0.1 * hidden.cumsum(1))), kernel_set, LONGEST)


def test_a_layer_that_reads_the_token_before_is_refused() -> None:
    with pytest.raises(UnservableError, match="differs from the same prompt computed whole"):
        probe(loaded(mixing(lambda hidden: hidden + 0.5 * hidden.roll(1, 1))), kernel_set, LONGEST)


def test_numbers_that_follow_the_row_of_a_token_are_refused() -> None:
    model = loaded(make_model("llama4_text", floor_scale=100))
    probe(model, kernel_set, 99)
    with pytest.raises(UnservableError, match="depend on a token's row in a step"):
        probe(model, kernel_set, 101)


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UnservableError, match="logits are not finite"):
        probe(loaded(mixing(lambda hidden: hidden * float("inf"))), kernel_set, LONGEST)


def test_other_calls_in_another_step_are_noticed() -> None:
    model = loaded(make_model("qwen3_moe"))
    step = PagedStep(model.layers, None, None, kernel_set)  # type: ignore[arg-type]
    with pytest.raises(UnservableError, match="in another order"):
        step(replace_module(model.calls[1]))
    with pytest.raises(UnservableError, match="a step makes 0 of its 2 attention calls"):
        step.finish()


def replace_module(call: AttentionCall) -> AttentionCall:
    return replace(call, module=torch.nn.Identity())
