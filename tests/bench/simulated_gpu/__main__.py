"""python -m tests.bench.simulated_gpu [--speed 1 1.6 3] [--mode inline split] [--launch-us 150] [--json results.json]

The workload of 256 requests at once (prompts and answers of 100 to 1,024 tokens), through the real engine: seven
stages, allocator, step submission, both device threads, detokenizing. Only the device is simulated: each step takes
what `fits.py` says. What is told, for each speed of the device:

- tokens a second, and what they would be if no step waited for the host;
- the idle share: time of the device between steps while a next step was due, by the engine's own measure, and all of
  the time in which no step ran;
- microseconds a step of each stage on the event loop, of submission on the device thread, and of processor time by
  thread. What submission takes beyond its processor time and its launches is waiting for the interpreter lock.
  With `--mode split` only the front process is seen.

Nothing else should run on the machine. On two cores the threads of the engine and the client share them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.log import captured_logs
from millrace.stages.backends.cuda import build
from millrace.stages.engine.engine import Engine
from millrace.stages.engine.results import read_outputs
from millrace.stages.messages import Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import as_token_ids
from millrace.stages.split.remote_core import RemoteCore
from tests.bench.gpu.parts.workload import Requests, requests_of
from tests.bench.pipeline_cost import Timed, start_timed
from tests.bench.shapes import write_tokenizer
from tests.bench.simulated_gpu import child
from tests.bench.simulated_gpu.device import TimedStreams, TimedWork

GRAPHS_A_STEP = 2
VOCAB_SIZE = 10_240
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
SIZES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch",
    "load_format": "dummy",
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "num_gpu_blocks": 65_536 // 2,
    "threads": 1,
}


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A started engine. In split mode its device is in another process, and `submission` is None."""

    engine: Engine
    streams: TimedStreams
    clocks: Mapping[str, Timed]
    submission: TimedSubmission | None


class TimedSubmission:
    """Wall and processor time of the two phases of steps on the device thread."""

    def __init__(self, model: Any) -> None:
        self.wall_ns, self.cpu_ns, self.num_steps = 0, 0, 0
        for name in ("forward", "sample"):
            setattr(model, name, self._timed(getattr(model, name), name == "forward"))

    def _timed(self, run: Any, is_first: bool) -> Any:
        def timed(*arguments: Any) -> Any:
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return run(*arguments)
            finally:
                self.wall_ns += time.perf_counter_ns() - wall
                self.cpu_ns += time.thread_time_ns() - cpu
                self.num_steps += is_first

        return timed


@asynccontextmanager
async def running(mode: str, speed: float, launch_us: float, **settings: Any) -> AsyncIterator[Subject]:
    """An engine on the timed device, started."""
    env, streams = LiveEnv(0), TimedStreams(launch_us / GRAPHS_A_STEP, speed)
    with TemporaryDirectory() as name, mock.patch.object(build, "TorchDeviceWork", TimedWork), captured_logs():
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        write_tokenizer(folder, VOCAB_SIZE)
        if mode == "split":
            os.environ[child.DEVICE] = json.dumps([launch_us / GRAPHS_A_STEP, speed])
            core = partial(RemoteCore, module=child.__name__)
            engine = Engine(core=core, model=str(folder), env=env, **{**SIZES, **settings})
        else:
            env.streams = streams
            engine = Engine(model=str(folder), env=env, **{**SIZES, **settings})
        clocks = await start_timed(engine, time.perf_counter)  # type: ignore[arg-type]
        try:
            submission = None
            if mode != "split":
                model = engine.pipeline.stages["execute"].runner  # type: ignore[attr-defined]
                model._work.streams = streams
                submission = TimedSubmission(model)
                streams.busy_ns = streams.slept_ns = 0
            yield Subject(engine, streams, clocks, submission)
        finally:
            await engine.stop()
            await env.aclose()


async def measure(requests: Requests, mode: str, speed: float, launch_us: float, **settings: Any) -> dict[str, Any]:
    """The figures of one run."""
    async with running(mode, speed, launch_us, **settings) as subject:
        stages_s = {stage: clock.seconds for stage, clock in subject.clocks.items()}
        gaps_us, threads = await _idle_us(subject.engine), _thread_seconds()
        began = time.perf_counter()
        counts = await asyncio.gather(*(_ask(subject.engine, i, *request) for i, request in enumerate(requests)))
        seconds, after = time.perf_counter() - began, _thread_seconds()
        gaps_us = await _idle_us(subject.engine) - gaps_us
    wrong = [(got, want) for got, (_, want) in zip(counts, requests, strict=True) if got != want]
    assert not wrong, f"answers have other lengths than asked: {wrong[:5]}"
    found = {
        "mode": mode,
        "speed": speed,
        "tokens_per_s": round(sum(counts) / seconds),
        "seconds": round(seconds, 3),
        "idle_share": round(gaps_us / 1e6 / seconds, 4),
        "processor_share": {
            thread: round((cpu - threads.get(thread, 0.0)) / seconds, 3) for thread, cpu in after.items()
        },
    }
    return found if subject.submission is None else found | _of_steps(subject, seconds, sum(counts), stages_s)


def _of_steps(subject: Subject, seconds: float, num_tokens: int, stages_s: dict[str, float]) -> dict[str, Any]:
    """What is known where the device is in this process: microseconds a step, by who spends them."""
    submission, streams = subject.submission, subject.streams
    assert submission is not None
    steps, busy_s = submission.num_steps, streams.busy_ns / 1e9
    waited_ns = max(0, submission.wall_ns - submission.cpu_ns - streams.slept_ns)
    spent = {
        "device": streams.busy_ns,
        "submission": submission.wall_ns,
        "submission, processor": submission.cpu_ns,
        "submission, waiting for the lock": waited_ns,
        **{stage: 1e9 * (clock.seconds - stages_s[stage]) for stage, clock in subject.clocks.items()},
    }
    return {
        "steps": steps,
        "tokens_per_s_of_device": round(num_tokens / busy_s),
        "share_without_step": round(1 - busy_s / seconds, 4),
        "us_a_step": {name: round(ns / 1000 / steps) for name, ns in spent.items()},
    }


async def _ask(engine: Engine, number: int, prompt: list[int], num_answer: int) -> int:
    """How many tokens the answer has."""
    params = SamplingParams(temperature=0.6, max_tokens=num_answer, ignore_eos=True)
    request = Request(f"r{number}", (Prompt(token_ids=as_token_ids(prompt)),), params)
    outbox = await engine.submit(request, wait=True)
    (output,) = [output async for output in read_outputs(outbox, "final")]
    return len(output.outputs[0].token_ids)


async def _idle_us(engine: Engine) -> float:
    await engine.refresh()
    core = engine.status().core
    gaps = None if core is None else core.idle_gaps_us
    assert gaps is not None
    return float(gaps.total)


def _thread_seconds() -> dict[str, float]:
    """Processor seconds so far of each living thread, by name."""
    seconds: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            used = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            seconds[thread.name] = seconds.get(thread.name, 0.0) + used
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="What the host leaves between the steps of a simulated GPU.")
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0], help="of the device, against the fitted times")
    parser.add_argument("--mode", nargs="+", choices=("inline", "split"), default=["inline"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--launch-us", type=float, default=150.0, help="of the driver for a step's two graphs")
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("steps_in_flight", "max_num_batched_tokens")}
    rows = []
    for speed in options.speed:
        for mode in options.mode:
            requests = requests_of(0, options.requests)
            rows.append(asyncio.run(measure(requests, mode, speed, options.launch_us, **settings)))
            print(json.dumps(rows[-1], indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
