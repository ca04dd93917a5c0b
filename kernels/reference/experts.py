"""Experts in plain PyTorch: which of them a token goes to, by the one rule of every backend, and the sum of those.

Rows are grouped by expert, with one product for each expert that some token goes to. The number of rows of each is read
by the host, so such a step cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.experts import RoutedExperts
from ..layout.layer_options import RoutingRule
from .products import activated_linear, gated_linear


def routed_experts(x: Tensor, logits: Tensor, experts: RoutedExperts) -> Tensor:
    """See `ExpertKernels.routed_experts`."""
    ids, shares = route(logits, experts.rule, experts.top_k, experts.choice_bias)
    if experts.scales is not None:
        shares = shares * experts.scales[ids]
    parts = _pairs(x, ids, experts)  # [T, k, K]
    total = parts[:, 0].float() * shares[:, :1]
    for rank in range(1, experts.top_k):
        total += parts[:, rank].float() * shares[:, rank : rank + 1]
    return total


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


def _pairs(x: Tensor, ids: Tensor, experts: RoutedExperts) -> Tensor:
    """The output [T, k, K] of each token's experts, for ids [T, k]."""
    num_tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)  # pairs of token and rank by expert, an expert's in the order of tokens
    rows = x.index_select(0, order // top_k)
    counts = torch.bincount(flat, minlength=len(experts.each)).tolist()
    found = [_feed(experts, index, part) for index, part in enumerate(rows.split_with_sizes(counts)) if len(part)]
    pairs = torch.empty_like(rows)
    if found:
        pairs[order] = torch.cat(found)
    return pairs.view(num_tokens, top_k, x.shape[1])


def _feed(experts: RoutedExperts, index: int, x: Tensor) -> Tensor:
    """The network of one expert of x [M, K]; as x."""
    gate_up, down = experts.each[index]
    if not experts.is_gated:
        return down(activated_linear(x, None, gate_up, experts.activation))
    return down(gated_linear(x, None, gate_up, experts.activation, experts.alpha, experts.limit))


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
