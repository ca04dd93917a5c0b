"""A KV cache in fp8 on torch: perplexity, memory, reports, swapping and prefix hits, and where it is refused."""

from __future__ import annotations

import asyncio
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from millrace.kernels import kernel_set
from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.kv_scales import measured_scales, scales_of
from millrace.model.decoder.memory_estimate import step_bytes
from millrace.model.decoder.step_inputs import StepInputs
from millrace.model.decoder.weights import load_weights
from millrace.model.demo import WEIGHTS
from millrace.model.families.registry import read_spec
from millrace.stages import LLM, Engine, EngineConfig, SamplingParams
from millrace.stages.backends.torch.kv_dtype import check_kv_dtype
from millrace.stages.errors import ConfigError
from tests.bench.quantized_quality import held_out
from tests.stages.pressure import begin_together, swap_if_there_is_room

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
BLOCK_SIZE, MAX_TOKENS = 16, 256
SMALL: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "threads": 1,
}


@cache
def decoder(dtype: torch.dtype) -> Decoder:
    config = read_spec(WEIGHTS)
    weights = load_weights(WEIGHTS, config, CPU, dtype)
    return Decoder(config, weights, kernel_set.load("torch"), max_positions=MAX_TOKENS)


def kept_and_inputs(dtype: torch.dtype, scales: Tensor | None, ids: list[int]) -> tuple[KVCache, StepInputs[Tensor]]:
    """A prompt in one step, over a cache that keeps it as the weights are, or in 8 bits."""
    model, num_tokens = decoder(dtype), len(ids)
    num_blocks, places = -(-num_tokens // BLOCK_SIZE), torch.arange(num_tokens)
    kept = KVCache(model.spec, num_blocks, BLOCK_SIZE, FP8 if scales is not None else dtype, CPU, scales=scales)
    inputs = StepInputs(
        input_ids=torch.tensor(ids),
        positions=places,
        slot_mapping=places,
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        lengths=torch.tensor([num_tokens], dtype=torch.int32),
        logits_rows=places,
        num_decode=0,
    )
    return kept, inputs


def logits(dtype: torch.dtype, scales: Tensor | None, ids: list[int]) -> Tensor:
    """[T, V] of all tokens."""
    kept, inputs = kept_and_inputs(dtype, scales, ids)
    return decoder(dtype).forward(inputs, kept)


def losses(rows: Tensor, ids: list[int]) -> Tensor:
    """[T - 1] of all tokens but the first."""
    return -rows[:-1].double().log_softmax(1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


# ---- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_perplexity_of_a_held_out_text_stay_near_those_of_a_plain_cache(dtype: torch.dtype) -> None:
    scales = measured_scales(decoder(dtype))
    plain, small = [], []
    worst = 0.0
    for ids in held_out(WEIGHTS, 40):  # of about 90 tokens
        exact, rounded = (logits(dtype, given, ids) for given in (None, scales))
        worst = max(worst, float((rounded - exact).square().mean().sqrt() / exact.std()))
        plain.append(losses(exact, ids))
        small.append(losses(rounded, ids))
    assert 0.0 < worst < 0.2, "three bits behind the first: a part in 16 of each key and value, over four layers"
    assert abs(float(torch.cat(small).mean() - torch.cat(plain).mean())) < 0.005, "of int8's test the same bound"


def test_scales_are_powers_of_two_with_room_for_numbers_twice_as_large() -> None:
    largest = torch.tensor([224.0, 225.0, 1.0, 0.0, 1e-45])
    assert scales_of(largest).tolist() == [1.0, 2.0, 2.0**-7, 1.0, 2.0**-126]


def test_scales_are_of_each_layer_and_head_and_the_same_every_time() -> None:
    model = decoder(torch.float32)
    scales = measured_scales(model)
    assert scales.shape == (model.spec.num_layers, 2, model.spec.num_kv_heads) and scales.dtype == torch.float32
    assert torch.equal(scales, measured_scales(model)) and len(scales.unique()) > 1


# ---- the engine -----------------------------------------------------------------------------------------------------


async def answer(engine: Engine, prompt: list[int], num_new: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    return [t async for output in engine.generate(prompt, params) for t in output.outputs[0].token_ids]


@pytest.mark.slow
def test_answers_are_the_same_alone_swapped_recomputed_and_after_a_prefix_hit() -> None:
    """A pool that holds one longest sequence and little more."""
    common = list(range(40, 100))
    prompts = [[*common, 100 + 7 * i, 5, i] for i in range(4)]
    form = {**SMALL, "max_model_len": 128, "kv_cache_dtype": "fp8"}

    async def alone() -> list[list[int]]:
        async with Engine(EngineConfig(**form, enable_prefix_caching=False, num_gpu_blocks=40)) as engine:
            return [await answer(engine, prompt, 40) for prompt in prompts]

    async def crowded(num_cpu_blocks: int) -> tuple[list[list[int]], set[str], int]:
        async with Engine(EngineConfig(**form, num_gpu_blocks=9, num_cpu_blocks=num_cpu_blocks)) as engine:
            swap_if_there_is_room(engine)
            first = await answer(engine, prompts[0], 40)
            begin_together(engine, len(prompts) - 1)
            found = await asyncio.gather(*(answer(engine, prompt, 40) for prompt in prompts[1:]))
            assert engine.core.stages.allocate.allocator.cache is not None
            return (
                [first, *found],
                {how for how, _ in engine.status().core.scheduler.preemptions},
                engine.core.stages.allocate.allocator.cache.num_hits,
            )

    expected = asyncio.run(alone())
    assert len({tuple(tokens) for tokens in expected}) > 1
    for num_cpu_blocks, wanted in ((0, "recompute"), (200, "swap")):
        found, hows, num_hits = asyncio.run(crowded(num_cpu_blocks))
        assert found == expected and wanted in hows and num_hits > 0


def test_the_report_tells_it_and_the_same_memory_holds_twice_the_tokens_of_bfloat16() -> None:
    sizes = {**SMALL, "kv_cache_bytes": 2**20, "dtype": "bfloat16", "swap_space": 0}
    with LLM(**sizes) as plain, LLM(**sizes, kv_cache_dtype="fp8") as small:
        tables = [llm.info.memory for llm in (plain, small)]
        assert (plain.info.kv_cache_dtype, small.info.kv_cache_dtype) == ("bfloat16", "fp8")
    assert tables[0] is not None and tables[1] is not None
    assert tables[1].num_blocks in (2 * tables[0].num_blocks, 2 * tables[0].num_blocks + 1)
    assert "blocks of 16 tokens in fp8" in tables[1].row("kv_cache").what


def test_on_a_cpu_torch_is_taken_where_nothing_else_was_asked_for() -> None:
    with LLM(**{**SMALL, "attention_backend": "auto"}, kv_cache_dtype="fp8", swap_space=0) as llm:
        assert llm.info.attention_backend == "torch"


def test_the_native_backend_refuses_it_and_names_the_backends_that_support_it() -> None:
    with pytest.raises(ConfigError, match="attention_backend = native: kv_cache_dtype = fp8.*use auto.*torch"):
        LLM(**{**SMALL, "attention_backend": "native"}, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("capability", "is_refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)]
)
def test_a_gpu_without_e4m3_refuses_it_at_the_start(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    config, device = EngineConfig(kv_cache_dtype="fp8"), torch.device("cuda", 0)
    check_kv_dtype(config, device, "torch")
    check_kv_dtype(EngineConfig(), device, "triton")
    if not is_refused:
        return check_kv_dtype(config, device, "triton")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype = fp8: A card has .* 8\.\d, and Triton needs 8\.9"):
        check_kv_dtype(config, device, "triton")


def test_a_step_over_such_a_cache_takes_little_less_than_is_foreseen() -> None:
    model, num_tokens = decoder(torch.float32), 200
    kept, inputs = kept_and_inputs(torch.float32, measured_scales(model), list(range(40, 40 + num_tokens)))
    model.hidden(inputs, kept)  # allocates what is kept between steps
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        model.hidden(inputs, kept)
    events = sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    most = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    foreseen = step_bytes(model.spec, model.weights, num_tokens, num_tokens, is_kv_fp8=True)
    assert most <= foreseen <= 1.25 * most
