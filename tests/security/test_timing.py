"""With salts, no tenant learns from how long an answer takes, or from its usage, what another tenant has asked.

Tenant B asks for what tenant A has just asked, and for a new prompt. Both are measured in virtual time and
steps, where they must be the same to the last step, and in real time over HTTP, where the two must look like samples of
one distribution. Without salts both tell them apart: that is the control.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages import SamplingParams
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine
from tests.counts import count
from tests.deploy.running import RunningServer
from tests.security.oracle import TEXT

NUM_PAIRS = count(24, full=200)  # over HTTP; half as many where each of them takes a preemption
NUM_EXACT_PAIRS = count(4, full=40)  # in virtual time, of each manner
NUM_CONTROL_PAIRS = count(2, full=4)  # in virtual time
NUM_TELLING_PAIRS = 15  # over HTTP, where each tells
SIZES = {"block_size": 4, "max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 4}
SHORT, LONG = 16, 40  # tokens of a prompt: four or ten steps to compute, of which a cached one needs one
ROOMY, TIGHT = 256, 12  # blocks: of the tight pool, two short prompts take 8, and with their answers 16
TIGHT_ANSWER = 14  # tokens
SCRIPT = {"eos_probability": 0.0}
PHASE_S = 0.005  # virtual, of each of a step's two


@dataclass(frozen=True)
class Manner:
    """How A and B ask. Of two requests at once in a tight pool, the later one is preempted."""

    num_choices: int = 1  # that B asks for
    preempts_a: bool = False
    preempts_b: bool = False
    is_at_once: bool = False  # B asks while A's prompt is being computed

    @property
    def is_tight(self) -> bool:
        return self.preempts_a or self.preempts_b

    @property
    def num_blocks(self) -> int:
        return TIGHT if self.is_tight else ROOMY

    @property
    def num_prompt(self) -> int:
        return SHORT if self.is_tight else LONG

    def num_pairs(self, num_pairs: int) -> int:
        """Fewer where they take long."""
        return num_pairs // 2 if self.is_tight else num_pairs


MANNERS = {
    "alone": Manner(),
    "n = 3": Manner(num_choices=3),
    "after A was preempted": Manner(preempts_a=True),
    "n = 3, after A was preempted": Manner(num_choices=3, preempts_a=True),
    "when B is preempted": Manner(preempts_b=True),
    "while A computes it": Manner(is_at_once=True),
}


class Prompts:
    """New texts, a token a letter."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def fresh(self, length: int = SHORT) -> str:
        return "".join(self.draw.choices("abcdefghijklmnopqrstuvwxyz", k=length))


# -- in virtual time


@dataclass(frozen=True)
class Seen:
    """What B can see of its own request, and what it cost."""

    first_token_s: float
    total_s: float
    num_steps: int
    num_cached: int


class Tenants:
    """A and B on one engine in virtual time; with salts of their own, or none."""

    def __init__(self, env: SimEnv, engine: ScriptedEngine, manner: Manner, *, has_salts: bool) -> None:
        self.env = env
        self.engine = engine
        self.manner = manner
        self.salts = ("tenant-a", "tenant-b") if has_salts else ("", "")
        self.prompts = Prompts(56)

    async def pair(self, length: int) -> tuple[Seen, Seen]:
        """B asks what A has asked just before; and a new prompt, though A has asked something else."""
        known = self.prompts.fresh(length)
        seen = await self._trial(known, known)
        return seen, await self._trial(self.prompts.fresh(length), self.prompts.fresh(length))

    async def _trial(self, asked_by_a: str, asked_by_b: str) -> Seen:
        a = asyncio.create_task(self._ask(asked_by_a, self.salts[0], 2, is_preempted=self.manner.preempts_a))
        if self.manner.is_at_once:
            await self.env.sleep(3 * PHASE_S)
        else:
            await a
            await self.env.sleep(10 * PHASE_S)  # for what is still in flight
        preempts, n = self.manner.preempts_b, self.manner.num_choices
        seen = await self._ask(asked_by_b, self.salts[1], 1, is_preempted=preempts, n=n)
        await a
        await self.env.sleep(10 * PHASE_S)
        return seen

    async def _ask(self, prompt: str, salt: str, num_answer: int, *, is_preempted: bool, n: int = 1) -> Seen:
        """With `is_preempted`, beside an older request of the same salt that leaves too little room for both."""
        num_before, num_steps = self.engine.scheduler.num_preemptions, self.engine.model.num_steps
        num_answer = TIGHT_ANSWER if is_preempted else num_answer
        began, first_s, num_cached = self.env.now(), None, 0
        older = asyncio.create_task(self._drain(self.prompts.fresh(), salt)) if is_preempted else None
        params = SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True, n=n)
        async for output in self.engine.generate(prompt, params, cache_salt=salt):
            first_s = self.env.now() - began if first_s is None else first_s
            num_cached = output.num_cached_tokens
        total_s = self.env.now() - began
        if older is not None:
            await older
            assert self.engine.scheduler.num_preemptions > num_before, "there was room for both"
        assert first_s is not None
        return Seen(first_s, total_s, self.engine.model.num_steps - num_steps, num_cached)

    async def _drain(self, prompt: str, salt: str) -> None:
        params = SamplingParams(max_tokens=TIGHT_ANSWER, temperature=0.0, ignore_eos=True)
        async for _ in self.engine.generate(prompt, params, cache_salt=salt):
            pass


def pairs(manner: Manner, num_pairs: int, *, has_salts: bool, lengths: tuple[int, ...]) -> list[tuple[Seen, Seen]]:
    """Each step takes as long as any other, and nothing else takes any time."""

    async def main(env: SimEnv) -> list[tuple[Seen, Seen]]:
        sizes: dict[str, Any] = {**SIZES, "num_gpu_blocks": manner.num_blocks}
        async with scripted_engine(script=Script(**SCRIPT), env=env, **sizes) as engine:
            assert engine.prefix_cache is not None
            engine.prefix_cache.min_tokens_to_wait_for = 1  # so that B waits for what A computes, if it may know of it
            tenants = Tenants(env, engine, manner, has_salts=has_salts)
            seen = [await tenants.pair(lengths[i % len(lengths)]) for i in range(num_pairs)]
            await engine.check_quiet()
            return seen

    delays = {"device": (PHASE_S, PHASE_S)}
    return run(
        main, seed=0, policy="fifo", thread_delay_s=(0.0, 0.0), worker_delay_s=delays, max_callbacks=5_000_000
    ).value


@pytest.mark.slow
@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS.keys())
def test_a_prompt_of_another_tenant_takes_as_many_steps_as_a_new_one(manner: Manner):
    lengths = (SHORT,) if manner.is_tight else (5, 17, LONG)
    num_pairs = manner.num_pairs(NUM_EXACT_PAIRS)
    for asked_by_a, asked_by_nobody in pairs(manner, num_pairs, has_salts=True, lengths=lengths):
        assert asked_by_a.num_cached == asked_by_nobody.num_cached == 0
        assert asked_by_a.num_steps == asked_by_nobody.num_steps
        assert asked_by_a.first_token_s == pytest.approx(asked_by_nobody.first_token_s, abs=1e-9)
        assert asked_by_a.total_s == pytest.approx(asked_by_nobody.total_s, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS.keys())
def test_without_salts_a_tenant_sees_what_another_has_asked(manner: Manner):
    """The control: the same measurement tells the two apart in every pair."""
    for asked_by_a, asked_by_nobody in pairs(manner, NUM_CONTROL_PAIRS, has_salts=False, lengths=(SHORT,)):
        assert asked_by_a.num_cached > asked_by_nobody.num_cached == 0
        assert asked_by_a.first_token_s < asked_by_nobody.first_token_s - PHASE_S
        if not manner.is_at_once:  # else the steps are A's too
            assert asked_by_a.num_steps < asked_by_nobody.num_steps


# -- in real time, over HTTP


class Clients:
    """A and B as clients of one server."""

    def __init__(self, server: RunningServer, manner: Manner, *, has_salts: bool) -> None:
        self.server = server
        self.manner = manner
        self.salts = ({"cache_salt": "tenant-a"}, {"cache_salt": "tenant-b"}) if has_salts else ({}, {})
        self.prompts = Prompts(56)
        self.num_cached = {True: 0, False: 0}

    def seconds(self, num_pairs: int) -> tuple[list[float], list[float]]:
        """What B's requests take: for prompts that A has asked just before, and for new ones."""
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(num_pairs):
            known = self._fresh()
            self._ask_as_a(known)
            for is_known in self.prompts.draw.sample([True, False], 2):
                taken[is_known].append(self._ask_as_b(known if is_known else self._fresh(), is_known))
        return taken[True], taken[False]

    def _fresh(self) -> str:
        return self.prompts.fresh(self.manner.num_prompt)

    def num_preemptions(self) -> int:
        """So far."""
        lines = self.server.get("/metrics").body.decode().splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith("vllm:num_preemptions_total"))
        return int(float(value))

    def _ask_as_a(self, prompt: str) -> None:
        """In a tight pool, together with another prompt, before it: the second is then preempted."""
        others = [self.prompts.fresh()] if self.manner.preempts_a else []
        body = {"prompt": [*others, prompt], "max_tokens": TIGHT_ANSWER if others else 2, "temperature": 0}
        assert self.server.post(TEXT, body | self.salts[0]).status == 200

    def _ask_as_b(self, prompt: str, is_known: bool) -> float:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "n": self.manner.num_choices} | self.salts[1]
        answer = self.server.post(TEXT, body)
        assert answer.status == 200
        self.num_cached[is_known] += answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.seconds


Serving = Callable[[Manner], RunningServer]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """Servers by their blocks, each started when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def start(num_blocks: int) -> RunningServer:
            return stack.enter_context(RunningServer(script=SCRIPT, engine={**SIZES, "num_gpu_blocks": num_blocks}))

        yield lambda manner: start(manner.num_blocks)


def ks_p_value(first: list[float], second: list[float]) -> float:
    """How likely two samples of one distribution differ at least so much: Kolmogorov-Smirnov, for large samples."""
    values = np.sort(np.concatenate([first, second]))
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (first, second)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    x = distance * (len(first) * len(second) / (len(first) + len(second))) ** 0.5
    if x < 0.2:  # the series below converges too slowly there, to 1
        return 1.0
    k = np.arange(1, 101)
    return float(2 * ((-1.0) ** (k - 1) * np.exp(-2 * (k * x) ** 2)).sum())


@pytest.mark.parametrize(
    ("shift", "p_value"),
    [(0, 1.0), (10, 0.6994), (20, 0.0366), (40, 2.25e-7)],  # distances 0, 0.1, 0.2, 0.4 of 100 against 100
)
def test_the_kolmogorov_smirnov_test_gives_the_p_values_of_the_tables(shift: int, p_value: float):
    first, second = np.arange(100.0).tolist(), (np.arange(100.0) + shift).tolist()
    assert ks_p_value(first, second) == pytest.approx(p_value, rel=0.01)


@pytest.mark.slow
def test_over_http_the_times_of_what_another_tenant_has_asked_look_like_all_others(serving: Serving):
    """Chance alone gives p <= 0.01 once in a hundred times, and a leak every time, so it is measured again once."""
    server = serving(MANNERS["alone"])
    clients = Clients(server, MANNERS["alone"], has_salts=True)
    p_values = [ks_p_value(*clients.seconds(NUM_PAIRS))]
    if p_values[0] <= 0.01:
        p_values.append(ks_p_value(*clients.seconds(NUM_PAIRS)))
    assert p_values[-1] > 0.01, p_values
    assert clients.num_cached == {True: 0, False: 0}
    server.wait_until_idle()


@pytest.mark.slow
def test_over_http_the_usage_tells_nothing_of_a_preempted_tenants_prompt(serving: Serving):
    """Its times are compared in virtual time only: over HTTP a preemption's are too various for so few pairs."""
    manner = MANNERS["n = 3, after A was preempted"]
    server, num_pairs = serving(manner), manner.num_pairs(NUM_PAIRS)
    clients = Clients(server, manner, has_salts=True)
    clients.seconds(num_pairs)
    assert clients.num_cached == {True: 0, False: 0}
    assert clients.num_preemptions() >= num_pairs
    server.wait_until_idle()


@pytest.mark.slow
def test_over_http_without_salts_the_times_tell_what_another_tenant_has_asked(serving: Serving):
    """The control. Once more, with more of them, where the first ones do not tell: other tests run meanwhile."""
    clients = Clients(serving(MANNERS["alone"]), MANNERS["alone"], has_salts=False)
    num_pairs, p_values = [NUM_TELLING_PAIRS], [ks_p_value(*clients.seconds(NUM_TELLING_PAIRS))]
    if p_values[0] >= 0.001:
        num_pairs.append(2 * NUM_TELLING_PAIRS)
        p_values.append(ks_p_value(*clients.seconds(num_pairs[-1])))
    assert p_values[-1] < 0.001, p_values
    assert clients.num_cached[True] == sum(num_pairs) * (LONG - 1) and clients.num_cached[False] == 0
