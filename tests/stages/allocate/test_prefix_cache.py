"""The prefix cache: which tokens are computed once, and which sequences find them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import SamplingParams
from millrace.stages.allocate.partial_blocks import MAX_FOLLOWERS_SEEN
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.messages import StepGrant, StepPlan
from millrace.stages.outputs import RequestOutput
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine

NEVER_ENDS = Script(eos_probability=0.0)


def engine_of(env: SimEnv, **config: Any) -> ScriptedEngine:
    """Blocks of 4 tokens. It checks itself what every row reads."""
    sizes = {"block_size": 4, "num_gpu_blocks": 256, "max_model_len": 256, "max_num_batched_tokens": 64}
    return scripted_engine(script=NEVER_ENDS, env=env, **{**sizes, **config})


def ids(count: int, first: int = 0) -> list[int]:
    return [97 + (first + i) % 26 for i in range(count)]


async def ask(engine: ScriptedEngine, prompt: Sequence[int], max_tokens: int = 3, **fields: Any) -> RequestOutput:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=fields.pop("n", 1))
    outputs = engine.generate(list(prompt), params, output_kind="final", **fields)
    (output,) = [output async for output in outputs]
    return output


# -- through all stages


@sim_test(seeds=4)
async def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_where_they_part(env: SimEnv):
    async with engine_of(env) as engine:
        assert (await ask(engine, ids(30))).num_cached_tokens == 0
        assert (await ask(engine, [*ids(21), *ids(9, first=3)])).num_cached_tokens == 20
        assert (await ask(engine, ids(20, first=5))).num_cached_tokens == 0


@sim_test(seeds=4)
async def test_the_last_token_of_a_prompt_is_always_computed(env: SimEnv):
    async with engine_of(env) as engine:
        await ask(engine, ids(16))
        assert (await ask(engine, ids(16))).num_cached_tokens == 15
        assert (await ask(engine, ids(17))).num_cached_tokens == 16


@sim_test(seeds=4)
async def test_the_next_turn_finds_the_answer_of_the_last_one_too(env: SimEnv):
    async with engine_of(env, block_size=8) as engine:
        answer = await ask(engine, ids(10), max_tokens=20)
        turn = [*ids(10), *answer.outputs[0].token_ids, *ids(5)]
        assert (await ask(engine, turn)).num_cached_tokens == 29  # 10 + 19: the last token has no keys yet


@sim_test(seeds=4)
async def test_requests_of_different_salts_share_nothing(env: SimEnv):
    async with engine_of(env) as engine:
        for salt in ("", "a", "b"):
            assert (await ask(engine, ids(30), cache_salt=salt)).num_cached_tokens == 0
        for salt in ("", "a", "b"):
            assert (await ask(engine, ids(30), cache_salt=salt)).num_cached_tokens == 29


@sim_test(seeds=4)
async def test_switched_off_nothing_is_found_or_kept(env: SimEnv):
    async with engine_of(env, enable_prefix_caching=False) as engine:
        await ask(engine, ids(30))
        assert (await ask(engine, ids(30))).num_cached_tokens == 0
        await engine.check_quiet()
        assert engine.pool.num_free == 256 and engine.prefix_cache is None and engine.reset_prefix_cache() == 0


@sim_test(seeds=4)
async def test_after_a_reset_nothing_is_found_that_was_computed_before_it(env: SimEnv):
    async with engine_of(env) as engine:
        await ask(engine, ids(30))
        await engine.check_quiet()
        under_way = asyncio.create_task(ask(engine, ids(30, first=7), max_tokens=100))
        while not engine.pool.num_in_use:
            await env.sleep(0.001)
        assert (
            engine.reset_prefix_cache() == 8
        )  # seven of the prompt; the eighth ends with the second token of the answer
        await under_way
        assert (await ask(engine, ids(30))).num_cached_tokens == 0
        assert (await ask(engine, ids(30, first=7))).num_cached_tokens == 0


@sim_test(seeds=4)
async def test_the_choices_of_a_request_hold_their_prompt_once(env: SimEnv):
    async with engine_of(env) as engine:
        most = 0
        task = asyncio.create_task(ask(engine, ids(100), n=8, max_tokens=6))
        while not task.done():
            most = max(most, engine.pool.num_in_use)
            await env.sleep(0.0005)
        assert most <= 25 + 8 * (2 + 1)
        assert engine.prefix_cache is not None and engine.prefix_cache.num_hits == 7 * 99
        assert (await task).num_cached_tokens == 0  # the first choice computed it


@sim_test(seeds=4)
async def test_prompts_that_come_at_once_wait_for_the_first_to_compute_what_they_share(env: SimEnv):
    async with engine_of(env, max_num_batched_tokens=128) as engine:
        answers = await asyncio.gather(*(ask(engine, [*ids(80), 97 + i]) for i in range(6)))
        assert sorted(answer.num_cached_tokens for answer in answers) == [0] + [80] * 5


@sim_test(seeds=4)
async def test_who_waits_for_a_prefix_computes_it_when_the_other_one_leaves(env: SimEnv):
    async with engine_of(env, max_num_batched_tokens=8, max_num_seqs=4) as engine:
        first = asyncio.create_task(ask(engine, ids(200)))
        while engine.scheduler.num_running == 0:  # which of two that come at once is first, the simulation draws
            await env.sleep(0.0005)
        second = asyncio.create_task(ask(engine, ids(200)))
        while engine.scheduler.completed_step < 4:
            await env.sleep(0.0005)
        first.cancel()
        answer = await second
        assert 0 < answer.num_cached_tokens < 196


@sim_test(seeds=4)
async def test_what_was_used_last_is_kept_longest(env: SimEnv):
    async with engine_of(env, num_gpu_blocks=64) as engine:
        for first in range(6):  # 10 full blocks each
            await ask(engine, ids(40, first=3 * first))
        assert (await ask(engine, ids(40))).num_cached_tokens > 0  # used again, so the others go first
        await ask(engine, ids(120, first=25))
        assert (await ask(engine, ids(40))).num_cached_tokens == 39
        assert (await ask(engine, ids(40, first=3))).num_cached_tokens < 36


@sim_test(seeds=2)
async def test_digests_that_collide_cost_hits_and_never_an_answer(env: SimEnv):
    async with engine_of(env, num_gpu_blocks=80) as engine:
        assert engine.prefix_cache is not None
        engine.prefix_cache.digest = lambda before, tokens: sha256(before + tokens).digest()[:1]
        draw = env.random("prompts")
        for _ in range(40):
            prompts = [[97 + draw.randrange(2) for _ in range(30)] for _ in range(5)]
            answers = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                params = SamplingParams(max_tokens=3, temperature=0.0, seed=0)
                assert answer.outputs[0].token_ids == NEVER_ENDS.expected(prompt, params)
        assert engine.prefix_cache.num_hits > 0


# -- the cache alone


def chain_of(cache: PrefixCache, tokens: Sequence[int], sequence_id: int = 0, salt: str = "") -> Any:
    return cache.chain(sequence_id, np.array(tokens, np.int32), salt)


def found(cache: PrefixCache, chain: Any) -> list[int]:
    whole = cache.find(chain)
    assert not len(whole.on_host)
    return whole.shared.tolist()


def copied(cache: PrefixCache, tokens: Sequence[int], **where: Any) -> tuple[int | None, int]:
    both = cache.find(chain_of(cache, tokens, 99, **where))
    return both.source, both.num_forked


def test_a_block_that_another_sequence_put_in_first_is_not_put_in_again():
    cache = PrefixCache(block_size=2)
    one, other = chain_of(cache, [1, 2, 3, 4, 5], 1), chain_of(cache, [1, 2, 7, 8, 9], 2)
    assert cache.put(one, 10) and not cache.put(other, 20)
    assert cache.put(one, 11) and cache.put(other, 21)  # behind the same first block
    assert found(cache, chain_of(cache, [1, 2, 7, 8, 0])) == [10, 21]
    cache.check()


def test_blocks_of_an_answer_follow_those_of_its_prompt():
    cache = PrefixCache(block_size=2)
    chain = chain_of(cache, [1, 2, 3])
    assert cache.put(chain, 5) and cache.put(chain, 6, np.array([3, 4], np.int32).tobytes())
    assert found(cache, chain_of(cache, [1, 2, 3, 4, 9])) == [5, 6]
    assert found(cache, chain_of(cache, [1, 2, 3, 5, 9])) == [5]


def test_a_forgotten_block_hides_those_behind_it():
    cache = PrefixCache(block_size=1)
    chain = chain_of(cache, [1, 2, 3, 4])
    for block in range(3):
        cache.put(chain, block)
    cache.forget(1)
    assert found(cache, chain_of(cache, [1, 2, 3, 4])) == [0]
    assert cache.blocks() == {0, 2} and len(cache) == 2


def test_a_block_is_waited_for_only_while_another_sequence_computes_it():
    cache = PrefixCache(block_size=2)
    cache.min_tokens_to_wait_for = 2
    first, second = chain_of(cache, [1, 2, 3, 4, 5], 1), chain_of(cache, [1, 2, 3, 4, 9], 2)
    assert not cache.is_coming(second)
    cache.begin(first, 2)
    assert cache.is_coming(second) and not cache.is_coming(first)
    cache.put(first, 7)
    assert found(cache, second) == [7] and not cache.is_coming(second)
    cache.begin(first, 5)
    assert cache.is_coming(second)
    cache.drop(first)
    assert not cache.is_coming(second)


def test_a_few_tokens_are_computed_again_rather_than_waited_for():
    cache = PrefixCache(block_size=16)
    first, second = chain_of(cache, range(80), 1), chain_of(cache, range(40), 2)
    cache.begin(first, 16)
    assert not cache.is_coming(second)
    cache.begin(first, 32)
    assert cache.is_coming(second) and not cache.is_coming(chain_of(cache, range(32), 3))


@pytest.mark.parametrize("tokens", [[], [1], [1, 2]])
def test_a_prompt_of_no_more_than_a_block_finds_nothing(tokens: list[int]):
    cache = PrefixCache(block_size=2)
    cache.put(chain_of(cache, [1, 2, 3]), 0)
    assert found(cache, chain_of(cache, tokens)) == []


def test_keys_differ_between_processes_with_different_secrets():
    keys = [chain_of(PrefixCache(2, secret), [1, 2]).keys for secret in (b"a", b"b")]
    assert keys[0] != keys[1]


# -- the host's part


def test_blocks_moved_to_the_host_are_found_after_those_that_stayed_and_keep_numbers():
    cache = PrefixCache(block_size=2)
    chain = chain_of(cache, [1, 2, 3, 4, 5, 6, 7])
    for block in (10, 11, 12):
        cache.put(chain, block)
    assert cache.move_out(12, 0) is None and cache.move_out(11, 1) is None
    again = chain_of(cache, [1, 2, 3, 4, 5, 6, 9], 1)
    blocks, places, *_ = cache.find(again)
    assert (blocks.tolist(), places.tolist()) == ([10], [1, 0])
    cache.put(again, 20)  # the second block is back, elsewhere
    assert cache.is_on_host(20)
    blocks, places, *_ = cache.find(chain_of(cache, [1, 2, 3, 4, 5, 6, 8], 2))
    assert (blocks.tolist(), places.tolist()) == ([10, 20], [0])
    cache.check()


def test_other_tokens_under_the_same_key_on_the_host_are_not_found_and_make_way():
    cache = PrefixCache(block_size=1, digest=lambda before, tokens: b"same")
    one = chain_of(cache, [1, 2])
    cache.put(one, 5)
    assert cache.move_out(5, 0) is None
    other = chain_of(cache, [3, 4], 1)
    blocks, places, *_ = cache.find(other)
    assert not len(blocks) and not len(places)
    cache.put(other, 6)
    assert cache.move_out(6, 1) == 0
    assert cache.places() == {1}


@sim_test(seeds=4)
async def test_prefixes_that_the_device_has_no_room_for_come_back_from_the_host(env: SimEnv):
    """Six prompts of 60 tokens, in memory for two: the second time round all are found, though none is computed."""
    async with engine_of(env, num_gpu_blocks=64, num_cpu_blocks=200, max_num_seqs=2) as engine:
        prompts = [ids(60, first=i) for i in range(6)]
        for prompt in prompts:
            assert (await ask(engine, prompt)).num_cached_tokens == 0
        assert engine.pool.num_evicted > 0
        for prompt in prompts:
            assert (await ask(engine, prompt)).num_cached_tokens == 56
        assert engine.prefix_cache is not None and engine.prefix_cache.num_host_hits > 0
        assert engine.reset_prefix_cache() > 0
        assert engine.host_tier is not None and engine.host_tier.pool.num_cached == 0
        assert (await ask(engine, prompts[0])).num_cached_tokens == 0


@sim_test(seeds=4)
async def test_swapped_sequences_take_the_place_of_cached_prefixes_on_the_host(env: SimEnv):
    """The host is full of prefixes when four long answers need more memory than there is."""
    async with engine_of(
        env, num_gpu_blocks=64, num_cpu_blocks=64, max_num_seqs=4, max_num_batched_tokens=128
    ) as engine:
        for i in range(12):
            await ask(engine, ids(60, first=i))
        assert engine.host_tier is not None and engine.host_tier.pool.num_free < 8
        answers = await asyncio.gather(*(ask(engine, ids(8, first=i), max_tokens=120) for i in range(4)))
        assert all(len(answer.outputs[0].token_ids) == 120 for answer in answers)
        assert engine.scheduler.preemptions["swap", "blocks"] > 0
        await engine.check_quiet()


# -- copies of partly matching blocks


def forking_cache(block_size: int = 4) -> PrefixCache:
    """One that copies a block for a single token."""
    cache = PrefixCache(block_size)
    cache.min_tokens_to_fork = 1
    return cache


def tail(cache: PrefixCache, chain: Any, block: int, *tokens: int) -> list[int] | None:
    return cache.put_tail(chain, block, np.array(tokens, np.int32).tobytes())


def test_a_block_that_goes_on_differently_is_found_for_the_tokens_before_that():
    cache = forking_cache()
    chain = chain_of(cache, range(8))
    cache.put(chain, 10)
    cache.put(chain, 11)
    assert copied(cache, [0, 1, 2, 3, 4, 5, 9, 9, 9]) == (11, 2)
    assert copied(cache, [0, 1, 9]) == (10, 2)
    assert copied(cache, [9, 1, 2]) == (None, 0)
    assert copied(cache, [0, 1, 2, 9, 4, 5, 6, 7]) == (10, 3), "not the second block, which stands behind another first"
    cache.check()


def test_a_few_tokens_alike_by_chance_are_not_copied_unless_they_are_all_but_one():
    cache = PrefixCache(block_size=8)
    cache.put(chain_of(cache, range(8)), 10)
    assert copied(cache, [0, 1, 2, 9, 9]) == (None, 0) and copied(cache, [0, 1, 2, 9]) == (10, 3)
    assert copied(cache, [0, 1, 2, 3, 9, 9]) == (10, 4)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 0), (6, 1), (8, 3), (9, 0)])
def test_the_last_token_is_never_copied(num_tokens: int, expected: int):
    cache = forking_cache()
    chain = chain_of(cache, range(8))
    cache.put(chain, 10)
    cache.put(chain, 11)
    assert copied(cache, range(num_tokens))[1] == expected


def test_of_several_blocks_the_one_that_goes_on_alike_for_longest_is_copied():
    cache = forking_cache()
    for block, tokens in enumerate(([1, 2, 9, 9], [1, 2, 3, 9], [1, 9, 9, 9])):
        cache.put(chain_of(cache, tokens), block)
    assert copied(cache, [1, 2, 3, 4, 5]) == (1, 3)
    assert copied(cache, [1, 2, 8]) == (1, 2), "the newest of those that are as good"
    cache.forget(1)
    assert copied(cache, [1, 2, 3, 4, 5]) == (0, 2)


def test_a_tail_is_found_until_it_is_whole_or_forgotten():
    cache = forking_cache()
    chain = chain_of(cache, range(4))
    cache.put(chain, 10)
    assert tail(cache, chain, 11, 4, 5) == [] and cache.blocks() == {10, 11}
    assert copied(cache, [0, 1, 2, 3, 4, 5, 6]) == (11, 2)
    assert tail(cache, chain, 11, 4, 5, 6) == [11], "its own shorter one is gone"
    assert copied(cache, [0, 1, 2, 3, 4, 5, 6, 7]) == (11, 3)
    assert cache.drop_tail(11) and cache.put(chain, 11, np.array([4, 5, 6, 7], np.int32).tobytes())
    assert copied(cache, [0, 1, 2, 3, 4, 5, 6, 7]) == (11, 3)
    cache.check()


def test_a_tail_replaces_those_it_extends_and_is_not_added_if_another_covers_it():
    cache = forking_cache()
    chain = chain_of(cache, [])
    assert tail(cache, chain, 1, 7, 8) == [] and tail(cache, chain, 2, 7, 9) == []
    assert tail(cache, chain, 3, 7, 8, 9) == [1]
    assert tail(cache, chain, 4, 7, 8) is None and tail(cache, chain, 5, 7, 8, 9) is None
    assert cache.blocks() == {2, 3}


def test_the_tails_used_last_are_kept_and_no_more_than_may_be():
    cache = forking_cache()
    cache.partial_blocks.most_tails = 2
    chain = chain_of(cache, [])
    assert tail(cache, chain, 1, 7) == [] and tail(cache, chain, 2, 8) == []
    assert copied(cache, [7, 0]) == (1, 1)
    assert tail(cache, chain, 3, 9) == [2] and cache.blocks() == {1, 3}


def test_a_lookup_sees_some_blocks_that_begin_alike_and_not_all():
    cache = forking_cache()
    for block in range(200):
        cache.put(chain_of(cache, [7, block, 0, 0]), block)
    assert copied(cache, [7, 199, 5]) == (199, 2)
    assert copied(cache, [7, 200 - MAX_FOLLOWERS_SEEN, 5]) == (200 - MAX_FOLLOWERS_SEEN, 2)
    assert copied(cache, [7, 0, 5]) == (199, 1)


def test_another_salts_tails_and_blocks_are_not_copied():
    cache = forking_cache()
    chain = chain_of(cache, range(4), salt="a")
    cache.put(chain, 10)
    tail(cache, chain, 11, 4, 5)
    for salt, found_there in (("", (None, 0)), ("b", (None, 0)), ("a", (10, 3))):
        assert copied(cache, [0, 1, 2, 9, 9], salt=salt) == found_there
    assert copied(cache, [0, 1, 2, 3, 4, 9], salt="a") == (11, 1) and copied(cache, [0, 1, 2, 3, 4, 9]) == (None, 0)


def test_the_tail_behind_a_block_that_moved_to_the_host_is_found_behind_it():
    cache = forking_cache(2)
    chain = chain_of(cache, [1, 2])
    cache.put(chain, 10)
    tail(cache, chain, 11, 3)
    assert cache.move_out(10, 0) is None
    blocks, places, source, num_forked, _, _ = cache.find(chain_of(cache, [1, 2, 3, 4], 1))
    assert (blocks.tolist(), places.tolist(), source, num_forked) == ([], [0], 11, 1)


def watch(engine: ScriptedEngine) -> list[tuple[StepGrant, int]]:
    """Each grant from now on, and the blocks in use then."""
    allocator, seen = engine.parts.allocate.allocator, []
    serve = allocator.serve

    def serve_and_note(plan: StepPlan) -> Any:
        grant, report = serve(plan)
        if grant is not None:
            seen.append((grant, allocator.pool.num_in_use))
        return grant, report

    allocator.serve = serve_and_note
    return seen


@sim_test(seeds=4)
async def test_eight_choices_copy_the_tail_of_their_prompt_and_compute_one_token_each(env: SimEnv):
    """1,000 tokens are 62 blocks of 16 and a tail of 8."""
    sizes = {"block_size": 16, "max_model_len": 1056, "max_num_batched_tokens": 2048}
    async with engine_of(env, **sizes) as engine:
        seen = watch(engine)
        answer = await ask(engine, ids(1000), n=8, max_tokens=40)
        assert engine.model.num_forked == 7, "one block for each further choice"
        of_prompts = [count for grant, _ in seen for count in grant.num_tokens[grant.starts < 1000].tolist()]
        assert sorted(of_prompts) == [1] * 7 + [1000]
        assert max(num_in_use for _, num_in_use in seen) <= 62 + 8 * (3 + 1)
        assert len({tuple(choice.token_ids) for choice in answer.outputs}) == 1, "they are greedy"
        await engine.check_quiet()


@sim_test(seeds=4)
async def test_beams_copy_what_they_have_in_common_and_compute_one_token_each(env: SimEnv):
    async with engine_of(env, block_size=8) as engine:
        seen = watch(engine)
        await engine.beam_search(ids(21), 4, 20)
        counts = [count for grant, _ in seen for count in grant.num_tokens.tolist()]
        assert sorted(counts) == [1] * (4 * 19) + [21]


@sim_test(seeds=2)
async def test_where_blocks_are_short_the_few_tokens_are_computed(env: SimEnv):
    """The pool holds one longest sequence: were a block held to copy from it, the next could never begin."""
    sizes = {"num_gpu_blocks": 8, "max_model_len": 32, "num_cpu_blocks": 0, "max_num_seqs": 1}
    async with engine_of(env, **sizes) as engine:
        assert (await ask(engine, ids(31), max_tokens=1)).num_cached_tokens == 0
        assert (await ask(engine, ids(31), max_tokens=1)).num_cached_tokens == 28
        assert engine.model.num_forked == 0
        assert (await ask(engine, ids(26), max_tokens=1)).num_cached_tokens == 25
        assert engine.model.num_forked == 1
