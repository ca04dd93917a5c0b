"""256 requests at once, prompts and answers of 100 to 1024 tokens uniformly, as nano-vllm's benchmark draws them.

Qwen3-0.6B's shape with random weights; at a temperature, as there, so that repetition does not help.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from tests.bench.gpu.floors import GPU_SHAPES, stream_floor_s
from tests.bench.gpu.parts.step_notes import noted_steps, summed
from tests.bench.gpu.place import TINY, Place
from tests.bench.gpu.sweeps.products import TABLE
from tests.bench.shapes import write_tokenizer

SHAPE = "qwen3-0.6b"
TEMPERATURE = 0.6
VARIANT_S = 14.0  # a start, which compiles nothing any more, and the workload
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


def row_of(place: Place, shape: dict[str, Any], requests: Requests, seconds: float) -> dict[str, Any]:
    """What came of it, with the share of the least time."""
    num_tokens = sum(num_answer for _, num_answer in requests)
    floor_s = stream_floor_s(shape, [(len(prompt), num_answer) for prompt, num_answer in requests], place.card)
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
    """The part `workload`: through this engine, and what else one start of it can tell; then with other settings."""
    shape, requests, before = chosen(place)
    with engine(place, shape) as llm, noted_steps() as steps:
        place.tell({"name": "start", "startup_s": _startup_s(llm), "num_blocks": llm.info.num_blocks})
        ask(llm, before)
        with place.trying("the workload"):
            steps.clear()
            place.tell({"name": "workload", **measured(place, llm, shape, requests)})
            tell_steps(place, steps)
        with place.trying("one stream"):
            place.tell({"name": "one stream", **one_stream(place, llm)})
        with place.trying("company of a grammar"):
            for row in company_of_grammar(place, llm, steps):
                place.tell(row)
    for name, settings in place.in_time(_variants(place), 0.0 if place.is_dry else VARIANT_S):
        with place.trying(name):
            with engine(place, shape, **settings) as llm:
                ask(llm, before)
                place.tell({"name": f"workload, {name}", **measured(place, llm, shape, requests)})


def _variants(place: Place) -> list[tuple[str, dict[str, Any]]]:
    """Each costs the start of an engine."""
    if place.is_dry:
        return [("4 in flight", {"steps_in_flight": 4})]
    found: list[tuple[str, dict[str, Any]]] = [("4 in flight", {"steps_in_flight": 4})]
    if place.has_fp8:
        found.insert(0, ("fp8 cache", {"kv_cache_dtype": "fp8"}))
    return [*found, ("steps of 8192 tokens", {"max_num_batched_tokens": 8192})]


@contextmanager
def engine(place: Place, shape: dict[str, Any], **settings: Any) -> Iterator[Any]:
    """With the products that this run found best; in a dry run over simulated streams, as steps are submitted there."""
    from millrace.runtime.device_streams.simulated import SimStreams
    from millrace.stages import LLM
    from millrace.stages.backends.torch import loading

    with ExitStack() as stack:
        if place.is_dry:
            streams = SimStreams(Random(place.seed), laziness=0.3)
            stack.enter_context(patch.object(loading, "_streams", lambda *_: streams))
            settings["attention_backend"] = "torch"  # the interpreter would take minutes
        elif place.out is not None and (place.out / TABLE).exists():
            settings["tilings"] = str(place.out / TABLE)
        folder = Path(stack.enter_context(TemporaryDirectory()))
        yield stack.enter_context(LLM(**options_of(place, shape, folder) | settings))


def _startup_s(llm: Any) -> float:
    return round(sum(llm.info.startup_s.values()), 2)


def measured(place: Place, llm: Any, shape: dict[str, Any], requests: Requests) -> dict[str, Any]:
    """The row of the workload."""
    began, (gaps, idle_s) = time.perf_counter(), idleness(llm)
    counts = ask(llm, requests)
    seconds, (more_gaps, more_idle_s) = time.perf_counter() - began, idleness(llm)
    for got, (_, want) in zip(counts, requests, strict=True):
        if got != want:
            place.complain(f"an answer has {got} tokens and was to have {want}")
    idle = {"gaps": more_gaps - gaps, "idle_share": (more_idle_s - idle_s) / seconds}
    return row_of(place, shape, requests, seconds) | idle


def tell_steps(place: Place, steps: list[dict[str, Any]]) -> None:
    """A row for each kind of step, and one for each step."""
    for row in summed(steps):
        place.tell(row)
    if place.tell_all is not None:
        place.tell_all({**row, "is_shown": False} for row in steps)


def one_stream(place: Place, llm: Any) -> dict[str, Any]:
    """The gaps between the tokens of one answer, as a client of the engine sees them."""
    from millrace.stages import SamplingParams

    num_prompt, num_answer = (3, 5) if place.is_dry else (512, 512)
    params = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)

    async def arrivals() -> list[float]:
        stream = llm.engine.generate([7 + i % 90 for i in range(num_prompt)], params, output_kind="delta")
        return [time.perf_counter() async for output in stream if output.outputs and output.outputs[0].token_ids]

    times: list[float] = llm._run(arrivals())
    gaps_us = [1e6 * (after - before) for before, after in zip(times[:-1], times[1:], strict=True)]
    return {"us": statistics.median(gaps_us), "p99_us": max(sorted(gaps_us)[: -max(1, len(gaps_us) // 100)], default=0)}


def company_of_grammar(place: Place, llm: Any, steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What a decode step of 64 rows takes, with the gap before it, without and with a row that has a grammar."""
    from millrace.stages import SamplingParams, StructuredOutputs

    num_rows, num_prompt, num_answer = (3, 3, 9) if place.is_dry else (64, 64, 96)
    prompts = [[7 + (row + i) % 90 for i in range(num_prompt)] for row in range(num_rows)]
    plain = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)
    regex = StructuredOutputs(regex="[a-z ]{200,400}")
    guided = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True, structured_outputs=regex)
    found: dict[str, float] = {}
    for name, params in (("warm", guided), ("without", plain), ("with", guided)):
        steps.clear()
        llm.generate(prompts, [params, *[plain] * (num_rows - 1)], use_tqdm=False)
        decoding = [row for row in steps if row["rows"] == row["tokens"]]
        if not decoding:
            raise RuntimeError(f"{len(steps)} steps, and none without a prompt")
        most = max(row["rows"] for row in decoding)
        full = [row for row in decoding if row["rows"] == most]
        found[name] = statistics.median(row["done_us"] - row["began_us"] + row["gap_us"] for row in full)
        if name != "warm":
            more = {"rows": most, "runs": full[-1]["runs"]}
            yield {"name": f"{num_rows} rows {name} a grammar", "us": found[name], **more}
    yield {"name": "a grammar among the rows, over none", "ratio": found["with"] / found["without"]}


def idleness(llm: Any) -> tuple[int, float]:
    """How often a device stood idle between two steps so far, and for how many seconds; not of one that waits."""
    gaps = llm.engine.core.stages.device.idle_gaps_us
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
