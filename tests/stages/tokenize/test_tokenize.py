"""Tokenize: prompts to token ids, in order and in threads; an error fails only its own request."""

import asyncio
import threading

import numpy as np
import pytest

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.simulation.run import SimEnv, run
from millrace.runtime.simulation.testing import sim_test
from millrace.stages.errors import Failed, Refused
from millrace.stages.exit.outboxes import Outboxes
from millrace.stages.messages import ChatPrompt, Prompt, Request, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import RequestLimits
from millrace.stages.tokenize.stage import Tokenize
from tests.stages.front import Answer, ByteText, join, request

LIMITS = RequestLimits(vocab_size=257, max_model_len=1_000)


class Keep(Answer):
    """Keeps what it is given, and answers."""

    def __init__(self) -> None:
        self.seen: list[TokenRequest] = []

    async def handle(self, batch, out) -> None:
        self.seen += batch
        await super().handle(batch, out)


class Panic(BaseException):
    """Like a Rust panic: not an `Exception`."""


class Fragile(ByteText):
    def encode_text(self, text: str) -> list[int]:
        if "panic" in text:
            raise Panic("called `Option::unwrap()` on a `None` value")
        return super().encode_text(text)


def pipeline_of(env, text=None, limits=LIMITS, num_workers=2):
    keep = Keep()
    pipeline = join(Tokenize(text or ByteText(), limits, num_workers), keep, Outboxes())
    pipeline.use(env)
    return pipeline, keep


async def answer(pipeline, asked: Request) -> list[str]:
    texts = [""] * asked.num_sequences
    async for deltas in pipeline.stream(asked):
        for delta in deltas:
            texts[delta.index] += delta.text
    return texts


@sim_test(seeds=10)
async def test_each_prompt_goes_on_once_with_its_own_sequence_ids(env: SimEnv):
    pipeline, keep = pipeline_of(env)
    async with pipeline:
        assert await answer(pipeline, request("first", request_id="a", max_tokens=5)) == ["first"]
        texts = await answer(pipeline, request("short", "x" * 300, "last", request_id="b", n=2, max_tokens=400))
    assert texts == ["short", "short", "x" * 300, "x" * 300, "last", "last"]
    assert [(r.request_id, r.prompt_index, r.first_sequence_id) for r in keep.seen] == [
        ("a", 0, 0),
        ("b", 0, 1),
        ("b", 1, 3),
        ("b", 2, 5),
    ]


@sim_test(seeds=3)
async def test_max_tokens_and_seed_are_numbers_from_here_on(env: SimEnv):
    pipeline, keep = pipeline_of(env)
    async with pipeline:
        await answer(pipeline, request("abc", "abc", max_tokens=None))
        await answer(pipeline, request("abc", max_tokens=7, seed=5))
    first, second, third = (r.params for r in keep.seen)
    assert first.max_tokens == 1_000 - 3 and third.max_tokens == 7
    assert third.seed == 5 and first.seed != second.seed and 0 <= first.seed < 2**63


@sim_test(seeds=3)
async def test_the_logprobs_of_all_prompts_together_bound_answers_without_max_tokens(env: SimEnv):
    pipeline, keep = pipeline_of(env, limits=RequestLimits(257, 40_000))
    async with pipeline:
        await answer(pipeline, request("abc", "abd", max_tokens=None, logprobs=20, n=1))
    assert [made.params.max_tokens for made in keep.seen] == [2**20 // 21 // 2] * 2


@sim_test(seeds=3)
async def test_prompt_and_answer_together_fit_the_context_to_the_token(env: SimEnv):
    pipeline, _ = pipeline_of(env, limits=RequestLimits(257, 10))
    async with pipeline:
        assert await answer(pipeline, request("abcdefgh", max_tokens=2)) == ["ab"]
        assert await answer(pipeline, request("abcdefghi", max_tokens=None)) == ["a"]
        for prompt, max_tokens in (("abcdefgh", 3), ("abcdefghij", None), ("abcdefghij", 1)):
            with pytest.raises(Refused) as caught:
                await answer(pipeline, request(prompt, max_tokens=max_tokens))
            assert caught.value.code == "context_length_exceeded"
            assert "10" in caught.value.message and str(len(prompt)) in caught.value.message


class Sparse(ByteText):
    """A token for each run of 80 blanks, as large vocabularies have."""

    def encode_text(self, text: str) -> list[int]:
        return super().encode_text(text.replace(" " * 80, "\t"))


@sim_test(seeds=3)
async def test_a_text_of_many_characters_and_few_tokens_fits_and_one_of_many_tokens_does_not(env: SimEnv):
    pipeline, keep = pipeline_of(env, Sparse())
    blanks, words = ("\n" + " " * 80) * 450, "a" * 36_000
    async with pipeline:
        for prompt in (Prompt(text=blanks), Prompt(chat=ChatPrompt(({"role": "user", "content": blanks},)))):
            await answer(pipeline, Request("r", (prompt,), SamplingParams(max_tokens=1)))
        for prompt in (Prompt(text=words), Prompt(chat=ChatPrompt(({"role": "user", "content": words},)))):
            with pytest.raises(Refused, match="length is 1000 tokens, and the prompt, of 36000 characters") as caught:
                await answer(pipeline, Request("r", (prompt,), SamplingParams(max_tokens=1)))
            assert caught.value.code == "context_length_exceeded"
        await answer(
            pipeline, Request("r", (Prompt(text=words),), SamplingParams(max_tokens=1, truncate_prompt_tokens=5))
        )
    assert [len(made.token_ids) for made in keep.seen] == [900, 900 + len("[user][assistant]"), 5]


@sim_test(seeds=3)
async def test_ids_are_taken_as_they_are_and_chats_go_through_the_template(env: SimEnv):
    pipeline, keep = pipeline_of(env)
    chat = ChatPrompt(({"role": "user", "content": "hi"},))
    prompts = (Prompt(token_ids=np.array([65, 66], np.int32)), Prompt(chat=chat))
    async with pipeline:
        await answer(pipeline, Request("r", prompts, SamplingParams()))
    assert [bytes(r.token_ids.tolist()) for r in keep.seen] == [b"AB", b"[user]hi[assistant]"]


@sim_test(seeds=3)
async def test_a_prompt_of_which_no_token_is_left_is_refused_as_empty(env: SimEnv):
    class Deaf(ByteText):
        def encode_text(self, text: str) -> list[int]:
            return []

    pipeline, _ = pipeline_of(env, Deaf())
    async with pipeline:
        with pytest.raises(Refused) as caught:
            await answer(pipeline, request("  "))
    assert caught.value.code == "empty_prompt"


@pytest.mark.parametrize("padding", [0, 500])  # in place, and in a thread
@sim_test(seeds=10)
async def test_a_panic_of_the_tokenizer_ends_its_request_alone(env: SimEnv, padding: int):
    pipeline, keep = pipeline_of(env, Fragile())
    async with pipeline:
        asked = [request(word + " " * padding, request_id=word, max_tokens=4) for word in ("good", "panic", "fine")]
        results = await asyncio.gather(*(answer(pipeline, r) for r in asked), return_exceptions=True)
        assert pipeline.runners["tokenize"].num_restarts == 0 and pipeline.health.is_ready
    assert results[0] == ["good"] and results[2] == ["fine"]
    assert isinstance(results[1], Failed) and results[1].code == "tokenizer_error" and results[1].status == 500
    assert "unwrap" not in results[1].message
    assert len(keep.seen) == 2


@sim_test(seeds=3)
async def test_a_token_that_the_model_does_not_know_never_leaves_the_stage(env: SimEnv):
    pipeline, keep = pipeline_of(env, limits=RequestLimits(vocab_size=100, max_model_len=1_000))
    async with pipeline:
        with pytest.raises(Failed) as caught:
            await answer(pipeline, request("xyz"))  # 'x' is 120
    assert caught.value.code == "tokenizer_error" and not keep.seen


def test_crashes_of_the_stage_send_no_prompt_twice_and_lose_none():
    seen = 0

    async def main(env: SimEnv) -> None:
        pipeline, keep = pipeline_of(env)
        async with pipeline:
            asked = [request("ab", "c" * 300, request_id=f"{i}", max_tokens=2) for i in range(3)]
            assert await asyncio.gather(*(answer(pipeline, r) for r in asked)) == [["ab", "cc"]] * 3
        keys = [(r.request_id, r.prompt_index) for r in keep.seen]
        assert len(keys) == len(set(keys)) == 6

    for seed in range(40):
        faults = {"tokenize.crash.before": 0.2}
        result = run(main, seed=seed, fault_names=faults, policy=("uniform", "pct", "fifo")[seed % 3])
        assert not result.leaked_tasks
        seen += result.faults_fired["tokenize.crash.before"]
    assert seen > 10


@sim_test(seeds=10)
async def test_a_cancelled_request_goes_no_further_and_frees_its_place(env: SimEnv):
    pipeline, keep = pipeline_of(env, num_workers=1)
    async with pipeline:
        outbox = await pipeline.submit(request("x" * 500, request_id="gone"))
        await env.sleep(0.0001)
        pipeline.cancel("gone")
        assert await answer(pipeline, request("y" * 500, request_id="next", max_tokens=1)) == ["y"]
        assert [d.finish_reason async for ds in outbox for d in ds] == ["abort"]
    assert [r.request_id for r in keep.seen] in (["next"], ["gone", "next"])


def test_long_text_is_tokenized_in_threads_side_by_side_and_short_text_in_place():
    threads: set[str] = set()
    both = threading.Barrier(2, timeout=60)

    class Slow(ByteText):
        def encode_text(self, text: str) -> list[int]:
            threads.add(threading.current_thread().name)
            if len(text) > 200:
                both.wait()
            return super().encode_text(text)

    async def main() -> None:
        env = LiveEnv()
        pipeline, _ = pipeline_of(env, Slow())
        async with pipeline:
            asked = [request("x" * 300, request_id=f"{i}", max_tokens=1) for i in range(2)]
            await asyncio.gather(*(answer(pipeline, r) for r in asked))
            assert threads == {"millrace-tokenize-0", "millrace-tokenize-1"}
            await answer(pipeline, request("short", max_tokens=1))
            assert threading.current_thread().name in threads
        assert not [t for t in threading.enumerate() if t.name.startswith("millrace-tokenize")]
        await env.aclose()

    asyncio.run(main())
