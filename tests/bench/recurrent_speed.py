"""What a step with recurrent layers takes on a CPU, natively and by torch, beside the bytes that it must read.

    python -m tests.bench.recurrent_speed [--layers 8] [--rounds 5] [--family qwen3.5] [--no-torch]

Layers of Qwen3.5-0.8B, LFM2-350M or Granite-4-H-350M in bfloat16 with random weights, and a head of 32,000 tokens; the
step alone, without an engine around it. `floor_share` is the time in which memory gives the weights, and the state of
each row twice, over the time of a step. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.kernels import kernel_set
from millrace.kernels.layout.state_layout import StateLayout
from millrace.kernels.native.cache import NativeCache, NativeStates
from millrace.kernels.native.model import NativeModel
from millrace.model.checkpoint.tensor_shapes import expected_shapes, open_source
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.native_decoder import NativeDecoder, native_shape
from millrace.model.decoder.recurrent import RecurrentStates
from millrace.model.decoder.rope import rope_tables
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.families.registry import parse_config
from millrace.model.spec import DecoderSpec
from tests.bench.throughput import read_bandwidth_gb_s

BLOCK_SIZE, CONTEXT = 16, 256
BATCHES, PROMPT = (1, 8), 256  # rows of a decoding step, and tokens of a prompt
COMMON: dict[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 4096, "dtype": "bfloat16"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "model_type": "lfm2",
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": ["conv", "conv", "full_attention"],
    },
    "granite": {
        "model_type": "granitemoehybrid",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_state": 128,
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "tie_word_embeddings": True,
    },
}


def spec_of(family: str, num_layers: int) -> DecoderSpec:
    keys = {**COMMON, **FAMILIES[family], "num_hidden_layers": num_layers}
    if types := keys.get("layer_types"):
        keys["layer_types"] = [types[layer % len(types)] for layer in range(num_layers)]
    return parse_config(keys, family)


def inputs_of(rows: int, tokens: int, context: int) -> StepInputs[Any]:
    """A step of `rows` sequences with `tokens` new tokens behind `context`."""
    each, total = -(-(context + tokens) // BLOCK_SIZE), rows * tokens
    tables = np.arange(rows * each, dtype=np.int32).reshape(rows, each)
    places = np.tile(np.arange(context, context + tokens), rows)
    mapping = np.repeat(tables, tokens, axis=0)[np.arange(total), places // BLOCK_SIZE].astype(np.int64)
    return StepInputs(
        input_ids=(np.arange(total) * 37 + 5) % 31_000,
        positions=places,
        slot_mapping=mapping * BLOCK_SIZE + places % BLOCK_SIZE,
        block_tables=tables,
        query_starts=np.arange(rows + 1, dtype=np.int32) * tokens,
        lengths=np.full(rows, context + tokens, np.int32),
        logits_rows=np.arange(1, rows + 1) * tokens - 1,
        num_decode=rows if tokens == 1 else 0,
        slots=np.arange(rows),
    )


def native(spec: DecoderSpec) -> tuple[Callable[[StepInputs[Any]], Any], int]:
    """A step, and the bytes of weights that one of a token reads."""
    source, spec = open_source(Path(), spec, "dummy")
    shape = native_shape(spec)
    tables = [rope_tables(rope, CONTEXT + PROMPT) for rope in spec.ropes]
    model = NativeModel(shape, "bfloat16", tables, CONTEXT + PROMPT)
    for name in expected_shapes(spec):
        model.weights.set_tensor(name, source.array(name))
    layout = StateLayout(shape.state_bytes("bfloat16"), max(BATCHES))
    states = NativeStates(shape, layout, "bfloat16")
    blocks = max(BATCHES) * (CONTEXT + PROMPT) // BLOCK_SIZE
    cache, decoder = NativeCache.uniform(shape, blocks, BLOCK_SIZE, "bfloat16", states=states), NativeDecoder(model)
    return lambda inputs: decoder.forward(inputs, cache), model.weights.num_token_bytes


def by_torch(spec: DecoderSpec) -> Callable[[StepInputs[Any]], Any]:
    device, dtype = torch.device("cpu"), torch.bfloat16
    weights, kernels = load_weights(Path(), spec, device, dtype, "dummy"), kernel_set.load("torch")
    decoder = Decoder(spec, weights, kernels, CONTEXT + PROMPT)
    states = RecurrentStates(spec, StateLayout(spec.state_bytes(2), max(BATCHES)), dtype, device)
    blocks = max(BATCHES) * (CONTEXT + PROMPT) // BLOCK_SIZE
    cache = KVCache(spec, blocks, BLOCK_SIZE, dtype, device, kernels, None, states=states)

    def step(inputs: StepInputs[Any]) -> Any:
        fields = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
        arrays = {name: torch.from_numpy(one) for name, one in fields.items() if isinstance(one, np.ndarray)}
        return decoder.forward(StepInputs(**{**fields, **arrays}), cache)

    return step


def least_s(step: Callable[[StepInputs[Any]], Any], inputs: StepInputs[Any], rounds: int) -> list[float]:
    step(inputs)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        step(inputs)
        taken.append(time.perf_counter() - began)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3.5")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    spec = spec_of(options.family, options.layers)
    step, weights_bytes = native(spec)
    sides = {"native": step} if options.no_torch else {"native": step, "torch": by_torch(spec)}
    state_bytes = spec.state_bytes(2)
    print(json.dumps({"weights_mb": weights_bytes / 1e6, "state_mb": state_bytes / 1e6}))
    cases = {f"decode {rows}": (rows, inputs_of(rows, 1, CONTEXT)) for rows in BATCHES}
    for name, (rows, inputs) in {**cases, f"prompt {PROMPT}": (0, inputs_of(1, PROMPT, 0))}.items():
        found: dict[str, Any] = {}
        for side, run in sides.items():
            bandwidth = read_bandwidth_gb_s()
            step_s = statistics.median(least_s(run, inputs, options.rounds))
            found[side] = {"step_ms": round(1e3 * step_s, 2), "gb_s": round(bandwidth, 1)}
            if rows:
                floor_s = (weights_bytes + 2 * rows * state_bytes) / bandwidth / 1e9
                found[side] |= {"tokens_s": round(rows / step_s, 1), "floor_share": round(floor_s / step_s, 2)}
            else:
                found[side] |= {"tokens_s": round(PROMPT / step_s, 1)}
        print(json.dumps({name: found}))


if __name__ == "__main__":
    main()
