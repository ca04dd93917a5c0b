"""One engine in a process of its own, driven by lines of JSON. Runs under the Python that has the engine installed, so
it imports that engine, the standard library and numpy, and nothing of this project but for its own engine.

    PYTHON worker.py ENGINE MODEL NUM_THREADS

Prints `{"ready_s": ...}`, then answers each line `[[token ids, answer length], ...]` with
`{"first_s": seconds to the first token of the first request or null, "whole_s": seconds for all}`. Where an engine does
not show its first token, that of a lone request is the time of another one of the same length that ends with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from typing import Any, Protocol

Asked = tuple[list[int], int]

KV_BYTES = 2 << 30  # for keys and values, in each engine that is told so; llama.cpp has a context of so many tokens


class Engine(Protocol):
    """An engine that answers all requests at once, greedily, to the asked lengths."""

    def run(self, asked: list[Asked]) -> float | None:
        """Returns the time (`time.perf_counter`) of the first request's first token, where that can be seen."""


class Millrace:
    """This engine, by its asynchronous API, set as `LLM` sets it: steps as large as they get, threads that give way."""

    def __init__(self, model: str, num_threads: int, quantization: str | None = None) -> None:
        import asyncio

        from millrace.stages import Engine as MillraceEngine
        from millrace.stages import EngineConfig

        self.loop = asyncio.new_event_loop()
        sizes: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 64, "kv_cache_bytes": KV_BYTES}
        sizes |= {"threads": num_threads, "quantization": quantization, "itl_target_ms": 0.0}
        config = EngineConfig(model=model, device="cpu", speculation="off", **sizes)
        self.engine = MillraceEngine(config)  # random weights repeat themselves: drafts would have it too easy
        self.loop.run_until_complete(self.engine.start())
        self.engine.give_way()

    def run(self, asked: list[Asked]) -> float | None:
        return self.loop.run_until_complete(self._run(asked))

    async def _run(self, asked: list[Asked]) -> float:
        import asyncio

        return (await asyncio.gather(*(first_token(self.engine, *each) for each in asked)))[0]


async def first_token(engine: Any, ids: list[int], num_answer: int) -> float:
    """Has this engine answer, greedily; the time of the first token, when the last one is there."""
    from millrace.stages import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)
    first, count = 0.0, 0
    async for output in engine.generate(ids, params, output_kind="delta"):
        first = first or time.perf_counter()
        count += sum(len(choice.token_ids) for choice in output.outputs)
    assert count == num_answer, f"{count} tokens of {num_answer}"
    return first


class Transformers:
    """`generate` on a batch padded on the left, until the longest answer is done."""

    def __init__(self, model: str, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(self, asked: list[Asked]) -> float | None:
        torch, width = self.torch, max(len(ids) for ids, _ in asked)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in asked])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in asked])
        longest = max(num_answer for _, num_answer in asked)
        clock = FirstToken() if len(asked) == 1 else None  # it takes a streamer for one prompt alone
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                streamer=clock,
            )
        return None if clock is None else clock.at_s


class FirstToken:
    """A streamer that notes when the first new token came; the prompt comes before it."""

    def __init__(self) -> None:
        self.num_puts, self.at_s = 0, 0.0

    def put(self, value: Any) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None:
        pass


class OpenVino:
    """OpenVINO GenAI's continuous batching; the model is one that optimum-intel has converted."""

    def __init__(self, model: str, num_threads: int) -> None:
        import openvino
        import openvino_genai

        self.openvino, self.genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_BYTES >> 30
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 256, 2048
        scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
        has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = "bf16" if has_bf16 else "f32"  # in bf16 it does not start on a CPU without such instructions
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": num_threads,
        }
        self.pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings)

    def run(self, asked: list[Asked]) -> float | None:
        import numpy as np

        handles = []
        for number, (ids, num_answer) in enumerate(asked):
            config = self.genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = num_answer, True, False
            handles.append(self.pipe.add_request(number, self.openvino.Tensor(np.array([ids], np.int64)), config))
        first_s = None
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            if first_s is None and handles[0].can_read():
                first_s = time.perf_counter()
        return first_s


class Vllm:
    """vLLM's offline API."""

    def __init__(self, model: str, num_threads: int) -> None:
        import torch
        from vllm import LLM, SamplingParams

        # where bf16 has no instructions it falls back to plain torch, which takes several times as long
        dtype = "bfloat16" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "float32"
        self.params = SamplingParams
        sizes = {"max_model_len": 2048, "max_num_seqs": 64}
        self.llm = LLM(model, dtype=dtype, enable_prefix_caching=True, **sizes)

    def run(self, asked: list[Asked]) -> float | None:
        prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
        params = [self.params(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False) for _, num in asked]
        self.llm.generate(prompts, params, use_tqdm=False)
        return None


class LlamaCpp:
    """llama.cpp through its Python binding, one request after the other: it has no batched API. For W1."""

    def __init__(self, model: str, num_threads: int) -> None:
        from llama_cpp import Llama

        self.llama = Llama(model, n_ctx=2048, n_threads=num_threads, n_threads_batch=num_threads, verbose=False)

    def run(self, asked: list[Asked]) -> float | None:
        first_s = None
        for ids, num_answer in asked:
            for count, _ in enumerate(self.llama.generate(ids, temp=0.0, reset=True), 1):
                first_s = first_s or time.perf_counter()
                if count == num_answer:
                    break
        return first_s


ENGINES: dict[str, Any] = {
    "millrace": Millrace,
    "millrace int8": partial(Millrace, quantization="int8"),
    "transformers": Transformers,
    "openvino": OpenVino,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    """Serves the lines of its standard input."""
    began_s = time.perf_counter()
    name, model, num_threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine, or a process or library of its, prints is no answer
    engine: Engine = ENGINES[name](model, num_threads)
    print(json.dumps({"ready_s": time.perf_counter() - began_s}), file=answers, flush=True)
    for line in sys.stdin:
        asked = [(ids, num_answer) for ids, num_answer in json.loads(line)]
        began_s = time.perf_counter()
        first_s = engine.run(asked)
        whole_s = time.perf_counter() - began_s
        if first_s is None and len(asked) == 1:
            ((ids, _),) = asked
            began_s = time.perf_counter()
            engine.run([(ids[::-1], 1)])
            first_s = time.perf_counter()
        result = {"first_s": None if first_s is None else first_s - began_s, "whole_s": whole_s}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
