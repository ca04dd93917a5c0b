"""Trial steps before an engine serves, to measure memory and rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..config import EngineConfig
from ..execute.model_runner import ModelRunner
from ..messages import BlockCopy, Direction, Rates, Started, StepGrant, TableEntries
from ..params import SamplingParams

RATE_TOKENS = 64  # of the prompt whose compute time is measured
RATE_RUNS = 4  # of it; the first reads weights that are not in memory yet, and other processes may disturb any


def measure_rates(
    runner: ModelRunner, config: EngineConfig, max_model_len: int, num_host_blocks: int, clock: Callable[[], float]
) -> Rates:
    """Measures seconds per copied block and per prompt token, each the best of some runs."""
    token_s = measure_token_s(runner, config, max_model_len, clock)
    prompt = _rate_grant(config, max_model_len)
    num_copied = min(len(prompt.table_blocks), num_host_blocks, runner.cache.blocks_of_kinds[0])
    blocks = np.arange(num_copied, dtype=np.int32)
    copies = tuple(BlockCopy(direction, blocks, blocks) for direction in (Direction.OUT, Direction.IN))
    nothing = replace(prompts_grant([], config.block_size), copies=copies)
    return Rates(_best_s(runner, nothing, clock) / (2 * num_copied), token_s)


def measure_token_s(runner: ModelRunner, config: EngineConfig, max_model_len: int, clock: Callable[[], float]) -> float:
    """Measures the seconds to compute a prompt token; the best of some runs."""
    prompt = _rate_grant(config, max_model_len)
    return _best_s(runner, prompt, clock) / int(prompt.num_tokens[0])


def _rate_grant(config: EngineConfig, max_model_len: int) -> StepGrant:
    return prompts_grant([min(RATE_TOKENS, max_model_len - 1, config.num_step_tokens)], config.block_size)


def with_tables(runner: ModelRunner, grant: StepGrant) -> StepGrant:
    """The grant with the same blocks of all kinds, as far as there are such: their memory may be the same."""
    counts = runner.cache.blocks_of_kinds if len(grant.table_blocks) else ()
    if len(counts) < 2 and not (counts and len(grant.table_blocks) > counts[0]):  # windows may have few
        return grant
    entries = (grant.table_slots, grant.table_places)
    more = (TableEntries(kind, *entries, grant.table_blocks % counts[kind]) for kind in range(1, len(counts)))
    return replace(grant, table_blocks=grant.table_blocks % counts[0], more_tables=tuple(more))


def _best_s(runner: ModelRunner, grant: StepGrant, clock: Callable[[], float]) -> float:
    taken_s, grant = [], with_tables(runner, grant)
    for _ in range(RATE_RUNS):
        began = clock()
        runner.forward(grant)
        runner.wait()
        taken_s.append(clock() - began)
    return min(taken_s)


def largest_grant(config: EngineConfig, max_model_len: int) -> StepGrant:
    """A step of max_num_batched_tokens, of prompts of token 0 that are as long as possible."""
    whole, rest = divmod(config.num_step_tokens, max_model_len - 1)
    lengths = [max_model_len - 1] * whole + ([rest] if rest else [])
    return prompts_grant(lengths[: config.max_num_seqs], config.block_size)


def prompts_grant(lengths: list[int], block_size: int) -> StepGrant:
    """A step that computes prompts of token 0 with these lengths, in blocks from 0 on."""
    blocks = [-(-length // block_size) for length in lengths]
    slots = np.arange(len(lengths))
    params = SamplingParams(max_tokens=1)
    return StepGrant(
        step=0,
        generation=0,
        slots=slots,
        starts=np.zeros(len(lengths), np.int32),
        num_tokens=np.array(lengths, np.int32),
        is_sampled=np.ones(len(lengths), np.bool_),
        table_slots=np.repeat(slots, np.array(blocks, np.intp)),
        table_places=np.concatenate([np.arange(count) for count in (0, *blocks)]),
        table_blocks=np.arange(sum(blocks), dtype=np.int32),
        started=tuple(
            Started(slot, slot, "largest", np.zeros(length, np.int32), length, params, seed=0)
            for slot, length in enumerate(lengths)
        ),
    )


TARGET_TOKENS = 180  # prompt tokens that keep a CPU busy; the measured target is the time they take


TARGETS_MS = (50.0, 100.0)  # bounds of that target; few people read faster than ten tokens a second


def target_ms_for(token_s: float) -> float:
    """The target time, at which `TARGET_TOKENS` prompt tokens fit, within `TARGETS_MS`."""
    least_ms, most_ms = TARGETS_MS
    return min(max(least_ms, 1e3 * TARGET_TOKENS * token_s), most_ms)
