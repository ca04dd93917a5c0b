"""Engines over two ranks answer as an engine of one does, with every feature, in float32.

Ranks are threads here, and processes with MILLRACE_FULL=1.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.model.sharding import process_comm
from millrace.model.sharding.thread_comm import ThreadGroup
from millrace.runtime.env.log import captured_logs
from millrace.runtime.processes import order_line
from millrace.runtime.workers.thread_start import ThreadNotStarted
from millrace.stages.backends.torch import rank, ranks
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError
from millrace.stages.executor.orders import JoinRanks, MakeCache, RankSetup
from millrace.stages.outputs import RequestOutput
from millrace.stages.params import SamplingParams
from millrace.stages.structured_outputs import StructuredOutputs
from tests.counts import FULL, count
from tests.model.lora import peft_formats
from tests.model.lora.peft_formats import write_adapter, write_base
from tests.model.tiny_tokenizers import make_tokenizer
from tests.stages.pressure import begin_together, swap_if_there_is_room

VOCAB_SIZE = 320
MARGIN = 1e-3  # between the likeliest two tokens, below which sums in another order may choose the other
SIZES: dict[str, Any] = {
    "attention_backend": "torch", "device": "cpu", "dtype": "float32", "threads": 1, "tokenizer_workers": 1,
    "block_size": 4, "num_gpu_blocks": 40, "num_cpu_blocks": 16, "max_model_len": 96, "max_num_seqs": 12,
    "max_num_batched_tokens": 64, "enable_lora": True, "max_loras": 2,
}  # fmt: skip
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "executor": "process" if FULL else "thread"}
Said = list[tuple[list[int], Any, Any]]  # tokens, their log-probabilities, those of the prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peft_formats.SHAPE, "vocab_size", VOCAB_SIZE)
        base = write_base("llama", root / "base")
        make_tokenizer("chatml", base, VOCAB_SIZE)
        for kind in ("plain", "q_v"):
            write_adapter(kind, base, root / "adapters" / kind)
    yield root


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(model=str(folder / "base"), lora_dir=str(folder / "adapters"), **{**SIZES, **settings})


def ask_of(number: int) -> tuple[str | None, list[int], SamplingParams]:
    """Each feature in turn; every third draws its tokens."""
    prompt = np.random.default_rng(number).integers(3, VOCAB_SIZE - 1, 5 + 3 * (number % 7)).tolist()
    params: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0, "logprobs": 2}
    if number % 3 == 2:
        params |= {"temperature": 0.8, "top_p": 0.9, "seed": number}
    if number % 5 == 1:
        params |= {"n": 4, "temperature": 0.9, "seed": number}
    if number % 5 == 2:
        params |= {"structured_outputs": StructuredOutputs(regex="[a-f]{3}(,[0-9]{2}){2,4}"), "ignore_eos": False}
    if number % 5 == 3:
        params |= {"prompt_logprobs": 1, "repetition_penalty": 1.2}
    return (None, "plain", "q_v")[number % 3 if number % 4 else 0], prompt, SamplingParams(**params)


async def answer(engine: Engine, number: int) -> Said:
    adapter, prompt, params = ask_of(number)
    output: RequestOutput
    (output,) = [one async for one in engine.generate(prompt, params, adapter=adapter, output_kind="final")]
    return [(list(choice.token_ids), choice.logprobs, output.prompt_logprobs) for choice in output.outputs]


async def answers(engine: Engine, numbers: Sequence[int]) -> tuple[list[Said], set[str]]:
    """(All at once, how sequences were preempted)"""
    async with engine:
        swap_if_there_is_room(engine)
        begin_together(engine, len(numbers))
        said = await asyncio.gather(*(answer(engine, number) for number in numbers))
        engine.core.stages.schedule.scheduler.check()
        return list(said), {how for how, _ in engine.status().core.scheduler.preemptions}


def test_two_ranks_give_the_answers_of_one_with_every_feature(folder: Path) -> None:
    numbers = range(count(in_ci=7, full=50))
    with captured_logs():
        one, _ = asyncio.run(answers(engine_of(folder), numbers))
        two, preempted = asyncio.run(answers(engine_of(folder, **TWO), numbers))
    assert "swap" in preempted
    num_close = num_compared = 0
    for number in numbers:
        for (tokens, scores, prompt), (others, other_scores, other_prompt) in zip(
            one[number], two[number], strict=True
        ):
            least = margin(scores) if ask_of(number)[2].temperature == 0.0 else 1.0
            if least < MARGIN:
                num_close += 1
                continue
            assert others == tokens, f"request {number}, least margin {least:.2g}"
            assert np.allclose([one.logprob for one in other_scores], [one.logprob for one in scores], atol=2e-4)
            assert (prompt is None) == (other_prompt is None)
            if prompt is not None:
                assert np.allclose(other_prompt.logprobs, prompt.logprobs, atol=2e-4)
            num_compared += 1
    print(f"{num_compared} answers equal, {num_close} with two tokens closer than {MARGIN}")
    assert num_compared > 10 * num_close


def margin(scores: Any) -> float:
    """The least difference of the two likeliest tokens of an answer."""
    return min(one.top[0][3] - one.top[1][3] for one in scores)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size = 3: must divide 4 heads, .*; use 1, 2 or 4"),
        ({"tensor_parallel_size": 2, "attention_backend": "native"}, "the native backend computes in one process"),
        ({"tensor_parallel_size": 2, "quantization": "int8"}, "quantization = int8: only the native backend"),
        ({"tensor_parallel_size": 2, "emulate_tp": 2}, "emulate_tp = 2: it is for one process"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size = 0: must be a whole number of at least 1"),
    ],
)
def test_what_ranks_cannot_share_is_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    async def start() -> None:
        async with engine_of(folder, **settings):
            pass

    with captured_logs(), pytest.raises(ConfigError, match=message):
        asyncio.run(start())


@pytest.mark.parametrize("lost", [JoinRanks, MakeCache, None])
def test_a_start_without_the_others_or_a_thread_ends_at_once_and_leaves_none(
    folder: Path, lost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is gone before it joins or has a cache, or no thread that reads the answers."""

    obey = rank.RankWorker.obey

    def fail(worker: rank.RankWorker, order: Any) -> Any:
        if isinstance(order, lost):
            raise OSError(5, "Input/output error")
        return obey(worker, order)

    def refuse(thread: threading.Thread) -> None:
        raise ThreadNotStarted(thread.name, RuntimeError("no more"))

    async def start() -> None:
        async with engine_of(folder, tensor_parallel_size=2, executor="thread"):
            pass

    joined = threading.Event()
    if lost:
        monkeypatch.setattr(rank.RankWorker, "obey", fail)
    if lost is JoinRanks:
        monkeypatch.setattr(ThreadGroup, "comm", lambda *_: joined.wait())  # rank 0's
    if lost is None:
        monkeypatch.setattr(order_line, "start_thread", refuse)
    expected = r"rank 1 in order \d \((joining|a cache of \d+ blocks)\): OSError"
    expected = expected if lost else "thread millrace-orders cannot be started"
    with captured_logs(), pytest.raises(ConfigError, match="the ranks did not start: " + expected):
        asyncio.run(start())
    joined.set()
    assert not [
        thread.name for thread in threading.enumerate() if "rank" in thread.name or thread.name == "millrace-orders"
    ]


def test_a_rank_that_cannot_load_ends_the_start_with_its_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_share(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    async def start() -> None:
        async with engine_of(folder, tensor_parallel_size=2, executor="thread"):
            pass

    monkeypatch.setattr(rank, "load_share", load_share)
    expected = r"ranks did not start: rank 1 in order 1 \(the model\): OSError: \[Errno 5\] Input/output error"
    with captured_logs(), pytest.raises(ConfigError, match=expected):
        asyncio.run(start())
    assert not [
        thread.name for thread in threading.enumerate() if "rank" in thread.name or thread.name == "millrace-orders"
    ]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_one_process_that_sums_as_two_ranks_gives_their_bits(kv_cache_dtype: str) -> None:
    settings: dict[str, Any] = {"attention_backend": "torch", "device": "cpu", "dtype": "float32", "threads": 1}
    settings |= {"kv_cache_dtype": kv_cache_dtype}
    settings |= {"num_gpu_blocks": 32, "max_model_len": 128, "max_num_seqs": 4, "num_cpu_blocks": 0}
    params = SamplingParams(max_tokens=count(in_ci=6, full=40), temperature=0.0, logprobs=1, ignore_eos=True)

    async def scores(**others: Any) -> list[list[float]]:
        async with Engine(**settings, **others) as engine:
            texts = ("Once upon", "Zoe and Tom")
            outputs = [one for text in texts async for one in engine.generate(text, params, output_kind="final")]
            return [[one.logprob for one in output.outputs[0].logprobs or ()] for output in outputs]

    with captured_logs():
        assert asyncio.run(scores(emulate_tp=2)) == asyncio.run(scores(**TWO))


@pytest.mark.parametrize("deterministic", [False, True])
def test_rank_zero_adds_in_the_order_that_the_other_ranks_add_in(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs unlike calls of one sum would wait for each other for ever."""
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(rank, "ProcessComm", lambda *_, **options: joined.append(options))
    monkeypatch.setattr(process_comm, "ProcessComm", lambda *_, **options: joined.append(options))
    config = EngineConfig(model="m", device="cuda", tensor_parallel_size=2, deterministic=deterministic)
    started = ranks.executor_of(config, 1).start_ranks(1)
    started.join(torch.device("cuda"))
    started.close()
    worker = rank.RankWorker()
    monkeypatch.setattr(rank, "open_source", lambda *_: (None, None))
    monkeypatch.setattr(rank, "read_spec", lambda *_: None)
    monkeypatch.setattr(rank, "load_share", lambda *_: (None, (), {}))
    monkeypatch.setattr(rank, "tilings_of", lambda *_: None)
    monkeypatch.setattr(rank.kernel_set, "load", lambda *_: SimpleNamespace(name="torch"))
    worker.obey(RankSetup(config, "m", 1, 2, "cpu", torch.get_num_threads(), "folder", None))
    worker.obey(JoinRanks())
    assert [options["is_ordered"] for options in joined] == [deterministic, deterministic]
