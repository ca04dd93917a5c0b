"""Experts by torch: against a loop over tokens, in any batch, in shares of ranks, and what a step of them allocates."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from millrace.kernels import kernel_set
from millrace.kernels.reference.experts import route
from millrace.model.decoder.experts import Experts, ExpertWeights
from millrace.model.decoder.memory_estimate import _of_experts
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import parse_config
from millrace.model.sharding.shard import RankShare, spec_of
from millrace.model.spec import DecoderSpec, MoeSpec
from tests.model.checkpoints import SHAPE

SIZES: dict[str, Any] = {**SHAPE, "num_hidden_layers": 1, "moe_intermediate_size": 37, "num_experts_per_tok": 3}
SPECS = {
    "mixtral": parse_config({"model_type": "mixtral", **SIZES, "num_local_experts": 8}, ""),
    "qwen2_moe": parse_config(
        {"model_type": "qwen2_moe", **SIZES, "num_experts": 8, "shared_expert_intermediate_size": 21}, ""
    ),
    "gpt_oss": parse_config({"model_type": "gpt_oss", **SIZES, "num_local_experts": 8}, ""),
}
KERNELS = kernel_set.load("torch")


def weights_of(spec: DecoderSpec, **options: Any) -> ExpertWeights:
    loaded = load_weights(Path(), spec, torch.device("cpu"), torch.float32, "dummy", **options)
    return loaded.layers[0].experts[0]


def moe_of(spec: DecoderSpec) -> MoeSpec:
    (moe,) = spec.mixtures
    return moe


@torch.inference_mode()
def by_hand(moe: MoeSpec, weights: ExpertWeights, x: Tensor) -> Tensor:
    """One token after another, each expert by itself."""
    experts = Experts(moe, weights, KERNELS)
    ids, shares = route(weights.router(x), moe.router, moe.top_k, weights.choice_bias)
    rows = []
    for row, chosen, share in zip(x.split(1), ids.tolist(), shares.tolist(), strict=True):
        total = sum(s * experts._feed(moe.expert, weights.experts[e], row) for e, s in zip(chosen, share, strict=True))
        if moe.shared is not None and weights.shared is not None and weights.shared_router is not None:
            total = total + torch.sigmoid(weights.shared_router(row)) * experts._feed(moe.shared, weights.shared, row)
        rows.append(total)
    return torch.cat(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SPECS)
def test_rows_grouped_by_expert_give_what_each_token_gives_alone(name: str) -> None:
    spec = SPECS[name]
    moe, weights, x = moe_of(spec), weights_of(spec), 20 * torch.randn(23, spec.hidden_size)
    found = Experts(moe, weights, KERNELS)(x)
    torch.testing.assert_close(found, by_hand(moe, weights, x), rtol=1e-4, atol=1e-5)
    assert Experts(moe, weights, KERNELS)(x[:0]).shape == (0, spec.hidden_size)


@torch.inference_mode()
def test_a_token_has_the_same_bits_in_every_batch() -> None:
    spec = SPECS["qwen2_moe"]
    experts = Experts(moe_of(spec), weights_of(spec, is_batch_invariant=True), KERNELS)
    x = 20 * torch.randn(131, spec.hidden_size)
    whole = experts(x)
    for part in (x[:1], x[:2], x[5:70], x.flip(0)[:66]):
        rows = [int((x == row).all(1).nonzero()) for row in part]
        assert torch.equal(experts(part), whole[rows])


@pytest.mark.parametrize("name", SPECS)
@torch.inference_mode()
def test_the_shares_of_ranks_add_up_to_the_whole(name: str) -> None:
    spec, x = SPECS[name], 20 * torch.randn(9, 64)
    whole = Experts(moe_of(spec), weights_of(spec), KERNELS)(x)
    parts = [
        Experts(moe_of(spec_of(spec, shard)), weights_of(spec, shard=shard), KERNELS)(x)
        for shard in (RankShare(rank, 3) for rank in range(3))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_step_of_experts_takes_at_most_what_is_foreseen() -> None:
    spec, num_tokens = SPECS["qwen2_moe"], 400
    experts, x = Experts(moe_of(spec), weights_of(spec), KERNELS), torch.randn(num_tokens, 64)
    experts(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        experts(x)
    events = sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    most = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    assert most <= num_tokens * _of_experts(spec, moe_of(spec), 4, 4) <= 3 * most
