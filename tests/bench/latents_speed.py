"""What a step of one row over latents takes on a CPU, natively and by torch, beside the bytes that it must read.

    python -m tests.bench.latents_speed [--context 16384] [--layers 3] [--rounds 3] [--only native|torch]

The attention of DeepSeek V2-Lite in layers with a small dense network, random weights and a cache of random numbers, in
bfloat16. `attention_gb_s` is the bytes of the cache, one row a token and layer, over the least time of attention. What
memory gives is read in the same round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.kernels import kernel_set
from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import NativeModel
from millrace.model.checkpoint.tensor_shapes import expected_shapes, open_source
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.native_decoder import native_shape
from millrace.model.decoder.rope import rope_tables
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import read_spec
from millrace.model.spec import DecoderSpec
from tests.bench.throughput import read_bandwidth_gb_s

BLOCK_SIZE, STEPS = 16, 9
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
}


class Native:
    """A step of the last token of a context by the library."""

    def __init__(self, folder: Path, spec: DecoderSpec, context: int) -> None:
        tables = [rope_tables(rope, context) for rope in spec.ropes]
        self.model = NativeModel(native_shape(spec), "bfloat16", tables, context)
        source, _ = open_source(folder, spec, "dummy")
        for name in expected_shapes(spec):
            self.model.weights.set_tensor(name, source.array(name))
        num_blocks = -(-context // BLOCK_SIZE)
        self.cache = NativeCache.uniform(self.model.shape, num_blocks, BLOCK_SIZE, "bfloat16")
        numbers = np.random.default_rng(0).standard_normal(self.cache.memory.shape, dtype=np.float32)
        self.cache.memory[:] = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        self.inputs: dict[str, Any] = {
            "input_ids": np.array([5]),
            "positions": np.array([context - 1]),
            "slot_mapping": np.array([context - 1]),
            "block_tables": np.arange(num_blocks, dtype=np.int32)[None],
            "query_starts": np.array([0, 1], np.int32),
            "lengths": np.array([context], np.int32),
            "logits_rows": np.array([0]),
            "logits": np.empty((1, spec.vocab_size), np.float32),
        }
        self.phases = self.model.time_phases()

    def step(self) -> None:
        self.model.step(self.cache, **self.inputs)

    def attention_s(self) -> float:
        """The least of a step's attention."""
        found = []
        for _ in range(STEPS):
            self.phases[:] = 0
            self.step()
            found.append(int(self.phases[1]))
        return min(found) / 1e9


def torch_step(folder: Path, spec: DecoderSpec, context: int) -> Callable[[], object]:
    """The same step by torch."""
    device, num_blocks = torch.device("cpu"), -(-context // BLOCK_SIZE)
    weights = load_weights(folder, spec, device, torch.bfloat16, "dummy")
    decoder = Decoder(spec, weights, kernel_set.load("torch"), context)
    cache = KVCache(spec, num_blocks, BLOCK_SIZE, torch.bfloat16, device)
    cache.data.normal_()
    inputs = StepInputs(
        input_ids=torch.tensor([5]),
        positions=torch.tensor([context - 1]),
        slot_mapping=torch.tensor([context - 1]),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        lengths=torch.tensor([context], dtype=torch.int32),
        logits_rows=torch.tensor([0]),
        num_decode=1,
    )
    return lambda: decoder.forward(inputs, cache)


def least_ms(step: Callable[[], object]) -> float:
    """Of some steps, behind one that is not counted."""
    step()
    found = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        step()
        found.append(time.perf_counter() - began_s)
    return 1000 * min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("native", "torch"))
    options = parser.parse_args()
    config = CONFIG | {"num_hidden_layers": options.layers, "first_k_dense_replace": options.layers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        spec = read_spec(folder)
        native = None if options.only == "torch" else Native(folder, spec, options.context)
        other = None if options.only == "native" else torch_step(folder, spec, options.context)
    cached = 2 * spec.cached_numbers * options.context
    for _ in range(options.rounds):
        row = {"memory_gb_s": round(read_bandwidth_gb_s(), 1), "cache_mib": round(cached / 2**20, 1)}
        if native is not None:
            row |= {"native_ms": round(least_ms(native.step), 2)}
            row |= {"attention_gb_s": round(cached / native.attention_s() / 1e9, 1)}
        if other is not None:
            row |= {"torch_ms": round(least_ms(other), 2)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
