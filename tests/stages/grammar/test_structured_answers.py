"""Structured answers of the real engine with random weights, checked by an independent validator."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from millrace.stages import LLM, Engine, SamplingParams, StructuredOutputs
from millrace.stages.errors import Refused
from tests.counts import FULL
from tests.model.checkpoints import STYLES, make_checkpoint
from tests.model.tiny_tokenizers import make_tokenizer
from tests.stages.engine.test_engine import live
from tests.stages.pressure import begin_together
from tests.stages.schemas import FAMILIES, make_schema

NUM_SCHEMAS = 25 if FULL else 3  # of each of the ten families, with each of two tokenizers
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "num_gpu_blocks": 512, "threads": 1}
PROMPT = list(range(5, 25))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a byte-level tokenizer and one with byte fallback; the logits are wider than the tokenizers."""
    folder = tmp_path_factory.mktemp("structured")
    for family in ("qwen3", "mistral"):
        make_checkpoint(family, folder / family, has_tokenizer=False, vocab_size=704)
        make_tokenizer(STYLES[family], folder / family, 640)
    return folder


@pytest.fixture
def checkpoint(folder: Path) -> Path:
    return folder / "qwen3"


@pytest.fixture(params=["qwen3", "mistral"])
def either(request: pytest.FixtureRequest, folder: Path) -> Path:
    return folder / str(request.param)


def params(seed: int = 0, **options: Any) -> SamplingParams:
    kinds = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace")
    form = StructuredOutputs(**{name: options.pop(name) for name in kinds if name in options})
    return SamplingParams(**{"max_tokens": 120, "seed": seed, "structured_outputs": form} | options)


async def answer(engine: Engine, asked: SamplingParams, prompt: Any = PROMPT) -> Any:
    (output,) = [output async for output in engine.generate(prompt, asked, output_kind="final")]
    return output.outputs if asked.n > 1 else output.outputs[0]


def with_engine(
    checkpoint: Path, test: Callable[[Engine], Awaitable[None]], limit_s: float = 120.0, **overrides: Any
) -> None:
    async def main() -> None:
        async with Engine(model=str(checkpoint), **SIZES | overrides) as engine:
            await test(engine)

    live(main, limit_s)


@pytest.mark.slow
def test_whatever_is_completed_validates(either: Path) -> None:
    async def test(engine: Engine) -> None:
        async def one(family: str, seed: int) -> bool:
            schema = make_schema(family, seed)
            Draft202012Validator.check_schema(schema)
            got = await answer(engine, params(seed, json=schema, max_tokens=400))
            if got.finish_reason != "stop":
                assert got.finish_reason == "length", (family, seed, got)
                return False
            validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            errors = list(validator.iter_errors(json.loads(got.text)))
            assert not errors, (family, seed, schema, got.text, errors)
            return True

        seeds = [(family, seed) for family in FAMILIES for seed in range(NUM_SCHEMAS)]
        completed = await asyncio.gather(*(one(*which) for which in seeds))
        # how long a random model's strings get is chance, and another one on each backend: 27 to 30 of 30
        assert sum(completed) > 0.8 * len(seeds), f"{sum(completed)} of {len(seeds)} were completed"
        print(f"{sum(completed)} of {len(seeds)} completed, all valid")

    with_engine(either, test, limit_s=1200.0)


@pytest.mark.slow
def test_each_kind_gives_what_it_says(either: Path) -> None:
    choices = ("yes", "no", "maybe é", "🙂")

    async def test(engine: Engine) -> None:
        for seed in range(6):
            got = await answer(engine, params(seed, choice=choices))
            assert got.text in choices and got.finish_reason == "stop"
        got = await answer(engine, params(regex=r"^[a-c]{2,5}-\d$"))
        assert re.fullmatch(r"[a-c]{2,5}-[0-9]", got.text) and got.finish_reason == "stop"
        got = await answer(engine, params(grammar='start: NUM ("+" NUM)~2\nNUM: /[0-9]{1,3}/'))
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){2}", got.text)
        got = await answer(engine, params(grammar='root ::= "a" ("b" | "c") end\nend ::= [x-z]'))
        assert re.fullmatch("a[bc][x-z]", got.text)
        got = await answer(engine, params(json=PERSON, disable_any_whitespace=True))
        assert got.text == json.dumps(json.loads(got.text), ensure_ascii=False) or "\\" in got.text
        got = await answer(engine, params(3, json_object=True, max_tokens=80))
        assert got.finish_reason == "length" or isinstance(json.loads(got.text), dict)

    with_engine(either, test)


def ended(text: str) -> bool:
    return re.fullmatch("[0-9]{3}", text) is not None


@pytest.mark.slow
def test_an_answer_ends_where_its_grammar_ends_and_only_there(checkpoint: Path) -> None:
    async def test(engine: Engine) -> None:
        for options in (
            {},
            {"ignore_eos": True},
            {"min_tokens": 30},
            {"logit_bias": {2: -100.0}},
            {"temperature": 0.0},
        ):
            got = await answer(engine, params(regex="[0-9]{3}", **options))
            assert (ended(got.text), got.finish_reason) == (True, "stop"), (options, got)
        got = await answer(engine, params(regex="[0-9]+", ignore_eos=True, max_tokens=20))
        assert re.fullmatch("[0-9]{20,}", got.text) and got.finish_reason == "length"
        got = await answer(engine, params(regex="[0-9]+", min_tokens=15, logit_bias={2: 100.0}, max_tokens=40))
        assert (len(got.token_ids), got.finish_reason) == (16, "stop")
        got = await answer(engine, params(regex="[0-9]{40}", max_tokens=8))
        assert re.fullmatch("[0-9]{8,}", got.text) and got.finish_reason == "length"
        got = await answer(engine, params(regex="[0-9]{40}", stop=("7",), include_stop_str_in_output=True))
        assert re.fullmatch("[0-689]*7", got.text) and (got.finish_reason, got.stop_reason) == ("stop", "7")
        got = await answer(engine, params(regex="[ab]{6}", logit_bias={i: 50.0 for i in range(3, 40)}, logprobs=2))
        assert re.fullmatch("[ab]{6}", got.text)
        assert min(entry.logprob for entry in got.logprobs) < -1.0, "log-probabilities are the model's own"

    with_engine(checkpoint, test)


@pytest.mark.slow
def test_choices_streams_and_neighbours_do_not_disturb_each_other(checkpoint: Path) -> None:
    asked = params(7, json=PERSON, n=4, max_tokens=200)

    async def test(engine: Engine) -> None:
        alone = [choice.text for choice in await answer(engine, asked)]
        for text in alone:
            Draft202012Validator(PERSON).validate(json.loads(text))
        assert len(set(alone)) > 1
        free = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        freely = (await answer(engine, free, [9, 8, 7])).text
        forms = [{"regex": "[a-z]{12}"}, {"choice": ("x", "yy")}, {"json_object": True}]
        crowd = [answer(engine, params(i, **forms[i % 3])) for i in range(9)]
        among, beside, *_ = await asyncio.gather(answer(engine, asked), answer(engine, free, [9, 8, 7]), *crowd)
        assert [choice.text for choice in among] == alone and beside.text == freely
        pieces = [""] * 4
        async for output in engine.generate(PROMPT, asked):
            for choice in output.outputs:
                pieces[choice.index] += choice.text
        assert pieces == alone

    with_engine(checkpoint, test)


@pytest.mark.slow
def test_a_preempted_answer_goes_on_in_its_grammar(checkpoint: Path) -> None:
    """Where memory is short, swapping on or off, and however many steps are in flight: the answers of ample memory."""
    asked = [params(seed, regex="([a-z]{3} [0-9]{4}\n){8}", max_tokens=110) for seed in range(5)]
    texts: list[list[str]] = []

    def ask(**overrides: Any) -> int:
        preempted = 0

        async def test(engine: Engine) -> None:
            nonlocal preempted
            begin_together(engine, len(asked))
            got = await asyncio.gather(*(answer(engine, one, [*PROMPT, i]) for i, one in enumerate(asked)))
            texts.append([one.text for one in got])
            preempted = engine.status().core.scheduler.num_preemptions

        with_engine(checkpoint, test, attention_backend="torch", **overrides)
        return preempted

    assert ask() == 0
    short = {"num_gpu_blocks": 16, "max_model_len": 256}
    assert ask(**short, swap_space=0) > 0
    assert ask(**short, num_cpu_blocks=64) > 0
    ask(steps_in_flight=1)
    assert texts[1:] == [texts[0]] * 3
    assert all(re.fullmatch("([a-z]{3} [0-9]{4}\n){8}", text) for text in texts[0])


@pytest.mark.slow
def test_the_offline_interface_takes_a_form_for_each_prompt(checkpoint: Path) -> None:
    with LLM(model=str(checkpoint), **SIZES) as llm:
        forms = [params(regex="a{3}"), SamplingParams(max_tokens=3), params(choice=("b", "c"))]
        first, second, third = llm.generate([[5], [6], [7]], forms, use_tqdm=False)
        assert first.outputs[0].text == "aaa" and third.outputs[0].text in ("b", "c")
        assert len(second.outputs[0].token_ids) > 0
        with pytest.raises(Refused, match=r"structured_outputs\.regex: .*look-around"):
            llm.generate([[5]], params(regex="(?=a)b"), use_tqdm=False)
        with pytest.raises(Refused, match="structured_outputs: not supported by a beam search"):
            llm.beam_search([[5]], 2, params=params(regex="a", temperature=0.0, seed=None), use_tqdm=False)
