"""What quantization gives a step on a CPU: the time of decode steps and of a prompt, in each way of keeping weights,
keys and values, as ratios to bfloat16's in the same rounds.

    python -m tests.bench.quantized_speed [--shape smollm2-135m] [--rounds 7] [--json results.json]

Random weights of a real model's shape; the native step alone, without an engine around it. In a round each form takes
each load in turn. `floor_share` is the bytes that a step of one sequence must read, weights and cache, over the memory
bandwidth read in the same round and over its time. bfloat16's weights are as an engine keeps them: in 12 bits a number
where bf16 is multiplied as such.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import NativeModel
from millrace.model.checkpoint.tensor_shapes import expected_shapes, open_source
from millrace.model.decoder.native_decoder import native_shape
from millrace.model.decoder.rope import rope_tables
from millrace.model.families.registry import read_spec
from millrace.model.spec import DecoderSpec
from tests.bench.quantized_quality import BLOCK_SIZE, Form
from tests.bench.shapes import SHAPES
from tests.bench.throughput import read_bandwidth_gb_s

CONTEXT = 256  # tokens that a decoding sequence has
PROMPT = 512
FORMS = (
    Form(),
    Form(quantization="int8"),
    Form(quantization="int4"),
    Form(cache_dtype="int8"),
    Form(quantization="int8", cache_dtype="int8"),
)
BATCHES = (1, 2, 4, 8, 16, 32)
STEPS = 16  # that a decode time is the mean of


class Subject:
    """A model in one form, with room for the largest batch."""

    def __init__(self, form: Form, config: DecoderSpec, threads: int | None) -> None:
        self.form = form
        self.model = NativeModel(
            native_shape(config),
            "bfloat16",
            [rope_tables(rope, PROMPT + CONTEXT) for rope in config.ropes],
            PROMPT + CONTEXT,
            quantization=form.quantization,
            group_size=form.group_size,
            cache_dtype=form.cache_dtype,
            num_threads=threads,
        )
        self.blocks_of_each = -(-max(CONTEXT, PROMPT) // BLOCK_SIZE)
        self.cache = NativeCache.uniform(
            self.model.shape, self.blocks_of_each * max(BATCHES), BLOCK_SIZE, self.model.cache_dtype
        )
        # Memory of its own: what was never written to is one page of zeros for all, and that is always near.
        # In bf16 1, in int8 codes of 60 and scales of 0.0115.
        self.cache.data[...] = 0x3F80 if self.model.cache_dtype == "bfloat16" else 0x3C
        self.logits = np.empty((max(BATCHES), self.model.shape.vocab_size), np.float32)

    def decode_s(self, batch: int) -> float:
        """Of a step of so many sequences, a token each."""
        began_s = time.perf_counter()
        for _ in range(STEPS):
            self._step([CONTEXT - 1] * batch, [1] * batch)
        return (time.perf_counter() - began_s) / STEPS

    def prompt_s(self) -> float:
        """Of a prompt in one step."""
        began_s = time.perf_counter()
        self._step([0], [PROMPT])
        return time.perf_counter() - began_s

    def bytes_of_one(self) -> int:
        """What a step of one sequence reads."""
        by_block = self.model.shape.bytes_per_block(BLOCK_SIZE, self.model.cache_dtype)
        return self.model.weights.num_bytes + by_block * CONTEXT // BLOCK_SIZE

    def _step(self, starts: list[int], counts: list[int]) -> None:
        tables = np.arange(len(starts) * self.blocks_of_each, dtype=np.int32).reshape(len(starts), -1)
        places = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [row[0] * BLOCK_SIZE + place for row, place in zip(tables, places, strict=True)]
        ends = np.cumsum(counts)
        self.model.step(
            self.cache,
            input_ids=np.arange(ends[-1]) * 7 % self.model.shape.vocab_size,
            positions=np.concatenate(places),
            slot_mapping=np.concatenate(slots),
            block_tables=tables,
            query_starts=np.array([0, *ends], np.int32),
            lengths=(np.array(starts) + counts).astype(np.int32),
            logits_rows=ends - 1,
            logits=self.logits[: len(starts)],
        )


def subjects(shape: str, threads: int | None) -> list[Subject]:
    """All forms of one checkpoint of random numbers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        config = read_spec(Path(folder))
        made = [Subject(form, config, threads) for form in FORMS]
        source, _ = open_source(Path(folder), config, "dummy")
        for name in expected_shapes(config):
            tensor = source.array(name)
            for each in made:
                each.model.weights.set_tensor(name, tensor)
    for each in made:
        each.model.weights.encode_bf16_12bit()  # as an engine does: of plain bf16
    return made


def measure(made: list[Subject], rounds: int) -> list[dict[str, Any]]:
    """A row for each form: ms of each load, and times bfloat16's rate; medians over rounds."""
    times: list[dict[str, list[float]]] = [{} for _ in made]
    shares: list[list[float]] = [[] for _ in made]
    for number in range(rounds + 1):  # the first one warms up
        bandwidth = read_bandwidth_gb_s()
        loads = {f"decode {batch}": (lambda each, batch=batch: each.decode_s(batch)) for batch in BATCHES}
        loads[f"prompt {PROMPT}"] = lambda each: each.prompt_s()
        for load, run in loads.items():
            for each, found, share in zip(made, times, shares, strict=True):
                seconds = run(each)
                if number > 0:
                    found.setdefault(load, []).append(seconds)
                    if load == "decode 1":
                        share.append(each.bytes_of_one() / bandwidth / 1e9 / seconds)
    rows = []
    for each, found, share in zip(made, times, shares, strict=True):
        ratios = {
            load: statistics.median(plain / own for plain, own in zip(times[0][load], seconds, strict=True))
            for load, seconds in found.items()
        }
        rows.append(
            {
                "form": each.form.label,
                "weights_bytes": each.model.weights.num_bytes,
                "ms": {load: 1e3 * statistics.median(seconds) for load, seconds in found.items()},
                "times_bfloat16": ratios,
                "floor_share": statistics.median(share),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="compute threads; none: as many as the machine has for it")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    made = subjects(args.shape, args.threads)
    rows = measure(made, args.rounds)
    loads = list(rows[0]["ms"])
    print(f"{'ms (times bfloat16)':28}" + "".join(f"{load:>16}" for load in loads) + f"{'floor share':>13}")
    for row in rows:
        cells = (f"{row['ms'][load]:8.2f} ({row['times_bfloat16'][load]:.2f})" for load in loads)
        print(f"{row['form']:28}" + "".join(f"{cell:>16}" for cell in cells) + f"{row['floor_share']:13.2f}")
    if args.json:
        about = {"shape": args.shape, "instruction_set": made[0].model.instruction_set, "machine": platform.platform()}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
