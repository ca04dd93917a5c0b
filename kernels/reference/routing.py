"""Which experts a token goes to, and with what weights: the one rule that every backend computes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.layer_options import RoutingRule


def route(logits: Tensor, rule: RoutingRule, top_k: int, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first.

    logits       [T, E] f32   of the router, its bias included
    choice_bias  [E] f32      added to the scores to choose experts, not to weigh them; None = 0

    Returns ids [T, top_k] i64 and weights [T, top_k] f32. Of equal experts, and of equal groups, the lower index goes
    first. Only experts of the best `rule.groups_kept` of `rule.groups` groups, which are runs of equal length, are
    chosen: by the largest score of a group, or by the sum of its two largest.

    NOTE: both score functions rise with the logit. So where nothing is added to scores the logits choose, and no
    rounding of an exponential decides between two experts.
    """
    is_plain = choice_bias is None and (rule.groups == 1 or rule.group_score == "max")
    if rule.score == "softmax" and rule.when == "after_top_k":
        ids = _largest(logits, top_k)
        return ids, torch.softmax(logits.gather(1, ids), -1) * rule.scale
    scores = torch.sigmoid(logits) if rule.score == "sigmoid" else torch.softmax(logits, -1)
    choice = logits if is_plain else scores if choice_bias is None else scores + choice_bias
    if rule.groups > 1:
        choice = _in_best_groups(choice, rule)
    ids = _largest(choice, top_k)
    weights = scores.gather(1, ids)
    if rule.norm_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.norm_eps).clamp(min=rule.norm_min)
    return ids, weights * rule.scale


def _in_best_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    """`choice` [T, E] with -inf outside of the best groups."""
    num_tokens, num_experts = choice.shape
    grouped = choice.view(num_tokens, rule.groups, num_experts // rule.groups)
    num_scores = min({"max": 1, "top2": 2}[rule.group_score], grouped.shape[-1])
    best = grouped.topk(num_scores, -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, rule.groups_kept), True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).view_as(choice)


def _largest(numbers: Tensor, count: int) -> Tensor:
    """Where the largest of each row are, [T, count] i64; `topk` gives equals in any order."""
    return numbers.sort(dim=-1, descending=True, stable=True).indices[:, :count]
