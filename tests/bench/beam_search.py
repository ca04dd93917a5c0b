"""Beam search on the bundled model, beside transformers' `generate(num_beams=...)` on the same weights in the same run.

    python -m tests.bench.beam_search --width 4 --prompt 64 --answer 64

Both search from the same prompts in float32 on as many threads, in turn, A B A B, and must find the same answers. A
figure is the median of the runs, in steps a second: the tokens that each beam grows by.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any


class Millrace:
    """This engine, in process."""

    def __init__(self, options: argparse.Namespace) -> None:
        from millrace.stages import Engine, EngineConfig

        self.options = options
        self.loop = asyncio.new_event_loop()
        most = options.prompt + options.answer + 1
        self.engine = Engine(
            EngineConfig(dtype="float32", device="cpu", threads=options.threads, max_model_len=most, max_num_seqs=64)
        )
        self.loop.run_until_complete(self.engine.start())

    def search(self, prompt: list[int]) -> list[int]:
        """The best answer."""
        from millrace.stages import SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True)
        asking = self.engine.beam_search(prompt, self.options.width, self.options.answer, params=params)
        return list(self.loop.run_until_complete(asking).outputs[0].token_ids)

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.stop())
        self.loop.close()


class Transformers:
    """The same search by `generate`."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from millrace.model.checkpoint.hub import bundled_model_path

        torch.set_num_threads(options.threads)
        self.options, self.torch = options, torch
        self.model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32).eval()

    def search(self, prompt: list[int]) -> list[int]:
        """The best answer."""
        with self.torch.inference_mode():
            found = self.model.generate(
                self.torch.tensor([prompt]),
                num_beams=self.options.width,
                do_sample=False,
                max_new_tokens=self.options.answer,
                eos_token_id=None,
                pad_token_id=0,
            )
        return list(found[0, len(prompt) :].tolist())

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Beam search beside transformers'.")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["millrace", "transformers"])
    options = parser.parse_args()
    subjects: dict[str, Any] = {"millrace": Millrace(options), "transformers": Transformers(options)}
    subjects = {name: one for name, one in subjects.items() if options.only in (None, name)}
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    num_same = 0
    for run in range(options.runs + 1):
        draw = random.Random(run)
        prompt = [draw.randrange(3, 500) for _ in range(options.prompt)]
        answers = []
        for name, subject in subjects.items():
            began = time.perf_counter()
            answers.append(subject.search(prompt))
            if run > 0:  # the first is a warm-up
                taken[name].append(options.answer / (time.perf_counter() - began))
        num_same += all(answer == answers[0] for answer in answers)
    medians: dict[str, Any] = {name: round(statistics.median(rates), 1) for name, rates in taken.items()}
    if len(subjects) == 2:
        medians["ratio"] = round(medians["millrace"] / medians["transformers"], 3)
    medians["same answers"] = f"{num_same} of {options.runs + 1}"
    print(json.dumps(medians))
    for subject in subjects.values():
        subject.close()


if __name__ == "__main__":
    main()
