"""The rule of routing: by hand for each order that families have, and against transformers' routers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from millrace.kernels.reference.experts import route
from millrace.model.spec import RouterSpec

NORMED = RouterSpec(norm_top_k=True)  # Mixtral, Qwen3-MoE with norm_topk_prob
PLAIN = RouterSpec()  # Qwen2-MoE, OLMoE
CHOSEN_ONLY = RouterSpec(when="after_top_k")  # gpt-oss, Granite MoE
GROUPS: dict[str, Any] = {"groups": 4, "groups_kept": 2}
SIGMOID = RouterSpec(
    score="sigmoid", norm_top_k=True, norm_eps=1e-20, scale=1.5, has_choice_bias=True, group_score="top2", **GROUPS
)  # DeepSeek V3, GLM-4.5
BY_MAX = RouterSpec(scale=1.5, **GROUPS)  # DeepSeek V2
BIASED = RouterSpec(norm_top_k=True, norm_min=1e-12, has_choice_bias=True)  # Ernie 4.5


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (NORMED, [4 / 7, 2 / 7, 1 / 7]),
        (PLAIN, [0.5, 0.25, 0.125]),
        (CHOSEN_ONLY, [4 / 7, 2 / 7, 1 / 7]),
        (RouterSpec(scale=2.0), [1.0, 0.5, 0.25]),
        (RouterSpec(norm_top_k=True, norm_min=1.75), [2 / 7, 1 / 7, 1 / 14]),
    ],
)
def test_weights_of_powers_of_two_are_those_of_the_order(rule: RouterSpec, weights: list[float]) -> None:
    shares = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625]])
    for logits in (shares.log(), shares.log() - 90):  # all of them far below 0 as well
        ids, found = route(logits, rule, 3)
        assert ids.tolist() == [[1, 3, 0]]
        torch.testing.assert_close(found, torch.tensor([weights]), rtol=1e-5, atol=0)


def test_sigmoid_weighs_by_scores_without_the_bias_that_chooses() -> None:
    scores = torch.tensor([[0.2, 0.6, 0.4, 0.5]])
    rule = RouterSpec(score="sigmoid", has_choice_bias=True, norm_top_k=True, scale=3.0)
    ids, weights = route(torch.logit(scores), rule, 2, torch.tensor([1.0, 0.0, 0.3, 0.0]))
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0]]))


def test_groups_are_chosen_by_their_best_or_by_the_sum_of_two() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.5, 0.2]])
    by_best = RouterSpec(score="sigmoid", groups=3, groups_kept=1)
    by_two = RouterSpec(score="sigmoid", groups=3, groups_kept=1, group_score="top2")
    assert route(torch.logit(scores), by_best, 2)[0].tolist() == [[0, 1]]
    assert route(torch.logit(scores), by_two, 2)[0].tolist() == [[2, 3]]


@pytest.mark.parametrize("rule", [NORMED, PLAIN, CHOSEN_ONLY, SIGMOID, BY_MAX, BIASED])
@pytest.mark.parametrize("logit", [0.0, -30.0, 20.0])
def test_of_equal_experts_and_groups_the_lower_index_goes_first(rule: RouterSpec, logit: float) -> None:
    bias = torch.zeros(8) if rule.has_choice_bias else None
    ids, weights = route(torch.full((3, 8), logit), rule, 3, bias)
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert torch.equal(weights, weights[:, :1].expand(3, 3)) and bool(weights.gt(0).all())


def test_two_best_are_taken_before_ties_behind_them() -> None:
    assert route(torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0]]), PLAIN, 4)[0].tolist() == [[1, 3, 0, 2]]


def test_logits_decide_where_their_exponentials_are_equal() -> None:
    close = torch.tensor([[-200.0, 0.0, -150.0, -199.0]])  # all but one have the probability 0
    assert route(close, PLAIN, 4)[0].tolist() == [[1, 2, 3, 0]]


def test_no_tokens_go_to_no_experts() -> None:
    ids, weights = route(torch.zeros(0, 8), SIGMOID, 3, torch.zeros(8))
    assert ids.shape == weights.shape == (0, 3)


CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "moe_norm_min": 1e-12,
}
ROUTERS: list[tuple[type[nn.Module], dict[str, Any], RouterSpec]] = [
    (MixtralTopKRouter, {}, NORMED),
    (Qwen2MoeTopKRouter, {"norm_topk_prob": True}, NORMED),
    (Qwen2MoeTopKRouter, {"norm_topk_prob": False}, PLAIN),
    (GptOssTopKRouter, {}, CHOSEN_ONLY),
    (GraniteMoeTopKRouter, {}, CHOSEN_ONLY),
    (Glm4MoeTopkRouter, {"norm_topk_prob": True}, SIGMOID),
    (DeepseekV2TopkRouter, {"topk_method": "group_limited_greedy"}, BY_MAX),
    (Ernie4_5_MoeTopKRouter, {}, BIASED),
]


@pytest.mark.parametrize("shift", [0.0, -60.0])
@pytest.mark.parametrize(("kind", "keys", "rule"), ROUTERS, ids=lambda value: getattr(value, "__name__", ""))
def test_experts_and_weights_are_those_of_transformers(
    kind: type[nn.Module], keys: dict[str, Any], rule: RouterSpec, shift: float
) -> None:
    torch.manual_seed(0)
    router, logits = kind(SimpleNamespace(**CONFIG, **keys)), torch.randn(33, 8) * 2 + shift
    bias = torch.randn(8) * 0.2 * (shift == 0) if rule.has_choice_bias else None
    with torch.no_grad():
        router.weight.copy_(torch.eye(8))
        for name, buffer in [*router.named_buffers(), *router.named_parameters()]:
            if name.endswith("correction_bias"):
                assert bias is not None
                buffer.copy_(bias.view_as(buffer))
        _, weights, ids = router(logits)
    found, found_weights = route(logits, rule, 3, bias)
    torch.testing.assert_close(by_expert(found, found_weights), by_expert(ids, weights), rtol=1e-5, atol=0)


def by_expert(ids: Tensor, weights: Tensor) -> Tensor:
    """The weights of all experts, [T, E], 0 of those that were not chosen."""
    return torch.zeros(len(ids), 8).scatter_(1, ids, weights)
