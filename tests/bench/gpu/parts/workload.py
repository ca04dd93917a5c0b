"""256 requests at once, prompts and answers of 100 to 1024 tokens uniformly, as nano-vllm's benchmark draws them.

Qwen3-0.6B's shape with random weights; at a temperature, as there, so that repetition does not help.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.gpu.floors import GPU_SHAPES, stream_floor_s
from tests.bench.gpu.place import TINY, Place
from tests.bench.shapes import write_tokenizer

SHAPE = "qwen3-0.6b"
TEMPERATURE = 0.6
Requests = list[tuple[list[int], int]]  # (token ids of the prompt, tokens of the answer)


def requests_of(seed: int, count: int = 256, least: int = 100, most: int = 1024, num_ids: int = 10_001) -> Requests:
    """With seed 0 those of nano-vllm: 142,827 tokens of prompts and 133,966 of answers."""
    dice = Random(seed)
    prompts = [[dice.randint(0, num_ids - 1) for _ in range(dice.randint(least, most))] for _ in range(count)]
    return [(prompt, dice.randint(least, most)) for prompt in prompts]


def chosen(place: Place) -> tuple[dict[str, Any], Requests, Requests]:
    """The shape, what is asked, and what is asked before, so that what is made at first use is made."""
    if place.is_dry:
        return TINY, requests_of(0, 3, 2, 6, 300), requests_of(1, 2, 2, 3, 300)
    return GPU_SHAPES[SHAPE], requests_of(0), requests_of(1, 16, 100, 200)


def row_of(shape: dict[str, Any], requests: Requests, seconds: float) -> dict[str, Any]:
    """What came of it, with the share of the least time."""
    num_tokens = sum(num_answer for _, num_answer in requests)
    floor_s = stream_floor_s(shape, [(len(prompt), num_answer) for prompt, num_answer in requests])
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "answer_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "floor_s": floor_s,
        "floor_share": floor_s / seconds,
    }


def run(place: Place) -> None:
    """The part `workload`: through this engine."""
    from millrace.stages import LLM

    shape, requests, before = chosen(place)
    with TemporaryDirectory() as folder, LLM(**options_of(place, shape, Path(folder))) as llm:
        ask(llm, before)
        began, (gaps, idle_s) = time.perf_counter(), idleness(llm)
        counts = ask(llm, requests)
        seconds, (more_gaps, more_idle_s) = time.perf_counter() - began, idleness(llm)
        idle = {"gaps": more_gaps - gaps, "idle_share": (more_idle_s - idle_s) / seconds}
        place.tell(row_of(shape, requests, seconds) | idle)
        place.tell({"startup_s": round(sum(llm.info.startup_s.values()), 2), "num_blocks": llm.info.num_blocks})
    for got, (_, want) in zip(counts, requests, strict=True):
        if got != want:
            place.complain(f"an answer has {got} tokens and was to have {want}")


def idleness(llm: Any) -> tuple[int, float]:
    """How often a device stood idle between two steps so far, and for how many seconds; not of one that waits."""
    gaps = llm.engine.idle_gaps_us
    return (0, 0.0) if gaps is None else (gaps.num_observed, gaps.total / 1e6)


def options_of(place: Place, shape: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Of an engine for a model of that shape with random weights; its configuration and tokenizer go into `folder`."""
    (folder / "config.json").write_text(json.dumps(shape | {"eos_token_id": 2}))
    write_tokenizer(folder, shape["vocab_size"])
    sizes: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 256, "dtype": "bfloat16"}
    if place.is_dry:
        sizes = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks": 32, "dtype": "float32"}
        sizes |= {"max_num_batched_tokens": 32, "swap_space": 0}
    return {
        "model": str(folder),
        "load_format": "dummy",
        "device": place.device.type,
        "attention_backend": "triton",
        **sizes,
    }


def ask(llm: Any, requests: Requests) -> list[int]:
    """How many tokens each answer has."""
    from millrace.stages import SamplingParams

    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=num_answer, ignore_eos=True) for _, num_answer in requests
    ]
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    return [len(output.outputs[0].token_ids) for output in outputs]
