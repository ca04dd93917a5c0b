"""What n-gram drafts bring, and what they cost where they bring nothing: this engine with and without, in one run.

    python -m tests.bench.speculation [--shape smollm2-135m] [--rounds 5] [--drafts 7] [--threads 1] [--json FILE]

The weights are random but for two tensors of each layer, which are zero: then the likeliest token is the last one
again, at the full cost of a step, and the temperature says how often it is. So a text repeats itself always, often,
half of the time or not at all, which is to a drafter what a summary, code, prose and noise are. Prompts of 128 tokens,
answers of 128, some at once. With and without take turns, A B A B: on a shared machine quote the ratios; on a busy one
those of processor time a token, with one thread, which never waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.stages import Engine, EngineConfig, SamplingParams
from tests.bench.shapes import SHAPES, make_checkpoint
from tests.bench.workloads import w1

TEXTS = {"always": 0.0, "often": 0.9, "half": 1.0, "never": 2.0}  # how often the last token comes again -> temperature
BATCHES = (1, 2, 3)  # with the last one no sequence drafts
NUM_ANSWER = 128


def make_repeating(shape: str, folder: Path) -> Path:
    """A checkpoint of that shape whose layers add nothing to the residual stream."""
    import torch
    from safetensors.torch import load_file, save_file

    make_checkpoint(shape, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensor)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Speed:
    """Of some answers at once, from the first token of the last that begins."""

    tok_s: float
    cpu_ms: float  # of this process, a token


async def speed(engine: Engine, run: int, batch: int, temperature: float) -> Speed:
    """How fast `batch` answers come."""
    firsts: list[tuple[float, float]] = []

    async def answer(number: int) -> None:
        ids, _ = w1(1000 * run + number)[0]
        params = SamplingParams(temperature=temperature, max_tokens=NUM_ANSWER, ignore_eos=True, seed=number)
        has_begun = False
        async for _ in engine.generate(ids, params, output_kind="delta"):
            if not has_begun:
                firsts.append((time.perf_counter(), time.process_time()))
                has_begun = True

    await asyncio.gather(*(answer(number) for number in range(batch)))
    (began_s, began_cpu_s), count = max(firsts), batch * (NUM_ANSWER - 1)
    cpu_ms = 1e3 * (time.process_time() - began_cpu_s) / count
    return Speed(count / (time.perf_counter() - began_s), cpu_ms)


async def compare(
    folder: Path, num_drafts: int, rounds: int, batches: Sequence[int], threads: int | None
) -> dict[str, Any]:
    """Text -> batch -> speeds with and without, their ratios, and what became of the drafts."""
    sizes: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": 16, "threads": threads}
    engines = {
        name: Engine(EngineConfig(model=str(folder), speculation=name, num_speculative_tokens=num_drafts, **sizes))
        for name in ("off", "ngram")
    }
    for engine in engines.values():
        await engine.start()
    found: dict[str, Any] = {}
    for text, temperature in TEXTS.items():
        for batch in batches:
            speeds: dict[str, list[Speed]] = {name: [] for name in engines}
            told = engines["ngram"].scheduler.speculation
            before = (told.num_draft_tokens, told.num_accepted_tokens)
            for run in range(rounds + 1):
                for name, engine in engines.items():
                    value = await speed(engine, run, batch, temperature)
                    if run:
                        speeds[name].append(value)
            num_drafted, num_right = told.num_draft_tokens - before[0], told.num_accepted_tokens - before[1]
            pairs = list(zip(speeds["ngram"], speeds["off"], strict=True))
            found.setdefault(text, {})[str(batch)] = {
                "without_tok_s": spread([each.tok_s for each in speeds["off"]]),
                "with_tok_s": spread([each.tok_s for each in speeds["ngram"]]),
                "ratio": spread([a.tok_s / b.tok_s for a, b in pairs]),
                "without_cpu_ms": spread([each.cpu_ms for each in speeds["off"]]),
                "cpu_ratio": spread([b.cpu_ms / a.cpu_ms for a, b in pairs]),
                "drafted_per_token": round(num_drafted / (batch * NUM_ANSWER * (rounds + 1)), 3),
                "accepted_share": round(num_right / num_drafted, 3) if num_drafted else None,
            }
            print(f"{text:<7} {batch} at once: {_shown(found[text][str(batch)])}", file=sys.stderr, flush=True)
    for engine in engines.values():
        await engine.stop()
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    named = {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def _shown(figures: dict[str, Any]) -> str:
    medians = {name: figures[name]["median"] for name in ("without_tok_s", "with_tok_s", "ratio")}
    least, greatest = figures["ratio"]["least"], figures["ratio"]["greatest"]
    drafts = f"{figures['drafted_per_token']} drafts a token, {figures['accepted_share']} of them right"
    rates = f"{medians['without_tok_s']:.0f} -> {medians['with_tok_s']:.0f} tok/s"
    cpu = f"{figures['cpu_ratio']['median']:.2f} times by processor time"
    return f"{rates}, {medians['ratio']:.2f} times ({least:.2f}..{greatest:.2f}), {cpu}; {drafts}"


def main() -> None:
    """Measures, prints a line for each, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=EngineConfig().num_speculative_tokens)
    parser.add_argument("--threads", type=int, help="compute threads; none: as the engine chooses")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_repeating(args.shape, Path(folder))
        found = asyncio.run(compare(model, args.drafts, args.rounds, args.batches, args.threads))
    if args.json:
        about = {"shape": args.shape, "dtype": "bfloat16", "rounds": args.rounds, "drafts": args.drafts}
        about |= {"threads": args.threads}
        about |= {"python": platform.python_version(), "machine": platform.machine()}
        args.json.write_text(json.dumps({**about, "texts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
