"""Adapters in a native engine: rows of many in one batch answer as each does alone, and as PEFT itself does.

Answers are compared to the bit of their log-probabilities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millrace.kernels.native import build, machine
from millrace.kernels.native.lora import PackedAdapter
from millrace.model.lora.prepared import PreparedAdapter
from millrace.runtime.env.log import captured_logs
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError
from millrace.stages.outputs import RequestOutput
from millrace.stages.params import SamplingParams
from tests.counts import FULL
from tests.model.lora import peft_formats
from tests.model.lora.peft_formats import KINDS, write_adapter, write_base
from tests.model.tiny_tokenizers import make_tokenizer
from tests.stages.pressure import begin_together

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no compiler"
)

VOCAB_SIZE = 320
NAMES = [f"a{number}" for number in range(8)]
SIZES: dict[str, Any] = {
    "attention_backend": "native", "enable_lora": True, "block_size": 4, "num_gpu_blocks": 600, "max_model_len": 128,
    "max_num_seqs": 32, "max_num_batched_tokens": 64, "tokenizer_workers": 1, "threads": 2, "num_cpu_blocks": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base, and eight adapters of ranks 4 and 3 in `adapters`."""
    root = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peft_formats.SHAPE, "vocab_size", VOCAB_SIZE)
        base = write_base("llama", root / "base")
        make_tokenizer("chatml", base, VOCAB_SIZE)
        for number, name in enumerate(NAMES):
            made = write_adapter("plain" if number % 2 else "q_v", base, root / "adapters" / name)
            tensors = load_file(made / "adapter_model.safetensors")
            rolled = {key: np.roll(tensor, number, axis=0) for key, tensor in tensors.items()}
            save_file(rolled, made / "adapter_model.safetensors")
        yield root


def engine_of(folder: Path, **settings: Any) -> Engine:
    adapters = {"lora_dir": str(folder / "adapters"), "max_loras": len(NAMES)}
    return Engine(model=str(folder / "base"), **{**SIZES, **adapters, **settings})


Ask = tuple[str | None, list[int], SamplingParams]
Said = list[tuple[list[int], Any]]  # tokens and log-probabilities of each choice


async def answer(engine: Engine, ask: Ask) -> Said:
    adapter, prompt, params = ask
    output: RequestOutput
    (output,) = [one async for one in engine.generate(prompt, params, adapter=adapter, output_kind="final")]
    return [(list(choice.token_ids), choice.logprobs) for choice in output.outputs]


async def together_and_alone(folder: Path, asks: list[Ask], **settings: Any) -> tuple[list[Said], list[Said], int]:
    """(Answers of all at once, answers of each alone where it meets no block of another, loads of the first engine)."""
    with captured_logs():
        async with engine_of(folder, **settings) as engine:
            together = await asyncio.gather(*(answer(engine, ask) for ask in asks))
            engine.core.stages.schedule.scheduler.check()
            assert engine.core.stages.schedule.scheduler.adapters is not None
            num_loads = engine.core.stages.schedule.scheduler.adapters.slots.num_loads
            check_host_bytes(engine)
        async with engine_of(folder, enable_prefix_caching=False, **settings) as other:
            alone = [await answer(other, ask) for ask in asks]
    return together, alone, num_loads


def check_host_bytes(engine: Engine) -> None:
    """Each adapter in host memory counts what it takes packed: its numbers and zeros, and not what was read as well."""
    store = engine.core.stages.adapters.store
    for digest in store.digests():
        adapter: PreparedAdapter[PackedAdapter] = store.get(digest)
        name = engine.adapters.names_by_digest()[digest][0]
        numbers = load_file(Path(str(engine.config.lora_dir)) / name / "adapter_model.safetensors").values()
        size = 4 if engine.info.dtype == "float32" else 2
        assert size * sum(one.size for one in numbers) < adapter.num_bytes == adapter.contents.num_bytes
        assert not hasattr(adapter, "linears"), "what was read is freed"


def ask_of(number: int, **params: Any) -> Ask:
    """One of nine models in turn; every third draws its tokens."""
    prompt = np.random.default_rng(number).integers(3, VOCAB_SIZE - 1, 3 + number % 7).tolist()
    draws = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 3 == 2 else {"temperature": 0.0}
    return (
        [None, *NAMES][number % 9],
        prompt,
        SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **draws, **params}),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if FULL else ["bfloat16"])
def test_32_rows_of_8_adapters_and_the_base_answer_as_each_does_alone(folder: Path, dtype: str) -> None:
    asks = [ask_of(number, logprobs=3 if number % 2 else None) for number in range(32)]
    together, alone, num_loads = asyncio.run(together_and_alone(folder, asks, dtype=dtype))
    assert together == alone and num_loads == 8
    assert len({str(alone[number]) for number in range(9)}) == 9, "the answers tell the adapters apart"


def test_adapters_of_lora_dtype_take_half_the_memory_and_answer_as_torch_does(folder: Path) -> None:
    asks = [ask_of(number, temperature=0.0) for number in range(9)]

    async def live(**settings: Any) -> tuple[list[list[int]], int]:
        with captured_logs():
            async with engine_of(folder, dtype="float32", **settings) as engine:
                said = await asyncio.gather(*(answer(engine, ask) for ask in asks))
                assert engine.adapters is not None
                return [one[0][0] for one in said], engine.status().front.adapters.num_bytes

    ours, num_bytes = asyncio.run(live(lora_dtype="bfloat16"))
    theirs, _ = asyncio.run(live(lora_dtype="bfloat16", attention_backend="torch", device="cpu"))
    files = ((folder / "adapters" / name / "adapter_model.safetensors").stat().st_size for name in NAMES)
    assert ours == theirs and num_bytes < sum(files), "packed float32 is larger than the files"
    with pytest.raises(ConfigError, match="lora_dtype = float16: the native backend .* in float32 or bfloat16 only"):
        asyncio.run(live(lora_dtype="float16"))


def test_two_slots_preemptions_beams_choices_and_drafts_change_no_answer(folder: Path) -> None:
    repeated = [7, 8, 9, 10] * 4
    asks = [ask_of(number, n=3 if number % 5 == 2 else 1, max_tokens=20) for number in range(24)]
    asks += [(name, repeated, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)) for name in (None, "a3")]
    settings: dict[str, Any] = {
        "max_loras": 2,
        "num_gpu_blocks": 40,
        "speculation": "ngram",
        "enable_prefix_caching": True,
    }

    async def live() -> None:
        with captured_logs():
            async with engine_of(folder, **settings) as engine:
                begin_together(engine, len(asks))
                answers = asyncio.gather(*(answer(engine, ask) for ask in asks))
                beams = [await engine.beam_search([5, 6, 7], 3, 8, adapter=name) for name in ("a1", None)]
                together = await answers
                assert engine.status().core.scheduler.num_preemptions > 0
                engine.core.stages.schedule.scheduler.check()
            async with engine_of(folder, enable_prefix_caching=False, speculation="off") as other:
                assert together == [await answer(other, ask) for ask in asks]
                for found, name in zip(beams, ("a1", None), strict=True):
                    wanted = await other.beam_search([5, 6, 7], 3, 8, adapter=name)
                    assert [beam.token_ids for beam in found.outputs] == [beam.token_ids for beam in wanted.outputs]

    asyncio.run(live())


def test_steps_are_handed_over_with_adapters_and_not_past_a_load(folder: Path) -> None:
    """With one slot and two adapters each load waits for the other's rows, between steps that follow each other."""
    asks = [ask_of(number, max_tokens=40, temperature=0.0) for number in (1, 2, 10, 0, 9)]

    async def live() -> int:
        with captured_logs():
            async with engine_of(folder, max_loras=1, speculation="off", steps_in_flight=2) as engine:
                together = await asyncio.gather(*(answer(engine, ask) for ask in asks))
                handed_over = engine.pipeline.stages["execute"].runner.ahead.num_handed_over  # type: ignore[attr-defined]
            async with engine_of(folder, enable_prefix_caching=False, threads=1) as other:
                assert together == [await answer(other, ask) for ask in asks]
        return int(handed_over)

    assert any(asyncio.run(live()) for _ in range(20)), "a busy machine may be late with all of few steps"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", ["llama", "qwen2", "gemma3"])
def test_each_kind_that_is_served_says_the_tokens_of_unmerged_peft(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from tests.model.lora.greedy import peft_tokens, prompts

    monkeypatch.setitem(peft_formats.SHAPE, "vocab_size", VOCAB_SIZE)
    count, num_new = (8, 64) if FULL else (2, 8)
    made = write_base(base, tmp_path / "base")
    served = [kind for kind, one in KINDS.items() if one.at_run_time and (base == "qwen2" or not one.needs_bias)]
    asked, wanted = prompts(count, VOCAB_SIZE), {}
    for kind in served:
        adapter = write_adapter(kind, made, tmp_path / "adapters" / kind)
        wanted[kind], _ = peft_tokens(made, adapter, asked, num_new)
    make_tokenizer("chatml", made, VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)

    async def live() -> dict[str, list[list[int]]]:
        with captured_logs():
            async with engine_of(tmp_path, dtype="float32", max_lora_rank=64) as engine:
                asks: list[Ask] = [(kind, prompt, params) for kind in served for prompt in asked]
                said = [one[0][0] for one in await asyncio.gather(*(answer(engine, ask) for ask in asks))]
        return {kind: said[number * count : (number + 1) * count] for number, kind in enumerate(served)}

    assert len(served) >= 5 and asyncio.run(live()) == wanted
