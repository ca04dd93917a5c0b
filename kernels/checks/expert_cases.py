"""The launches of experts that the checks compile: layers of OLMoE, Qwen3-30B-A3B, gpt-oss and DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..layout.experts import CodedMatrices, ExpertStack, RoutedExperts
from ..layout.layer_options import Activation
from ..triton.experts.launches import routed_experts
from .compile_cases import TYPE_NAMES, CompileCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A `RoutingRule`: Qwen3's."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    when: Literal["before_top_k", "after_top_k"] = "before_top_k"
    norm_top_k: bool = True
    norm_eps: float = 0.0
    norm_min: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"


DEEPSEEK = Rule(score="sigmoid", norm_eps=1e-20, scale=2.5, groups=8, groups_kept=4, group_score="top2")
LAYERS: dict[str, dict[str, Any]] = {
    "OLMoE": {"sizes": (64, 2048, 1024), "top_k": 8, "rule": Rule(norm_top_k=False)},
    "30B-A3B": {"sizes": (128, 2048, 768), "top_k": 8, "rule": Rule()},
    "gpt-oss": {
        "sizes": (32, 2880, 2880),
        "top_k": 4,
        "rule": Rule(when="after_top_k"),
        "activation": "swiglu_clamped",
        "has_bias": True,
    },
    "DeepSeek-V3": {"sizes": (256, 7168, 2048), "top_k": 8, "rule": DEEPSEEK, "has_choice_bias": True},
    "no gate": {"sizes": (512, 1040, 2688), "top_k": 22, "rule": Rule(), "is_gated": False, "activation": "relu2"},
}
TOKENS = (1, 64, 256, 2048)


def expert_cases(
    dtype: torch.dtype, names: Sequence[str] = tuple(LAYERS), tokens: Sequence[int] = TOKENS
) -> list[CompileCase]:
    """Each layer for each number of tokens, then the options that are for any number."""
    name = TYPE_NAMES[dtype]
    cases = [
        CompileCase(f"experts {layer} {count} {name}", partial(_launch, count, dtype, **LAYERS[layer]))
        for layer in names
        for count in tokens
    ]
    if dtype != torch.float32:
        cases += [
            CompileCase(
                f"experts in codes {form} {count} {name}", partial(_launch, count, dtype, codes=form, **LAYERS[layer])
            )
            for form, layer in (("e2m1", "gpt-oss"), ("zeros", "30B-A3B"), ("int8", "OLMoE"))
            for count in tokens
            if layer in names
        ]
    return [
        *cases,
        CompileCase(f"experts fixed {name}", partial(_launch, 64, dtype, is_batch_invariant=True, **LAYERS["30B-A3B"])),
    ]


def _launch(
    num_tokens: int,
    dtype: torch.dtype,
    *,
    sizes: tuple[int, int, int],
    top_k: int,
    rule: Rule,
    activation: Activation = "silu",
    is_gated: bool = True,
    has_bias: bool = False,
    has_choice_bias: bool = False,
    is_batch_invariant: bool = False,
    codes: str = "",
) -> Tensor:
    num_experts, width, inner = sizes
    num_rows = inner * (1 + is_gated)
    stack = ExpertStack(
        gate_up=_coded(codes, num_experts, num_rows, width)
        if codes
        else _meta(num_experts, num_rows, width, dtype=dtype),
        gate_up_bias=_meta(num_experts, num_rows, dtype=dtype) if has_bias else None,
        down=_coded(codes, num_experts, width, inner) if codes else _meta(num_experts, width, inner, dtype=dtype),
        down_bias=_meta(num_experts, width, dtype=dtype) if has_bias else None,
    )
    experts = RoutedExperts(
        rule=rule,
        top_k=top_k,
        choice_bias=_meta(num_experts, dtype=torch.float32) if has_choice_bias else None,
        scales=_meta(num_experts, dtype=torch.float32) if has_choice_bias else None,
        is_gated=is_gated,
        activation=activation,
        stack=stack,
        is_batch_invariant=is_batch_invariant,
    )
    x, logits = _meta(num_tokens, width, dtype=dtype), _meta(num_tokens, num_experts, dtype=torch.float32)
    return routed_experts(x, logits, experts)


def _coded(form: str, *shape: int) -> CodedMatrices:
    is_packed, group = form != "int8", 128 if form == "zeros" else 32
    groups = (*shape[:2], -(-shape[2] // group))
    return CodedMatrices(
        codes=_meta(*shape[:2], shape[2] // (1 + is_packed), dtype=torch.uint8),
        scales=_meta(*groups, dtype=torch.float16),
        zeros=_meta(*groups, dtype=torch.uint8) if form == "zeros" else None,
        offsets=_meta(*groups, dtype=torch.float32) if form == "int8" else None,
        table=_meta(16, dtype=torch.float32) if form == "e2m1" else None,
        zero=128.0 if form == "int8" else 0.0,
        group=group,
        num_columns=shape[2],
        is_packed=is_packed,
    )


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
