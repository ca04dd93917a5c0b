"""What the prefix cache saves, finds and costs.

    python -m tests.bench.prefix_cache [--trace mooncake.jsonl] [--json results.json]

1. W3 on a CPU: 16 requests at once with 512 common tokens, 32 of their own and 32 to come, with the cache and without,
   in turn; and the same with nothing in common. There the memory that the cache keeps in use counts, too: 570 MB of
   blocks pass through the processor's caches instead of 210.
   What the cache itself costs where it finds nothing, `cost`: many short runs, with and without it in turn, of 7
   prompts of 128 tokens in a pool that they fill either way, so both use the same memory. The shorter the runs, the
   less of the machine's moods is in a pair. The host's pool is small enough for the warm-up to fill it: a page that is
   used for the first time costs up to 10 us, and 1 GiB of them would be in the figure for hundreds of runs.
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

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.messages import StepDone, StepGrant, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.schedule.scheduler import Scheduler, StepLimits
from tests.bench.shapes import make_checkpoint

HASH_TOKENS = 512  # of a hash id in the trace
BLOCK_SIZE = 16
PARTS = ("seconds", "cost", "trace", "steps")
POOL_BLOCKS = 1536  # of the servers: a few runs fill it, and from then on a cache gives up old blocks for new ones
SHORT_POOL_BLOCKS = 64  # a short run takes 63
SHORT_HOST_BLOCKS = 128
NUM_SHORT = 7  # prompts of a short run
COST_WARM_UPS = 10  # runs until what is evicted has shown that it is not found again
NUM_WARM_UPS = 3  # runs until it is full: before, a cache that never reuses a block pays for its pages' first use
TRACE_MEMORY = (256_000, 1_024_000, 4_096_000)  # tokens


# -- 1: seconds


class Server:
    """An engine, with the cache or without."""

    def __init__(
        self, folder: Path, *, has_cache: bool, num_blocks: int = POOL_BLOCKS, num_host_blocks: int | None = None
    ) -> None:
        from millrace.stages import Engine

        self.loop = asyncio.new_event_loop()
        self.engine = Engine(
            model=str(folder),
            device="cpu",
            max_model_len=1024,
            max_num_seqs=32,
            num_gpu_blocks=num_blocks,
            num_cpu_blocks=num_host_blocks,
            itl_target_ms=0.0,  # steps of one size: with a target their sizes follow the machine's moods
            enable_prefix_caching=has_cache,
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
            for run in range(NUM_WARM_UPS + runs):
                prompts = w3(1000 * num_common + run, num_common=num_common)
                order = list(servers.items())
                for each, server in order if run % 2 else reversed(order):
                    seconds = server.seconds(prompts, 32)
                    if run >= NUM_WARM_UPS:
                        taken[each].append(seconds)
            medians = {each: round(statistics.median(values), 3) for each, values in taken.items()}
            ratios = [on / off for on, off in zip(taken["cache on"], taken["cache off"], strict=True)]
            spread = [round(value, 3) for value in (min(ratios), statistics.median(ratios), max(ratios))]
            figures[name] = medians | {"on / off, of each pair: least, median, most": spread}
        for server in servers.values():
            server.close()
    return figures


def cost_without_hits(shape: str, pairs: int) -> dict[str, Any]:
    """How much longer a run takes with the cache, where it finds nothing: the median of pairs, and its 95 %
    interval."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(shape, Path(folder))
        pools = {"num_blocks": SHORT_POOL_BLOCKS, "num_host_blocks": SHORT_HOST_BLOCKS}
        servers = {has: Server(Path(folder), has_cache=has, **pools) for has in (True, False)}
        ratios = []
        for pair in range(COST_WARM_UPS + pairs):
            prompts = [draw.integers(300, 15_000, 128).tolist() for _ in range(NUM_SHORT)]
            order = (True, False) if pair % 2 else (False, True)
            took = {has: servers[has].seconds(prompts, 2) for has in order}
            if pair >= COST_WARM_UPS:
                ratios.append(took[True] / took[False] - 1)
        for server in servers.values():
            server.close()
    medians = np.median(draw.choice(ratios, (2_000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5]).tolist()
    return {"pairs": pairs, "longer": round(float(np.median(ratios)), 5), "95 %": [round(low, 5), round(high, 5)]}


# -- 2 and 3: schedule and allocate alone


class Books:
    """Schedule's and allocate's plain code, and a device that is done at once."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> None:
        budget = max(max_model_len, max_num_seqs)
        self.scheduler = Scheduler(StepLimits(max_num_seqs, budget, max_model_len, block_size, steps_in_flight=1))
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


def hits_of_a_trace(path: Path, num_tokens: int, num_requests: int) -> dict[str, Any]:
    """Share of prompt tokens found in a memory of `num_tokens`, here and by an exact LRU of as many blocks."""
    num_blocks = num_tokens // BLOCK_SIZE
    books = Books(num_blocks, BLOCK_SIZE, 1, num_tokens)
    oracle: OrderedDict[int, None] = OrderedDict()
    num_asked = num_expected = 0
    for sequence_id, ids in enumerate(prompts_of(path, num_requests)):
        if len(ids) + 1 >= num_tokens:
            continue
        books.ask(sequence_id, ids, max_tokens=1)
        while books.step():
            pass
        num_asked += len(ids)
        num_expected += _ask_oracle(oracle, ids, num_blocks)
    found = (books.cache.num_hits - books.cache.num_forked) / num_asked  # in whole blocks, as the oracle's
    return {
        "requests": num_requests,
        "tokens of memory": num_tokens,
        "found": round(found, 4),
        "an exact LRU": round(num_expected / num_asked, 4),
    }


def _ask_oracle(oracle: OrderedDict[int, None], ids: np.ndarray, num_blocks: int) -> int:
    """Tokens of the prompt that are there; afterwards all of its full blocks are, the last of them as the oldest.

    The first token of a block is its key: those of a trace say what stands before them, too.
    """
    keys = ids[: len(ids) // BLOCK_SIZE * BLOCK_SIZE : BLOCK_SIZE].tolist()
    num_found = 0
    while num_found < (len(ids) - 1) // BLOCK_SIZE and keys[num_found] in oracle:
        num_found += 1
    for key in keys[:num_found]:
        oracle.move_to_end(key)  # in use: not to be evicted
    room = num_blocks - -(-len(ids) // BLOCK_SIZE)  # for blocks that are not in use while this one runs
    for _ in range(max(0, len(oracle) - num_found - room)):
        oracle.popitem(last=False)
    for key in reversed(keys):
        oracle.pop(key, None)
        oracle[key] = None
    return num_found * BLOCK_SIZE


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if "seconds" in options.parts:
        figures["seconds"] = seconds_with_and_without(options.shape, options.runs)
    if "cost" in options.parts:
        figures["cost without hits"] = cost_without_hits(options.shape, 40 * options.runs)
    if "trace" in options.parts and options.trace is not None:
        figures["trace"] = [hits_of_a_trace(options.trace, size, options.requests) for size in TRACE_MEMORY]
    if "steps" in options.parts:
        small, large = decode_cost_us(8_000), decode_cost_us(80_000)
        figures["decode_step_us"] = {"8000 blocks": small, "80000 blocks": large, "ratio": round(large / small, 3)}
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
