"""A prefix cache whose digests collide all the time costs hits, and never an answer."""

from __future__ import annotations

import asyncio
import random
from hashlib import sha256

import numpy as np
import pytest

from millrace.stages import SamplingParams
from millrace.stages.engine.results import read_outputs
from millrace.stages.messages import Prompt, Request
from millrace.stages.testing.scripted.engine import Script, scripted_engine
from tests.counts import count
from tests.simulation.bugs import BUGS

NUM_PROMPTS = count(1_000, full=10_000)
IMMEDIATELY = 64  # prompts of a request
SIZES = {"block_size": 4, "num_gpu_blocks": 512, "max_model_len": 64, "max_num_seqs": 64}
SCRIPT = Script(eos_probability=0.0)
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, seed=0)


class WeakDigest:
    """The first byte of what the cache would use."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._digested: set[tuple[bytes, bytes]] = set()

    def __call__(self, before: bytes, tokens: bytes) -> bytes:
        key = sha256(before + tokens).digest()[:1]
        self._keys.add(key)
        self._digested.add((before, tokens))
        return key

    @property
    def num_collisions(self) -> int:
        """Blocks behind some key, and roots, that share their own key with an earlier one."""
        return len(self._digested) - len(self._keys)


def prompts(count: int) -> list[list[int]]:
    """9 to 40 tokens, most of which begin as others do: with so many of the 40 tokens of one of 50 families."""
    draw = random.Random(57)
    families = [[draw.randrange(256) for _ in range(40)] for _ in range(50)]
    drawn = []
    for _ in range(count):
        prompt = list(draw.choice(families))[: draw.randint(9, 40)]
        num_own = draw.randrange(len(prompt))
        prompt[len(prompt) - num_own :] = [draw.randrange(256) for _ in range(num_own)]
        drawn.append(prompt)
    return drawn


async def num_wrong(asked: list[list[int]], digest: WeakDigest) -> tuple[int, int]:
    """(prompts that were not answered right, tokens that were found in the cache)."""
    async with scripted_engine(script=SCRIPT, **SIZES) as engine:
        assert engine.prefix_cache is not None
        engine.prefix_cache.digest = digest

        wrong = 0
        for first in range(0, len(asked), IMMEDIATELY):
            some = asked[first : first + IMMEDIATELY]
            request = Request(f"from {first}", tuple(Prompt(token_ids=np.array(ids, np.int32)) for ids in some), PARAMS)
            (answer,) = [output async for output in read_outputs(await engine.submit(request), "final")]
            expected = [SCRIPT.expected(prompt, PARAMS) for prompt in some]
            wrong += sum(got.token_ids != right for got, right in zip(answer.outputs, expected, strict=True))
            engine.prefix_cache.check()
        return wrong, engine.prefix_cache.num_hits


@pytest.mark.slow
def test_thousands_of_prompts_are_answered_right_with_digests_of_8_bits():
    digest = WeakDigest()
    wrong, num_hits = asyncio.run(num_wrong(prompts(NUM_PROMPTS), digest))
    assert wrong == 0
    assert num_hits > NUM_PROMPTS, "hardly a block was found, so hardly a wrong one could have been"
    assert digest.num_collisions > NUM_PROMPTS, "the digests did not collide, so nothing was tried"


@pytest.mark.slow
def test_a_cache_that_trusted_such_digests_would_be_noticed():
    """The control: without the comparison of token ids the same prompts get wrong answers, and the device sees why."""
    with BUGS["trusted_digest"](), pytest.raises(AssertionError, match="another history"):
        asyncio.run(num_wrong(prompts(200), WeakDigest()))
