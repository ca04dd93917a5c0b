"""Engines with weights, keys and values in 8 and 4 bits: perplexity, memory, reports, swapping and prefix hits."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest

from millrace.kernels.native import build, loading, machine
from millrace.model.demo import WEIGHTS
from millrace.stages import LLM, Engine, EngineConfig, SamplingParams
from millrace.stages.errors import ConfigError
from tests.bench.quantized_quality import PLAIN, Form, held_out, load, mean_loss
from tests.counts import FULL
from tests.stages.pressure import begin_together, swap_if_there_is_room

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
    ),
]

NUM_DOCUMENTS = 40  # of about 90 tokens
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 8, "threads": 1}
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int8, int8 KV": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


@cache
def loss(form: Form) -> float:
    return mean_loss(load(WEIGHTS, form), held_out(WEIGHTS, NUM_DOCUMENTS))


@pytest.mark.parametrize(
    ("form", "bound"),
    [
        (Form(quantization="int8"), 0.005),
        (Form(cache_dtype="int8"), 0.005),
        (Form(quantization="int4"), 0.03),
    ],
    ids=lambda value: value.label if isinstance(value, Form) else "",
)
def test_perplexity_of_a_held_out_text_stays_near_bfloat16s(form: Form, bound: float):
    """On a text whose keys the bundled model was never trained on; a loss grows by about as much as its exponential."""
    assert 0.4 < loss(PLAIN) < 0.7, "perplexity 1.72 over more documents"
    assert abs(loss(form) - loss(PLAIN)) < bound


async def answer(engine: Engine, prompt: list[int], num_new: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    return [t async for output in engine.generate(prompt, params) for t in output.outputs[0].token_ids]


@pytest.mark.parametrize("form", [form for form in FORMS if FULL or form not in ("int8", "int8 KV")])
def test_answers_are_the_same_alone_swapped_recomputed_and_after_a_prefix_hit(form: str):
    """bfloat16 besides: tokens are equal because bits are. The pool holds one longest sequence and little more."""
    common = list(range(40, 100))
    prompts = [[*common, 100 + 7 * i, 5, i] for i in range(6)]
    roomy = EngineConfig(**SMALL, **FORMS[form], enable_prefix_caching=False, num_gpu_blocks=256)

    async def alone() -> list[list[int]]:
        async with Engine(roomy) as engine:
            return [await answer(engine, prompt, 60) for prompt in prompts]

    async def crowded(num_cpu_blocks: int) -> tuple[list[list[int]], set[str], int]:
        config = EngineConfig(**SMALL, **FORMS[form], num_gpu_blocks=18, num_cpu_blocks=num_cpu_blocks)
        async with Engine(config) as engine:
            swap_if_there_is_room(engine)
            first = await answer(engine, prompts[0], 60)
            begin_together(engine, len(prompts) - 1)
            found = await asyncio.gather(*(answer(engine, prompt, 60) for prompt in prompts[1:]))
            assert engine.core.stages.allocate.allocator.cache is not None
            hows = {how for how, _ in engine.status().core.scheduler.preemptions}
            return [first, *found], hows, engine.core.stages.allocate.allocator.cache.num_hits

    expected = asyncio.run(alone())
    assert len({tuple(tokens) for tokens in expected}) > 1
    for num_cpu_blocks, wanted in ((0, "recompute"), (200, "swap")):
        found, hows, num_hits = asyncio.run(crowded(num_cpu_blocks))
        assert found == expected and wanted in hows and num_hits > 0


def test_what_was_chosen_is_told_and_an_int8_cache_holds_nearly_twice_the_tokens():
    sizes = {"kv_cache_bytes": 2**20, **SMALL}
    with LLM(**sizes) as plain, LLM(**sizes, **FORMS["int8, int8 KV"]) as small, LLM(**sizes, **FORMS["int4"]) as least:
        tables = [llm.info.memory for llm in (plain, small, least)]
        told = [(llm.info.quantization, llm.info.kv_cache_dtype) for llm in (plain, small, least)]
    assert told == [(None, "bfloat16"), ("int8", "int8"), ("int4", "bfloat16")]
    assert all(table is not None for table in tables)
    assert tables[1].num_tokens > 1.9 * tables[0].num_tokens
    weights = [table.row("weights").num_bytes for table in tables]
    in_file = (WEIGHTS / "model.safetensors").stat().st_size
    assert weights[0] < 1.01 * in_file and weights[1] < 0.52 * in_file and weights[2] < 0.36 * in_file
    assert "8.09 bits each, as int8" in tables[1].row("weights").what
    assert "blocks of 16 tokens in int8" in tables[1].row("kv_cache").what
    bits = (
        "12.7" if loading.load_best()[0] in ("amx", "avx512_bf16") else "16"
    )  # coded where bf16 is multiplied as such
    assert f"{bits} bits each, as bfloat16" in tables[0].row("weights").what


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"quantization": "int8", "attention_backend": "torch"},
            "quantization = int8.*attention_backend = torch; leave it out, or use attention_backend = auto$",
        ),
        (
            {"quantization": "int4", "dtype": "float16"},
            "quantization = int4.*float16.*; leave it out, or use dtype = bfloat16$",
        ),
        (
            {"kv_cache_dtype": "int8", "attention_backend": "torch"},
            "kv_cache_dtype = int8.*; use auto or fp8, or use attention_backend = auto$",
        ),
    ],
)
def test_what_only_the_native_step_does_is_refused_elsewhere_with_what_to_do(asked: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        LLM(config=EngineConfig(**SMALL, **asked))


def test_without_a_native_library_quantization_is_refused_and_not_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MILLRACE_INSTRUCTION_SET", "none of them")
    with pytest.raises(ConfigError, match="quantization = int8.*only the native.*none of them.*; leave it out$"):
        LLM(config=EngineConfig(**SMALL, quantization="int8"))
