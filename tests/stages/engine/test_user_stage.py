"""Custom stages: the README's, one after detokenize, a semantic cache, and parts of the pipeline."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.runtime.stage import Context, Outlet, Stage, stage
from millrace.stages.messages import Prompt, Request, StepPlan, StepText, StepTokens, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.replies import reply_text
from millrace.stages.testing import Script, conformance, scripted_engine, scripted_pipeline

README = Path(__file__).parents[3] / "README.md"


def readme_stage() -> dict[str, Any]:
    """What the README's code under "Write a stage" defines."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "builtins"}
    exec(next(block for block in blocks if "class Clip" in block), names)
    return names


def token_request(request_id: str, i: int) -> TokenRequest:
    ids = np.array([*f"tell me about {i}".encode()], np.int32)
    return TokenRequest(request_id, 0, ids, SamplingParams(max_tokens=4, seed=i), first_sequence_id=i)


# -- the README's stage


def test_the_readmes_stage_is_15_lines_and_clips_prompts() -> None:
    names = readme_stage()

    async def main() -> None:
        engine = scripted_engine(answer=lambda prompt: f"<{prompt}>")
        engine.insert(names["Clip"](4), after="tokenize")
        async with engine:
            async for output in engine.generate("once upon a time", output_kind="final"):
                assert output.outputs[0].text == "<time>" and output.num_prompt_tokens == 4

    asyncio.run(main())
    code = README.read_text("utf-8").partition("@dataclass")[2].partition("engine =")[0]
    assert len(code.splitlines()) <= 15


@pytest.mark.slow
def test_the_readmes_stage_passes_the_kit() -> None:
    clip = readme_stage()["Clip"]
    conformance(lambda: clip(4), token_request, seeds=4)


# -- a stage sees each message once, in order, and cancels with its request


def test_a_stage_after_tokenize_sees_each_prompt_once_in_order_and_is_cancelled() -> None:
    seen: list[str] = []
    cancelled: list[str] = []
    has_come = asyncio.Event()

    @stage
    async def watch(request: TokenRequest) -> TokenRequest:
        seen.append(request.request_id)
        try:
            if request.request_id == "r3":
                has_come.set()
                await asyncio.sleep(100.0)
        except asyncio.CancelledError:
            cancelled.append(request.request_id)
            raise
        return request

    async def main() -> None:
        engine = scripted_engine(answer="yes", tokenizer_workers=1)
        engine.insert(watch, after="tokenize")
        async with engine:
            boxes = [await engine.submit(Request(f"r{i}", (Prompt(text=f"{i}"),), SamplingParams())) for i in range(6)]
            await has_come.wait()
            assert engine.abort("r3")
            texts = ["".join([d.text async for ds in box for d in ds]) for box in boxes]
            assert texts == ["yes", "yes", "yes", "", "yes", "yes"]
            await engine.check_quiet()

    asyncio.run(main())
    assert seen == [f"r{i}" for i in range(6)] and cancelled == ["r3"]


def test_a_stage_after_detokenize_sees_every_text_once_in_order_until_a_cancel() -> None:
    seen: dict[int, str] = {}
    steps: list[int] = []

    class Watch(Stage[StepText, StepText]):
        async def handle(self, batch: Sequence[StepText], out: Outlet[StepText]) -> None:
            for step in batch:
                steps.append(step.step)
                for sequence_id, text in zip(step.sequence_ids, step.texts, strict=True):
                    seen[sequence_id] = seen.get(sequence_id, "") + text
                await asyncio.sleep(0)
                out.send(step)

    async def main() -> None:
        engine = scripted_engine(answer=lambda prompt: prompt * 20)
        engine.insert(Watch(), after="detokenize", name="watch")
        async with engine:
            params = SamplingParams(max_tokens=60)
            boxes = [await engine.submit(Request(f"r{i}", (Prompt(text=f"{i}, "),), params)) for i in range(4)]
            first = await anext(boxes[3])
            engine.abort("r3")
            rest = [d async for ds in boxes[3] for d in ds]
            assert rest[-1].finish_reason == "abort"
            for i in range(3):
                assert "".join([d.text async for ds in boxes[i] for d in ds]) == f"{i}, " * 20 == seen[i]
            cut = "".join(d.text for d in [*first, *rest])
            assert ("3, " * 20).startswith(cut) and len(seen[3]) < 60
            await engine.check_quiet()

    asyncio.run(main())
    assert steps == sorted(set(steps))


def test_a_stage_that_does_not_fit_is_refused_with_ports_and_mend() -> None:
    @stage
    def wrong(step: StepText) -> StepText:
        return step

    async def main() -> None:
        engine = scripted_engine()
        engine.insert(wrong, after="tokenize")
        with pytest.raises(
            ValueError, match="tokenize.out makes TokenRequest and wrong.in takes StepText: put a stage"
        ):
            await engine.start()

    asyncio.run(main())


# -- a semantic cache, between tokenize and schedule


Tokens = list[tuple[str, int]]  # (text, token id)


class SemanticCache(Stage[TokenRequest, TokenRequest]):
    """Answers a prompt that has the same words as an earlier one, in any order and case.

    A hit is answered directly. A miss is sent on, and its answer is learnt from a stage after detokenize.
    """

    def __init__(self, max_entries: int = 1000) -> None:
        self.max_entries = max_entries
        self.answers: OrderedDict[frozenset[str], Tokens] = OrderedDict()
        self._open: OrderedDict[int, tuple[frozenset[str], Tokens]] = OrderedDict()  # by sequence id
        self._learning: asyncio.Task[None] | None = None

    def learn_from(self, steps: AsyncIterable[StepText]) -> None:
        self._learning = asyncio.create_task(self._learn(steps))

    async def handle(self, batch: Sequence[TokenRequest], out: Outlet[TokenRequest]) -> None:
        for request in batch:
            words = frozenset(bytes(request.token_ids.tolist()).decode("utf-8", "replace").lower().split())
            sequence_id = request.first_sequence_id
            if words in self.answers:
                texts, token_ids = zip(*self.answers[words], strict=True)
                out.reply(reply_text(request, "".join(texts), token_ids))
            else:
                self._open[sequence_id] = words, []
                out.send(request)
        while len(self._open) > self.max_entries:
            self._open.popitem(last=False)

    async def _learn(self, steps: AsyncIterable[StepText]) -> None:
        async for step in steps:
            for row, sequence_id in enumerate(step.sequence_ids):
                words, answer = self._open.get(sequence_id, (frozenset(), []))
                answer.append((step.texts[row], step.token_ids[row]))
                if row in step.finishes and self._open.pop(sequence_id, None):
                    self.answers[words] = answer
            while len(self.answers) > self.max_entries:
                self.answers.popitem(last=False)

    async def teardown(self) -> None:
        if self._learning is not None:
            self._learning.cancel()


def test_the_semantic_cache_answers_what_it_has_learnt_without_a_step() -> None:
    async def main() -> None:
        cache = SemanticCache()
        engine = scripted_engine(answer=lambda prompt: f"it is {prompt.lower().split()[-1]}")
        engine.insert(cache, after="tokenize", name="cache")
        async with engine:
            cache.learn_from(engine.pipeline.tap("detokenize"))

            async def ask(text: str) -> str:
                async for output in engine.generate(text, SamplingParams(max_tokens=50), output_kind="final"):
                    return output.outputs[0].text
                raise AssertionError("no answer")

            assert await ask("the capital of France") == "it is france"
            while engine.parts.schedule.scheduler.num_in_flight:  # noqa: ASYNC110  a step may follow an answer
                await asyncio.sleep(0.001)
            steps = engine.model.num_steps
            assert await ask("France the capital OF") == "it is france"
            params, last = SamplingParams(n=2, max_tokens=50), None
            async for output in engine.generate("capital the of FRANCE", params, output_kind="final"):
                last = output
            assert last is not None and [choice.text for choice in last.outputs] == ["it is france"] * 2
            assert (last.num_prompt_tokens, last.num_generated_tokens) == (21, 2 * len("it is france") + 2)
            assert engine.model.num_steps == steps
            assert await ask("the capital of Spain") == "it is spain"
            assert engine.model.num_steps > steps
            await engine.check_quiet()

    asyncio.run(main())


@pytest.mark.slow
def test_the_semantic_cache_passes_the_kit_with_nothing_learnt_and_with_some() -> None:
    def taught() -> SemanticCache:
        cache = SemanticCache()
        for i in (3, 4, 9):
            cache.answers[frozenset(f"tell me about {i}".split())] = [("it is ", 1), (f"{i}", 2)]
        return cache

    conformance(SemanticCache, token_request, seeds=4)
    conformance(taught, token_request, seeds=4, is_ordered=False)


# -- slices


def test_tokenize_runs_alone() -> None:
    async def main() -> None:
        async with scripted_pipeline().pipeline.slice("tokenize", "tokenize") as part:
            request = Request("r", (Prompt(text="Hi"), Prompt(text="you")), SamplingParams(n=2), first_sequence_id=7)
            await part.channel("tokenize.in").send(request)
            made = part.channel("tokenize.out")
            found = [await anext(aiter(made)), *made.recv_all()]
            assert [(each.token_ids.tolist(), each.first_sequence_id) for each in found[:1]] == [([72, 105], 7)]

    asyncio.run(main())


def test_everything_up_to_schedule_runs_without_a_device() -> None:
    async def main() -> None:
        async with scripted_pipeline().pipeline.slice("intake", "schedule") as part:
            await part.channel("intake.in").send(Request("r", (Prompt(text="Hello"),), SamplingParams()))
            plan = await anext(aiter(part.channel("schedule.out")))
            assert isinstance(plan, StepPlan)
            assert plan.num_wanted.tolist() == [5] and plan.started[0].request_id == "r"

    asyncio.run(main())


def test_execution_runs_on_token_ids_without_text() -> None:
    script = Script(eos_probability=0.0)

    async def main() -> None:
        made = scripted_pipeline(script=script)
        requests = [token_request(f"r{i}", i) for i in range(3)]
        tokens: dict[int, list[int]] = {i: [] for i in range(3)}
        async with made.pipeline.slice("schedule", "sample") as part:
            for request in requests:
                await part.channel("schedule.in").send(request)
            async for step in part.channel("sample.out"):
                assert isinstance(step, StepTokens)
                for sequence_id, token_id in zip(step.sequence_ids.tolist(), step.token_ids.tolist(), strict=True):
                    tokens[sequence_id].append(token_id)
                if all(len(found) == 4 for found in tokens.values()):
                    break
            made.check()
        for i, request in enumerate(requests):
            assert tokens[i] == script.expected(request.token_ids.tolist(), request.params)

    asyncio.run(main())


def test_a_stage_gets_what_the_base_promises_it() -> None:
    contexts: list[Context] = []

    class Curious(Stage[TokenRequest, TokenRequest]):
        async def setup(self, context: Context) -> None:
            contexts.append(context)

        async def handle(self, batch: Sequence[TokenRequest], out: Outlet[TokenRequest]) -> None:
            assert all(contexts[0].is_live(request.request_id) for request in batch)
            for request in batch:
                out.send(request)

    async def main() -> None:
        engine = scripted_engine(answer="yes")
        engine.insert(Curious(), after="tokenize")
        async with engine:
            async for _ in engine.generate("Hi"):
                pass

    asyncio.run(main())
    assert contexts[0].env.now() > 0 and not contexts[0].is_live("request-0")
