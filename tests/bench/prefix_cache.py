"""What the prefix cache saves, finds and costs.

    python -m tests.bench.prefix_cache [--trace mooncake.jsonl] [--json results.json]

1. W3 on a CPU: 16 requests at once with 512 common tokens, 32 of their own and 32 to come, with the cache and without,
   in turn; and the same with nothing in common, for what the cache costs where it finds nothing.
2. Tokens found in a trace of prompts (`hash_ids`: 512 tokens each, as Mooncake publishes them), one request after the
   other, beside an exact LRU of as many blocks.
3. What schedule and allocate take for a decoding step, with a pool of some size full of cached blocks and one of ten
   times the size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.stages.allocator import Allocator
from millrace.stages.messages import StepDone, StepGrant, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.prefix import PrefixCache
from millrace.stages.scheduler import Limits, Scheduler

from .shapes import make_checkpoint

HASH_TOKENS = 512  # of a hash id in the trace


# -- 1: seconds


class Server:
    """An engine, with the cache or without."""

    def __init__(self, folder: Path, *, has_cache: bool) -> None:
        from millrace.stages import Engine

        self.loop = asyncio.new_event_loop()
        self.engine = Engine(
            model=str(folder), device="cpu", max_model_len=1024, max_num_seqs=32, enable_prefix_caching=has_cache
        )
        self.loop.run_until_complete(self.engine.start())

    def seconds(self, prompts: Sequence[list[int]], num_answer: int) -> float:
        return self.loop.run_until_complete(self._run(prompts, num_answer))

    async def _run(self, prompts: Sequence[list[int]], num_answer: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)

        async def one(ids: list[int]) -> None:
            async for _ in self.engine.generate(ids, params):
                pass

        began = time.perf_counter()
        await asyncio.gather(*map(one, prompts))
        return time.perf_counter() - began

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.stop())
        self.loop.close()


def w3(run: int, *, num_common: int) -> list[list[int]]:
    """16 prompts of 544 tokens, fresh in each run, the first `num_common` of them the same in all."""
    draw = np.random.default_rng(run)
    common = draw.integers(300, 15_000, num_common).tolist()
    return [common + draw.integers(300, 15_000, 544 - num_common).tolist() for _ in range(16)]


def seconds_with_and_without(shape: str, runs: int) -> dict[str, Any]:
    """Medians of both, for prompts with 512 common tokens and with none."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(shape, Path(folder))
        servers = {"cache on": Server(Path(folder), has_cache=True), "cache off": Server(Path(folder), has_cache=False)}
        figures = {}
        for name, num_common in (("512 tokens in common", 512), ("nothing in common", 0)):
            taken: dict[str, list[float]] = {each: [] for each in servers}
            for run in range(runs + 1):
                prompts = w3(1000 * num_common + run, num_common=num_common)
                for each, server in servers.items():
                    seconds = server.seconds(prompts, 32)
                    if run > 0:  # the first is a warm-up
                        taken[each].append(seconds)
            medians = {each: round(statistics.median(values), 3) for each, values in taken.items()}
            figures[name] = medians | {"on / off": round(medians["cache on"] / medians["cache off"], 3)}
        for server in servers.values():
            server.close()
    return figures


# -- 2 and 3: schedule and allocate alone


class Books:
    """Schedule's and allocate's plain code, and a device that is done at once."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        budget = max(max_model_len, max_num_seqs)
        self.scheduler = Scheduler(Limits(max_num_seqs, budget, max_model_len, block_size, steps_in_flight=1))
        self.cache = PrefixCache(block_size)
        self.allocator = Allocator(num_blocks, block_size, max_num_seqs, max_model_len, self.cache)
        self.answers = np.zeros(max_num_seqs, np.intp)  # tokens so far, by slot
        self.most = np.zeros(max_num_seqs, np.intp)  # tokens to come, by slot
        self.sequence_ids = np.zeros(max_num_seqs, np.int64)

    def step(self) -> bool:
        """One step; whether there was anything to do."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        grant, report = self.allocator.serve(plan)
        self.scheduler.on_report(report)
        if grant is not None:
            self.scheduler.on_done(self._done(grant))
        return True

    def _done(self, grant: StepGrant) -> StepDone:
        for started in grant.started:
            assert started.params.max_tokens is not None
            self.answers[started.slot], self.most[started.slot] = 0, started.params.max_tokens
            self.sequence_ids[started.slot] = started.sequence_id
        slots = grant.slots[grant.is_sampled]
        places = self.answers[slots].copy()
        self.answers[slots] += 1
        token_ids = (self.sequence_ids[slots] * 7919 + places * 31 + 1).astype(np.intp) % 50_000
        is_finished = self.answers[slots] >= self.most[slots]
        return StepDone(grant.step, slots, self.sequence_ids[slots], places, token_ids, is_finished)

    def ask(self, sequence_id: int, token_ids: np.ndarray, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(TokenRequest(f"r{sequence_id}", 0, token_ids, params, sequence_id))


def prompts_of(path: Path, num_requests: int) -> Iterator[np.ndarray]:
    """The trace's prompts: token ids that are the same where the hash ids are."""
    with path.open() as lines:
        for _, line in zip(range(num_requests), lines, strict=False):
            request = json.loads(line)
            firsts = np.array(request["hash_ids"], np.int64) * HASH_TOKENS
            ids = (firsts[:, None] + np.arange(HASH_TOKENS)).reshape(-1)
            yield (ids[: request["input_length"]] % (1 << 31)).astype(np.int32)


def hits_of_a_trace(path: Path, num_blocks: int, num_requests: int) -> dict[str, Any]:
    """Share of prompt tokens found, here and by an exact LRU of as many blocks."""
    max_model_len = num_blocks * HASH_TOKENS
    books = Books(num_blocks, HASH_TOKENS, 1, max_model_len)
    oracle: OrderedDict[bytes, None] = OrderedDict()
    num_tokens = num_found = 0
    for sequence_id, ids in enumerate(prompts_of(path, num_requests)):
        if len(ids) + 1 >= max_model_len:
            continue
        books.ask(sequence_id, ids, max_tokens=1)
        while books.step():
            pass
        num_tokens += len(ids)
        num_found += _ask_oracle(oracle, ids, num_blocks)
    found = (books.cache.num_hits - books.cache.num_forked) / num_tokens  # in whole blocks, as the oracle's
    return {
        "requests": num_requests,
        "blocks": num_blocks,
        "found": round(found, 4),
        "an exact LRU": round(num_found / num_tokens, 4),
    }


def _ask_oracle(oracle: OrderedDict[bytes, None], ids: np.ndarray, num_blocks: int) -> int:
    """Tokens of the prompt that are there; afterwards all of its full blocks are, the last of them as the oldest."""
    keys = [ids[: (place + 1) * HASH_TOKENS].tobytes()[-8 * HASH_TOKENS :] for place in range(len(ids) // HASH_TOKENS)]
    num_found = 0
    while num_found < (len(ids) - 1) // HASH_TOKENS and keys[num_found] in oracle:
        num_found += 1
    in_use = set(keys[:num_found])
    room = num_blocks - (-(-(len(ids)) // HASH_TOKENS))  # for blocks that are not in use while this one runs
    for key in [key for key in oracle if key not in in_use][: max(0, len(oracle) - num_found - room)]:
        del oracle[key]
    for key in reversed(keys):
        oracle.pop(key, None)
        oracle[key] = None
    return num_found * HASH_TOKENS


def decode_cost_us(num_blocks: int, num_sequences: int = 64, num_steps: int = 600) -> float:
    """Median microseconds of a step of schedule and allocate, while all but what runs is full of cached blocks."""
    books = Books(num_blocks, 16, num_sequences, 4096)
    draw = np.random.default_rng(0)
    sequence_id = 0
    while books.allocator.pool.num_free > num_sequences * 64:
        books.ask(sequence_id, draw.integers(0, 50_000, 4000, np.int32), max_tokens=1)
        sequence_id += 1
        while books.step():
            pass
    for _ in range(num_sequences):
        books.ask(sequence_id, draw.integers(0, 50_000, 20, np.int32), max_tokens=num_steps + 100)
        sequence_id += 1
    while books.scheduler.num_running < num_sequences:
        books.step()
    taken = []
    for _ in range(num_steps):
        began = time.perf_counter()
        books.step()
        taken.append(time.perf_counter() - began)
    return round(1e6 * statistics.mean(sorted(taken)[: num_steps * 9 // 10]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the prefix cache saves, finds and costs.")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="JSON lines with input_length and hash_ids")
    parser.add_argument("--requests", type=int, default=3000, help="of the trace")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, Any] = {"seconds": seconds_with_and_without(options.shape, options.runs)}
    if options.trace is not None:
        figures["trace"] = [hits_of_a_trace(options.trace, blocks, options.requests) for blocks in (500, 2000, 8000)]
    small, large = decode_cost_us(8_000), decode_cost_us(80_000)
    figures["decode_step_us"] = {"8000 blocks": small, "80000 blocks": large, "ratio": round(large / small, 3)}
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
