"""The native step of models of any sizes: drawn shapes, types, blocks and cuts, against the definition in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from tests.counts import count, first_seed
from tests.kernels.native.test_native import AVAILABLE, SETS, error, tokens
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")


def drawn_size(draw: random.Random) -> int:
    """Of what is summed: of any, or as many as panels lie in streams for, of which some do not fill them."""
    return draw.choice([draw.randrange(2, 140, 2), draw.randrange(256, 300, 4)])


def drawn_shape(draw: random.Random) -> dict[str, Any]:
    head_dim, num_kv_heads = draw.choice([2, 6, 14, 26, 48, 80, 96, 130]), draw.choice([1, 2, 3])
    return {
        "head_dim": head_dim,
        "rotary_dim": draw.randrange(2, head_dim + 1, 2),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * draw.randint(1, 9),
        "hidden_size": drawn_size(draw),
        "intermediate_size": drawn_size(draw),
        "vocab_size": 70 + draw.randrange(40),
        "num_layers": 2,
        "sliding_windows": (draw.choice([None, 1, 5, 40, 257]), None),
        "is_tied": draw.random() < 0.5,
        "has_bias": draw.random() < 0.5,
        "has_qk_norm": draw.random() < 0.3,
    }


def drawn_form(draw: random.Random) -> dict[str, Any]:
    return {
        "dtype": draw.choice(["float32", "bfloat16"]),
        "quantization": draw.choice([None, None, "int8", "int4"]),
        "group_size": draw.choice([2, 6, 20, 32, 200, 256]),
        "cache_dtype": draw.choice([None, None, "int8"]),
        "num_threads": draw.randint(1, 4),
        "worth_a_thread": 1,
    }


@pytest.mark.parametrize("instruction_set", SETS)
def test_logits_of_any_shape_are_those_of_float64_and_the_same_bits_however_a_prompt_is_cut(
    instruction_set: str,
) -> None:
    for seed in range(first := first_seed(), first + count(16, 1_000)):
        draw = random.Random(seed)
        shape, form = drawn_shape(draw), drawn_form(draw)
        made = Checkpoint.random(seed=seed, **shape)
        model = made.load(instruction_set=instruction_set, **form)
        prompt = tokens(draw.choice([1, 13, 30, 300]), seed)
        cuts = [draw.choice([1, 1, 2, 7, 12, 13, 24, 40]) for _ in range(40)]
        block_sizes = [draw.choice([1, 2, 4, 8, 16, 24, 32, 48]) for _ in range(2)]
        whole, cut = (Run(model, size).whole(prompt, each) for size, each in zip(block_sizes, ([], cuts), strict=True))
        described = f"seed {seed}: {shape} {form} blocks of {block_sizes}, {len(prompt)} tokens, cuts {cuts}"
        assert np.array_equal(whole, cut), described
        begin, last_only = 0, Run(model, block_sizes[0])
        for size in (*cuts, len(prompt)):
            if part := prompt[begin : begin + size]:
                begin += len(part)
                (logits,) = last_only.step({0: part}, {0: [len(part) - 1]})[0]
                assert np.array_equal(logits, whole[begin - 1]), described
        exact = made.kept_by(model).logits(prompt)
        near = 0.05 if form["dtype"] == "bfloat16" else 0.01 if form["cache_dtype"] == "int8" else 1e-5
        assert error(whole, exact) < near, described
