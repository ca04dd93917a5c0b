"""The size of weights, and what of them a token reads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from millrace.model.checkpoint.tensor_shapes import expected_shapes
from millrace.model.families.registry import parse_config
from millrace.model.spec import FeedSpec, MoeSpec, RouterSpec
from millrace.stages.backends.weight_use import num_idle_weights, weight_use
from tests.model.checkpoints import SHAPE

LLAMA = parse_config({"model_type": "llama", **SHAPE}, "")


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_token_reads_its_own_experts_only(is_gated: bool) -> None:
    expert = FeedSpec(intermediate_size=12, is_gated=is_gated, has_bias=True)
    moe = MoeSpec(num_experts=8, top_k=3, expert=expert, router=RouterSpec(), shared=FeedSpec(intermediate_size=6))
    spec = replace(LLAMA, layers=(LLAMA.layers[0], replace(LLAMA.layers[0], feed=moe)))
    of_experts = sum(math.prod(sizes) for name, sizes in expected_shapes(spec).items() if ".experts." in name)
    assert num_idle_weights(spec) == of_experts * 5 // 8 > 0 == num_idle_weights(LLAMA)


def test_a_token_reads_one_row_of_an_embedding_that_is_not_the_head() -> None:
    use = weight_use(LLAMA, 10_000, 100 * LLAMA.vocab_size, 2_000)
    assert not LLAMA.head.is_tied and use.bytes_per_token == 10_000 - 100 * (LLAMA.vocab_size - 1) - 2_000
