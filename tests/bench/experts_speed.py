"""What a step with experts takes on a CPU, beside the time in which memory gives the bytes that its tokens use.

    python -m tests.bench.experts_speed [--layers 16] [--rounds 5] [--bits 4] [--one] [--json results.json]

OLMoE's shape with random weights in groups of 32 codes, its head in 8 bits; the native step alone, without an engine
around it. `active_mb` is what a step of one token reads: all matrices but those of experts, those of its own experts,
and the cache. `floor_share` is that over the memory bandwidth read in the same round and over the step's time;
`least_share` over the largest bandwidth and the least time of a step, of all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.kernels.layout.grouped_codes import GroupedCodes, GroupedFormat
from millrace.kernels.native import grouped, tensors
from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import NativeExperts, NativeLayer, NativeQkNorm, NativeShape
from tests.bench.throughput import read_bandwidth_gb_s
from tests.kernels.layout.test_grouped_codes import random_codes

BLOCK_SIZE, CONTEXT, STEPS = 16, 256, 8
BATCHES, PROMPT = (1, 2, 4, 8, 32), 256  # rows of a step; 1 is always measured
GROUP = 32


def olmoe(num_layers: int) -> NativeShape:
    """OLMoE-1B-7B, with the embedding as its head."""
    layer = NativeLayer(
        intermediate_size=0,
        experts=NativeExperts(num_experts=64, top_k=8, intermediate_size=1024),
        qk_norm=NativeQkNorm(is_over_row=True),
    )
    return NativeShape(
        vocab_size=50304,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        layers=(layer,) * num_layers,
        rotary_dims=(128,),
        is_tied=True,
    )


class Subject:
    """The model, with room for the largest batch, and for a prompt."""

    def __init__(self, shape: NativeShape, bits: int, threads: int | None) -> None:
        form = GroupedFormat(bits=bits, group=GROUP, zero=1 << (bits - 1), scale="bf16")
        head = GroupedFormat(bits=8, group=GROUP, zero=128, scale="bf16")
        products = [product for index in range(len(shape.layers)) for product in tensors.matrices_of(shape, index)]
        formats = {name: form for product in products for name in product} | {"model.embed_tokens.weight": head}
        longest = max(CONTEXT, PROMPT)
        tables = [(np.ones((longest, 64), np.float32), np.zeros((longest, 64), np.float32))]
        self.model = NativeModel(shape, "bfloat16", tables, longest, formats=formats, num_threads=threads)
        self._set_all(shape, formats)
        self.blocks_of_each = longest // BLOCK_SIZE
        blocks = self.blocks_of_each * max(BATCHES)
        self.cache = NativeCache.uniform(shape, blocks, BLOCK_SIZE, "bfloat16")
        self.cache.data[...] = 0x3F80  # memory of its own: what was never written to is one page of zeros
        self.logits = np.empty((max(BATCHES), shape.vocab_size), np.float32)
        self.phases = self.model.time_phases()
        self.least_s: dict[int, float] = {}  # of a step, by its rows

    def _set_all(self, shape: NativeShape, formats: dict[str, GroupedFormat]) -> None:
        draw, made = np.random.default_rng(0), dict[tuple[Any, ...], GroupedCodes]()
        for name, form in formats.items():
            rows, columns = _size(shape, name), grouped.num_columns(shape, name)
            key = form, rows, columns
            if key not in made:  # experts with equal numbers lie in memory of their own
                made[key] = random_codes(form, rows, columns)
            self.model.weights.set_rows(name, 0, made[key])
        hidden = shape.hidden_size
        self.model.weights.set_tensor("model.norm.weight", np.ones(hidden, np.float32))
        for index, layer in enumerate(shape.layers):
            for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
                self.model.weights.set_tensor(f"model.layers.{index}.{norm}.weight", np.ones(hidden, np.float32))
            assert layer.experts is not None
            router = draw.standard_normal((layer.experts.num_experts, hidden)).astype(np.float32)
            self.model.weights.set_tensor(f"model.layers.{index}.mlp.gate.weight", router)

    def decode_s(self, batch: int) -> float:
        """Of a step of so many sequences, a token each."""
        times = []
        for step in range(STEPS):
            began_s = time.perf_counter()
            self._step([CONTEXT - 1] * batch, [1] * batch, step)
            times.append(time.perf_counter() - began_s)
        self.least_s[batch] = min(*times, self.least_s.get(batch, times[0]))
        return sum(times) / STEPS

    def prompt_s(self) -> float:
        """Of a prompt in one step."""
        began_s = time.perf_counter()
        self._step([0], [PROMPT], 0)
        return time.perf_counter() - began_s

    def _step(self, starts: list[int], counts: list[int], number: int) -> None:
        tables = np.arange(len(starts) * self.blocks_of_each, dtype=np.int32).reshape(len(starts), -1)
        places = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [row[0] * BLOCK_SIZE + place for row, place in zip(tables, places, strict=True)]
        ends = np.cumsum(counts)
        self.model.step(
            self.cache,
            input_ids=(np.arange(ends[-1]) + 64 * number) * 7919 % self.model.shape.vocab_size,
            positions=np.concatenate(places),
            slot_mapping=np.concatenate(slots),
            block_tables=tables,
            query_starts=np.array([0, *ends], np.int32),
            lengths=(np.array(starts) + counts).astype(np.int32),
            logits_rows=ends - 1,
            logits=self.logits[: len(starts)],
        )

    def active_bytes(self) -> float:
        """What a step of one token reads."""
        shape, total = self.model.shape, 0.0
        for name, form in self.model.weights.formats.items():
            experts = shape.layers[tensors.place(name)[0]].experts
            share = experts.top_k / experts.num_experts if experts and tensors.is_of_expert(name) else 1.0
            columns = grouped.num_columns(shape, name)
            total += share * form.bits_per_weight(columns) / 8 * _size(shape, name) * columns
        for layer in shape.layers:
            total += 2 * layer.experts.num_experts * shape.hidden_size if layer.experts else 0  # the router, in bf16
        return total + shape.bytes_per_block(BLOCK_SIZE, "bfloat16") * CONTEXT / BLOCK_SIZE


def _size(shape: NativeShape, name: str) -> int:
    """Rows of a matrix."""
    if tensors.is_of_model(name):
        return shape.vocab_size
    experts = shape.layers[tensors.place(name)[0]].experts
    is_inner = tensors.is_of_expert(name) and not name.endswith("down_proj.weight")
    return experts.intermediate_size if experts and is_inner else shape.hidden_size


def measure(subject: Subject, rounds: int, batches: Sequence[int], has_prompt: bool) -> dict[str, Any]:
    """Medians over rounds; ms of each load, and where a step of one token spends its time."""
    times: dict[str, list[float]] = {}
    shares, bandwidths, phases = [], [], []
    for number in range(rounds + 1):  # the first one warms up
        bandwidth = read_bandwidth_gb_s()
        loads = {f"decode {batch}": (lambda batch=batch: subject.decode_s(batch)) for batch in (1, *batches)}
        if has_prompt:
            loads[f"prompt {PROMPT}"] = subject.prompt_s
        for load, run in loads.items():
            before = subject.phases.copy()
            seconds = run()
            if number > 0:
                times.setdefault(load, []).append(1e3 * seconds)
                if load == "decode 1":
                    bandwidths.append(bandwidth)
                    shares.append(subject.active_bytes() / bandwidth / 1e9 / seconds)
                    phases.append((subject.phases - before)[:3] / STEPS / 1e6)
    middle = np.median(phases, axis=0)
    return {
        "instruction_set": subject.model.instruction_set,
        "threads": subject.model.num_threads,
        "active_mb": round(subject.active_bytes() / 1e6, 1),
        "read_gb_s": round(statistics.median(bandwidths), 1),
        "floor_share": round(statistics.median(shares), 3),
        "least_share": round(subject.active_bytes() / max(bandwidths) / 1e9 / subject.least_s[1], 3),
        "ms": {load: round(statistics.median(found), 2) for load, found in times.items()},
        "ms_of_one": dict(zip(("products", "attention", "other"), middle.round(2).tolist(), strict=True)),
    }


def main() -> None:
    """Measures, prints the figures, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--one", action="store_true", help="steps of one token alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    subject = Subject(olmoe(options.layers), options.bits, options.threads)
    found = measure(subject, options.rounds, () if options.one else BATCHES[1:], not options.one)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
