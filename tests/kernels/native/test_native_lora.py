"""Adapters in the native step: against checkpoints in float64 with the updates merged in, and against themselves.

No bit of a row depends on the adapters of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build
from millrace.kernels.native.lora import NativeLoraSlice, PackedAdapter
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType, NativeExperts
from tests.counts import FULL
from tests.kernels.native.test_native import AVAILABLE, DTYPES, SETS, error, tokens
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array, round_to_bfloat16

pytestmark = pytest.mark.skipif(not AVAILABLE or build.find_compiler() is None, reason="no AVX2, or no C++ compiler")

PARTS = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}  # of each product
RANKS = (1, 3, 8, 17, 64, 256)
# Rows of the products of odd sizes: heads and the width of the feed end amid a vector.
ODD: dict[str, Any] = {"head_dim": 26, "rotary_dim": 26, "num_heads": 3, "num_kv_heads": 1, "hidden_size": 46}
SHAPES: dict[str, dict[str, Any]] = {
    "even sizes": {},
    "odd sizes": {**ODD, "intermediate_size": 74, "is_tied": False, "has_bias": True},
    "no gate, side by side": {
        "layer": {"is_gated": False, "activation": "gelu", "is_parallel": True, "pre_feed": None}
    },
    "norms behind, scaled": {"layer": {"residual_scale": 0.5}, "hidden_size": 96},
    "beside experts": {"layer": {"experts": NativeExperts(num_experts=3, top_k=3, intermediate_size=24)}},
}


@dataclass(eq=False)
class Update:
    """A random adapter by the names of the matrices it changes: (a, b) of each, as bfloat16 holds them."""

    matrices: dict[str, tuple[Array, Array]]

    @classmethod
    def random(cls, checkpoint: Checkpoint, rank: int, seed: int, leaves_out: tuple[str, ...] = ()) -> Update:
        draw = np.random.default_rng(seed)

        def normal(*sizes: int) -> Array:
            return round_to_bfloat16((draw.standard_normal(sizes) * rank**-0.25).astype(np.float32) / 4)

        names = [name for name in checkpoint.tensors if name.endswith("_proj.weight") and ".experts." not in name]
        chosen = [name for name in names if not any(part in name for part in leaves_out)]
        sizes = {name: checkpoint.tensors[name].shape for name in chosen}
        return cls({name: (normal(rank, k), normal(n, rank)) for name, (n, k) in sizes.items()})

    def merged(self, checkpoint: Checkpoint) -> Checkpoint:
        tensors = dict(checkpoint.tensors)
        for name, (a, b) in self.matrices.items():
            tensors[name] = tensors[name] + b.astype(np.float64) @ a.astype(np.float64)
        return replace(checkpoint, tensors=tensors)

    def packed(self, checkpoint: Checkpoint, model: NativeModel) -> PackedAdapter:
        slices, in_dtype = [], (lambda x: x) if model.dtype == "float32" else _in_two_bytes
        for layer in range(checkpoint.shape.num_layers):
            for target, parts in PARTS.items():
                row_start = 0
                for part in parts:
                    name = f"model.layers.{layer}.{'self_attn' if len(part) == 1 else 'mlp'}.{part}_proj.weight"
                    if name not in checkpoint.tensors:
                        continue
                    if name in self.matrices:
                        a, b = (np.ascontiguousarray(in_dtype(x)) for x in self.matrices[name])
                        slices.append(NativeLoraSlice(layer, target, row_start, a, b))
                    row_start += len(checkpoint.tensors[name])
        return model.pack_adapter(slices)


def _in_two_bytes(x: Array) -> Array:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


@cache
def checkpoint(name: str = "even sizes") -> Checkpoint:
    return Checkpoint.random(**SHAPES[name])


def load(updates: list[Update], of: Checkpoint, dtype: DType, **settings: Any) -> NativeModel:
    """A model with the updates in slots 1 and on."""
    model = of.load(dtype, **{"num_threads": 2, "worth_a_thread": 1, **settings})
    model.reserve_adapters(len(updates), 8)  # adapters of a larger rank make room
    for slot, update in enumerate(updates, 1):
        model.use_adapter(slot, update.packed(of, model))
    return model


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_adapters_of_any_rank_compute_what_merged_weights_do(name: str, instruction_set: str) -> None:
    base = checkpoint(name)
    ranks = RANKS if FULL else RANKS[:4] if name == "even sizes" else (3, 64)
    updates = [Update.random(base, rank, rank, ((), ("k_proj", "up"), ("o_proj", "q_"))[rank % 3]) for rank in ranks]
    prompts = {sequence: tokens(33 if sequence % 2 else 3, sequence) for sequence in range(len(updates) + 1)}
    exact = [(updates[slot - 1].merged(base) if slot else base).logits(prompts[slot]) for slot in prompts]
    for dtype, most in (("float32", 4e-6), ("bfloat16", 0.02)):
        model = load(updates, base, dtype, instruction_set=instruction_set)  # type: ignore[arg-type]
        run = Run(model, adapters={slot: slot for slot in prompts})
        run.step({slot: prompt[:-1] for slot, prompt in prompts.items()})
        run.step({slot: prompt[-1:] for slot, prompt in prompts.items()})
        for slot in prompts:
            assert error(np.array(run.logits[slot]), exact[slot]) < most, (slot, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", SETS)
def test_no_bit_of_a_row_depends_on_the_adapters_of_others(dtype: DType, instruction_set: str) -> None:
    """33 sequences of 8 adapters and the base: decoded together and beside prompts, and each alone."""
    base = checkpoint()
    updates = [Update.random(base, rank, i) for i, rank in enumerate((1, 3, 8, 17, 16, 16, 64, 2))]
    model = load(updates, base, dtype, instruction_set=instruction_set)
    plain = base.load(dtype, instruction_set=instruction_set, num_threads=2, worth_a_thread=1)
    slots = {sequence: (sequence * 5) % 9 for sequence in range(33)}
    prompts = {sequence: tokens(4 + sequence % 5, sequence) for sequence in slots}
    for is_split in (False, True):
        model.in_library.assume_split(is_split)
        together = Run(model, adapters=slots)
        together.step({s: prompts[s][:-3] for s in slots})
        for back in (3, 2, 1):  # rows that decode, the last beside a prompt
            parts = {s: [prompts[s][-back]] for s in slots}
            together.step(parts | ({100: tokens(7)} if back == 1 else {}))
        for sequence, slot in slots.items():
            if sequence % 3 == 0 or FULL:
                alone = Run(model, adapters={0: slot}) if slot else Run(plain)
                assert np.array_equal(alone.whole(prompts[sequence], (1, 2)), together.logits[sequence]), (
                    sequence,
                    slot,
                )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("instruction_set", SETS)
def test_adapters_of_quantized_bases_are_added_to_their_products(quantization: Any, instruction_set: str) -> None:
    base, settings = checkpoint(), {"quantization": quantization, "instruction_set": instruction_set}
    updates = [Update.random(base, rank, rank) for rank in (8, 3)]
    slots = {sequence: sequence % 3 for sequence in range(14)}  # more rows than a thread splits for itself
    prompts = {sequence: tokens(9, sequence) for sequence in slots}
    for dtype, most in (("float32", 2e-4), ("bfloat16", 0.03)):
        model = load(updates, base, dtype, **settings)  # type: ignore[arg-type]
        together = Run(model, adapters=slots)
        together.step({s: prompts[s][:-1] for s in slots})
        together.step({s: prompts[s][-1:] for s in slots})
        kept = base.kept_by(model)
        for sequence in (0, 1, 2, 13):
            slot = slots[sequence]
            exact = (updates[slot - 1].merged(kept) if slot else kept).logits(prompts[sequence])
            assert error(np.array(together.logits[sequence]), exact) < most, (slot, dtype)
            alone = Run(model, adapters={0: slot})
            assert np.array_equal(alone.whole(prompts[sequence], (4,)), together.logits[sequence])


def test_slices_that_share_a_matrix_share_its_sums_and_a_slot_can_be_used_again() -> None:
    base = checkpoint()
    update = Update.random(base, 16, 1, ("o_proj", "gate", "up", "down", "k_proj", "v_proj"))
    model = load([update, update], base, "float32")
    (a, b) = update.matrices["model.layers.0.self_attn.q_proj.weight"]
    halves = [NativeLoraSlice(0, "qkv", start, a, np.ascontiguousarray(b[start : start + 96])) for start in (0, 96)]
    (a_1, b_1) = update.matrices["model.layers.1.self_attn.q_proj.weight"]
    shared = model.pack_adapter([*halves, NativeLoraSlice(1, "qkv", 0, a_1, b_1)])
    apart = model.pack_adapter([replace(halves[0], a=a.copy()), halves[1], NativeLoraSlice(1, "qkv", 0, a_1, b_1)])
    wanted = Run(model, adapters={0: 1}).whole(tokens(20))
    for other in (shared, apart):
        model.use_adapter(2, other)
        assert np.array_equal(Run(model, adapters={0: 2}).whole(tokens(20)), wanted)
    assert shared.num_bytes < apart.num_bytes
    model.use_adapter(2, None)
    for slot in (2, 3, -1):
        with pytest.raises(ValueError, match="adapter slot is empty, or past those"):
            Run(model, adapters={0: slot}).whole(tokens(3))
