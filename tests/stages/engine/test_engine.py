"""The engine as a library: a real model of a few thousand weights, all seven stages, live."""

import asyncio
import math
import re
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from hashlib import pbkdf2_hmac
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.pipeline import NotServing
from millrace.runtime.simulation.testing import no_leaked_tasks
from millrace.runtime.startup.phases import Phases
from millrace.runtime.trace.tracer import EventKind
from millrace.stages import LLM, Engine, EngineConfig, SamplingParams
from millrace.stages.backends.rates import largest_grant
from millrace.stages.errors import ConfigError, Overloaded, Refused, TimedOut
from millrace.stages.loading.model import load_model
from millrace.stages.messages import Prompt, Request
from millrace.stages.request_limits import RequestLimits
from tests.model.checkpoints import make_checkpoint

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_gpu_blocks": 64, "threads": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path)
    return path


@pytest.fixture(scope="module")
def reference(checkpoint: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    made_before: dict[tuple[int, ...], list[int]] = {}

    def greedy(prompt: list[int], num_tokens: int) -> list[int]:
        key = (*prompt, -num_tokens)
        made_before[key] = made_before[key] if key in made_before else generate(prompt, num_tokens)
        return made_before[key]

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        with torch.no_grad():
            made = model.generate(
                torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return made[0, len(prompt) :].tolist()

    return greedy


def engine_of(checkpoint: Path, **overrides) -> Engine:
    return Engine(model=str(checkpoint), **{**SMALL, **overrides})


async def last(outputs: AsyncIterator):
    return [output async for output in outputs][-1]


def live(test, limit_s: float = 120.0) -> None:
    """Runs a live test: no task and no thread of the engine may be left."""

    async def main() -> None:
        with no_leaked_tasks():
            await test()

    with no_threads_left():
        asyncio.run(asyncio.wait_for(main(), limit_s))


@contextmanager
def no_threads_left() -> Iterator[None]:
    """Checks that threads of the engine that start in the block end in it; others, such as the log's, may stay."""
    before = set(threading.enumerate())
    yield
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("millrace")]
    assert [thread.name for thread in ours if thread not in before] == []


def test_greedy_tokens_are_those_of_transformers_alone_and_among_others(checkpoint, reference):
    prompts = [[5], list(range(3, 20)), list(range(100, 180)), [7, 8, 9]]

    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            alone = await last(engine.generate(prompts[1], GREEDY, output_kind="final"))
            answers = await asyncio.gather(*(last(engine.generate(p, GREEDY, output_kind="final")) for p in prompts))
        assert alone.outputs[0].token_ids == answers[1].outputs[0].token_ids
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.outputs[0].token_ids == reference(prompt, 12)
            assert answer.finished and answer.outputs[0].finish_reason == "length"
            assert (answer.num_prompt_tokens, answer.num_generated_tokens) == (len(prompt), 12)

    live(test)


def test_prompts_that_begin_alike_get_the_tokens_they_would_get_alone(checkpoint, reference):
    prompts = [[*range(3, 44), last] for last in (7, 8, 9)] + [list(range(3, 44)), list(range(3, 30))]

    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            answers = [await last(engine.generate(p, GREEDY, output_kind="final")) for p in prompts]
            again = await asyncio.gather(*(last(engine.generate(p, GREEDY, output_kind="final")) for p in prompts))
        assert [answer.num_cached_tokens for answer in answers] == [0, 41, 41, 40, 26]
        assert [answer.num_cached_tokens for answer in again] == [41, 41, 41, 40, 26]
        for prompt, first, second in zip(prompts, answers, again, strict=True):
            assert first.outputs[0].token_ids == second.outputs[0].token_ids == reference(prompt, 12)

    live(test)


def test_prompt_token_ids_are_one_shared_list_in_all_outputs_but_the_last(checkpoint):
    """A prompt may have ten thousand tokens, and each generated token is an output."""

    async def test() -> None:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        async with engine_of(checkpoint) as engine:
            by_ids = [o.prompt_token_ids async for o in engine.generate([5, 6, 7], params)]
            by_text = [o.prompt_token_ids async for o in engine.generate("Once", params)]
        assert len(by_ids) > 2 and all(ids is by_ids[0] for ids in by_ids[:-1])
        assert by_ids[0] == by_ids[-1] == [5, 6, 7]
        assert by_text[:-1] == [None] * (len(by_text) - 1) and by_text[-1]

    live(test)


def test_deltas_joined_are_what_cumulative_and_final_outputs_say(checkpoint):
    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            params = SamplingParams(max_tokens=20, seed=3, n=2, logprobs=1)
            deltas = [o async for o in engine.generate("Once upon", params)]
            wholes = [o async for o in engine.generate("Once upon", params, output_kind="cumulative")]
            (final,) = [o async for o in engine.generate("Once upon", params, output_kind="final")]
        for index in (0, 1):
            parts = [part for output in deltas for part in output.outputs if part.index == index]
            choice = final.outputs[index]
            assert "".join(part.text for part in parts) == choice.text == wholes[-1].outputs[index].text
            assert [i for part in parts for i in part.token_ids] == choice.token_ids
            assert "".join(entry.token for entry in choice.logprobs) == choice.text
            texts = [whole.outputs[index].text for whole in wholes]
            assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
        assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]
        assert final.outputs[0].token_ids != final.outputs[1].token_ids

    live(test)


def test_a_chat_goes_through_the_template_and_may_fill_the_context(checkpoint):
    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
            answer = await last(engine.chat([{"role": "user", "content": "Hi"}], params))
            assert answer.num_prompt_tokens + answer.num_generated_tokens == engine.info.max_model_len
            text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            assert answer.num_prompt_tokens == len(engine.encode(text))

    live(test)


def test_leaving_the_loop_early_gives_every_block_back(checkpoint):
    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            async for _ in engine.generate("Once", SamplingParams(max_tokens=100, ignore_eos=True)):
                break
            for _ in range(200):
                if (
                    engine.core.stages.allocate.allocator.pool.num_available == engine.info.num_blocks
                    and not engine.core.stages.schedule.scheduler.sequences
                ):
                    break
                await asyncio.sleep(0.005)
            assert (
                engine.core.stages.allocate.allocator.pool.num_available == engine.info.num_blocks
                and not engine.core.stages.schedule.scheduler.sequences
            )
            assert not engine.pipeline.exit.live

    live(test)


def test_an_abort_ends_a_request_once_with_its_cause(checkpoint):
    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            outbox = await engine.submit(Request("mine", (Prompt(text="Once"),), params))
            await anext(outbox)
            assert engine.abort("mine", "disconnect") and not engine.abort("mine")
            reasons = [delta.finish_reason async for deltas in outbox for delta in deltas]
            assert reasons == ["abort"] and outbox.cause == "disconnect"

    live(test)


def test_refusals_deadlines_and_names_in_use_are_told_apart(checkpoint):
    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            for prompt, params in (("", GREEDY), ("a", SamplingParams(max_tokens=128)), ([640], GREEDY)):
                with pytest.raises(Refused):
                    await last(engine.generate(prompt, params))
            with pytest.raises(TimedOut):
                await last(engine.generate("Once", SamplingParams(max_tokens=120, ignore_eos=True), timeout_s=0.001))
            outbox = await engine.submit(Request("twice", (Prompt(text="a"),), GREEDY))
            with pytest.raises(Refused):
                await engine.submit(Request("twice", (Prompt(text="a"),), GREEDY))
            assert [d async for ds in outbox for d in ds]

    live(test)


def test_more_requests_than_may_wait_are_turned_away_with_a_time_to_come_back(checkpoint):
    async def test() -> None:
        async with engine_of(checkpoint, max_num_seqs=1, max_waiting_requests=2) as engine:
            asked = [last(engine.generate(f"{i}", GREEDY, output_kind="final")) for i in range(8)]
            results = await asyncio.gather(*asked, return_exceptions=True)
        refused = [r for r in results if isinstance(r, Overloaded)]
        assert refused and len(refused) + sum(r.finished for r in results if r not in refused) == 8
        assert all(r.estimated_wait_s >= 1.0 and r.queue_depth == 2 for r in refused)

    live(test)


def test_stopping_ends_what_is_under_way_and_frees_threads_tasks_and_memory(checkpoint):
    async def test() -> None:
        engine = engine_of(checkpoint)
        with pytest.raises(NotServing):
            await engine.submit(Request("early", (Prompt(text="a"),), GREEDY))
        await engine.start()
        weights = weakref.ref(engine.core.stages.loaded.runner.decoder)
        outbox = await engine.submit(Request("r", (Prompt(text="Once"),), SamplingParams(max_tokens=100)))
        await anext(outbox)
        await engine.stop()
        await engine.stop()
        reasons = [delta.finish_reason async for deltas in outbox for delta in deltas]
        assert reasons[-1] in ("abort", "stop") and reasons.count(None) == len(reasons) - 1
        assert weights() is None and engine.health.state == "stopped" and engine.info.num_blocks == 64
        with pytest.raises(NotServing):
            await engine.submit(Request("late", (Prompt(text="a"),), GREEDY))
        with pytest.raises(RuntimeError, match="starts once"):
            await engine.start()

    live(test)


def test_an_engine_left_by_an_exception_is_stopped(checkpoint):
    async def test() -> None:
        with pytest.raises(ZeroDivisionError):
            async with engine_of(checkpoint) as engine:
                raise ZeroDivisionError
        assert engine.health.state == "stopped"

    live(test)


def test_what_the_stages_do_is_in_the_trace(checkpoint):
    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            await last(engine.generate("Once", GREEDY))
            kinds = set(engine.pipeline.tracer.read_all()["kind"].tolist())
            assert {EventKind.STAGE_BATCH, EventKind.STEP_PLANNED, EventKind.STEP_GRANTED} <= kinds

    live(test)


def test_two_engines_in_one_process_do_not_mix(checkpoint, reference):
    async def test() -> None:
        async with engine_of(checkpoint) as one, engine_of(checkpoint, block_size=32) as two:
            asked = [e.generate([4 + i, 5], GREEDY, output_kind="final") for i in range(4) for e in (one, two)]
            answers = await asyncio.gather(*map(last, asked))
            assert [a.outputs[0].token_ids for a in answers] == [reference([4 + i // 2, 5], 12) for i in range(8)]
            assert (one.info.block_size, two.info.block_size) == (16, 32)

    live(test)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_gpu_blocks": 7}, ["max_model_len = 128", "8 blocks", "at most 112"]),
        ({"num_gpu_blocks": None, "kv_cache_bytes": 1_000}, ["kv_cache_bytes = 1000", "no sequence fits"]),
        ({"num_gpu_blocks": 10**9}, ["num_gpu_blocks = 1000000000", "TiB", "at most", "weights"]),
        ({"max_model_len": "auto", "num_gpu_blocks": None, "kv_cache_bytes": 1_000}, ["auto, or 2048", "no sequence"]),
        ({"max_model_len": "long"}, ["max_model_len = 'long'"]),
        ({"max_model_len": 4_096}, ["2048"]),
        ({"enable_chunked_prefill": False}, ["max_num_batched_tokens = 64"]),
        ({"device": "cuda"}, ["device = cuda"]),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start_with_what_would(checkpoint, settings, words):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    async def test() -> None:
        with pytest.raises(ConfigError) as caught:
            engine = engine_of(checkpoint, **settings)
            try:
                await engine.start()
            finally:
                assert engine.health.state == "stopped"
        assert all(word in str(caught.value) for word in words), str(caught.value)

    live(test)


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({}, 1_024),  # 64 blocks of 16
        ({"num_gpu_blocks": 7}, 112),
        ({"num_gpu_blocks": 500}, 2_048),  # the model's
        ({"num_gpu_blocks": None}, 2_048),
        ({"enable_chunked_prefill": False}, 64),  # of a step, into which a prompt must go whole
    ],
)
def test_auto_gives_the_longest_context_that_fits_and_an_answer_fills_it(checkpoint, settings, context):
    async def test() -> None:
        async with engine_of(checkpoint, max_model_len="auto", **settings) as engine:
            assert engine.info.max_model_len == context
            params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
            answer = await last(engine.generate([7] * (context - 3), params, output_kind="final"))
            assert answer.num_generated_tokens == 3
            with pytest.raises(Refused, match=str(context)):
                await last(engine.generate([7] * (context - 2), params))

    live(test)


def test_the_step_that_memory_is_measured_with_is_the_largest_there_can_be(checkpoint):
    config = EngineConfig(model=str(checkpoint), max_num_batched_tokens=300, max_model_len=128, num_gpu_blocks=64)
    loaded = load_model(config, Phases(time.monotonic), LiveEnv(0))
    grant = largest_grant(config, 128)
    assert grant.num_tokens.tolist() == [127, 127, 46]
    logits = loaded.runner.forward(grant)
    assert logits.shape == (3, 640) and np.isfinite(logits).all()


# -- offline


def test_offline_answers_come_in_the_order_of_the_prompts(checkpoint, reference, capsys):
    with no_threads_left(), LLM(str(checkpoint), **SMALL) as llm:
        prompts = [[3 + i] * (1 + 5 * (i % 3)) for i in range(12)]
        params = [SamplingParams(max_tokens=1 + i % 4, temperature=0.0, ignore_eos=True) for i in range(12)]
        answers = llm.generate(prompts, params)
        assert "12/12" in capsys.readouterr().err
        quiet = llm.generate(prompts[0], params[0], use_tqdm=False)
        assert "1/1" not in capsys.readouterr().err
    assert [a.outputs[0].token_ids for a in answers] == [reference(p, 1 + i % 4) for i, p in enumerate(prompts)]
    assert [a.prompt_token_ids for a in answers] == prompts
    assert quiet[0].outputs[0].token_ids == answers[0].outputs[0].token_ids


def test_offline_chats_take_one_conversation_or_several(checkpoint):
    def ask(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    with LLM(str(checkpoint), **SMALL) as llm:
        (one,) = llm.chat(ask("Hi"), GREEDY, use_tqdm=False)
        two = llm.chat([ask("Hi"), ask("Hello there")], GREEDY, use_tqdm=False)
    assert one.outputs[0].token_ids == two[0].outputs[0].token_ids and len(two) == 2


def test_offline_works_inside_a_running_loop(checkpoint):
    async def notebook() -> int:
        with LLM(str(checkpoint), **SMALL) as llm:
            return llm.generate("Once", GREEDY, use_tqdm=False)[0].num_generated_tokens

    assert asyncio.run(notebook()) == 12


def test_a_prompt_that_is_refused_fails_the_call_and_the_next_one_works(checkpoint):
    with LLM(str(checkpoint), **SMALL) as llm:
        with pytest.raises(Refused):
            llm.generate(["fine", ""], GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="2 prompts"):
            llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
        assert llm.generate("fine", GREEDY, use_tqdm=False)[0].finished


def test_a_model_that_does_not_load_leaves_nothing_behind(tmp_path):
    from millrace.model.errors import ModelError

    with no_threads_left(), pytest.raises(ModelError):
        LLM(str(tmp_path), **SMALL)


# -- the event loop during tokenization


@pytest.mark.slow
def test_tokenizing_a_256k_token_prompt_leaves_the_loop_free(checkpoint):
    """The gap between two turns of the loop, p99, while a prompt of over 256k tokens is tokenized: under 20 ms, or on a
    machine that is busy with other things under three times what it is beside a thread that never touches Python.
    The best of three tries: others can only add to it."""

    async def p99_until(done) -> float:
        loop, lags = asyncio.get_running_loop(), []
        while not done():
            began = loop.time()
            await asyncio.sleep(0.002)
            lags.append(loop.time() - began - 0.002)
        assert len(lags) >= 20
        return sorted(lags)[math.ceil(len(lags) * 0.99) - 1]

    async def try_once(engine: Engine) -> tuple[float, float]:
        text = "It's 3 small cats, isn't it? " * 20_000
        asked = asyncio.ensure_future(last(engine.generate(text, SamplingParams(max_tokens=1))))
        lag = await p99_until(asked.done)
        with pytest.raises(Refused) as caught:  # it is too long for this model, and only now that shows
            await asked
        assert int(re.search(r"the prompt has (\d+)", caught.value.message)[1]) > 256_000, caught.value.message
        hashing = asyncio.ensure_future(asyncio.to_thread(pbkdf2_hmac, "sha256", b"", b"", 1_000_000))
        return lag, max(0.020, 3 * await p99_until(hashing.done))

    async def test() -> None:
        async with engine_of(checkpoint) as engine:
            engine.core.stages.intake.limits = RequestLimits(
                vocab_size=640, max_model_len=1_000_000
            )  # no limit at intake
            engine.core.stages.tokenize.limits = RequestLimits(
                vocab_size=640, max_model_len=200_000
            )  # counted to its end
            tries = []
            while not tries or (tries[-1][0] >= tries[-1][1] and len(tries) < 3):
                tries.append(await try_once(engine))
            assert any(lag < bound for lag, bound in tries), f"p99 lag and its bound, s: {tries}"

    live(test)
