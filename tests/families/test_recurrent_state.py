"""Models with recurrent layers, whose states a step changes for good: voids, aborts, reused slots, and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.kernels.native import build, machine
from millrace.model.decoder.decoder import Decoder
from millrace.model.families.registry import read_spec
from millrace.runtime.env.env import LiveEnv
from millrace.stages import LLM, EngineConfig, SamplingParams
from millrace.stages.backends.cuda.async_model import AsyncModel
from millrace.stages.backends.cuda.step_submission import StepSubmitter
from millrace.stages.backends.native.runner import NativeRunner
from millrace.stages.backends.recurrent_settings import num_snapshots, within_state_memory
from millrace.stages.errors import ConfigError
from millrace.stages.schedule.speculation import num_speculative_tokens
from tests.counts import FULL
from tests.families.ways import BLOCK_SIZE, wait_until_idle
from tests.families.zoo import Entry, Zoo, chosen
from tests.stages.late_engines import late

NUM_NEW, LENGTHS = 9, (5, 41)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "block_size": BLOCK_SIZE,
    "max_model_len": 64,
    "num_gpu_blocks": 256,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    return Zoo(tmp_path_factory.mktemp("zoo"), NUM_NEW, LENGTHS).entry(chosen(["qwen3.5"])[0])


# natively with a step thread, which takes steps ahead; `late` is an asynchronous device, whose copies are torn
BACKENDS: dict[str, dict[str, Any]] = {"torch": {}, "native": {"threads": 2}}
BACKENDS |= {"late": {"attention_backend": "torch"}} if FULL else {}


@pytest.fixture(scope="module", params=BACKENDS)
def llm(entry: Entry, request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings = {**SETTINGS, "attention_backend": request.param, **BACKENDS[request.param]}
    if request.param == "native" and not has_native():
        pytest.skip("no AVX2, or no C++ compiler")
    with device_of(request.param), LLM(str(entry.folder), **settings) as llm:
        assert is_late(llm) == (request.param == "late")
        yield llm


@contextmanager
def device_of(backend: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if backend == "late":
            patch.setattr(LiveEnv, "streams", late(), raising=False)
        yield


def is_late(llm: LLM) -> bool:
    stages: Any = llm.engine.pipeline.stages
    return isinstance(stages["execute"].runner, AsyncModel)


def has_native() -> bool:
    return bool(machine.instruction_sets()) and build.find_compiler() is not None


def answers(llm: LLM, entry: Entry, **options: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, **options)
    outputs = llm.generate([one.prompt for one in entry.answers], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached_tokens(llm: LLM, entry: Entry) -> list[int]:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return [each.num_cached_tokens for each in llm.generate([one.prompt for one in entry.answers], params)]


def forget_prefixes(llm: LLM) -> None:
    allocate: Any = llm.engine.pipeline.stages["allocate"]
    allocate.reset_prefix_cache()


def wanted(entry: Entry) -> list[list[int]]:
    return [one.token_ids for one in entry.answers]


def patch_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: Callable[[int], None]) -> None:
    """Calls `after(number)` on the device thread when all layers of a step have changed their states.

    On a late device, when the launches that do are submitted.
    """
    num_steps = iter(range(10**6))

    def patched(compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
        found = compute(*args, **options)
        after(next(num_steps))
        return found

    if is_late(llm):
        monkeypatch.setattr(StepSubmitter, "forward", partialmethod(partial(patched, StepSubmitter.forward)))
        return
    monkeypatch.setattr(Decoder, "hidden", partialmethod(partial(patched, Decoder.hidden)))
    monkeypatch.setattr(NativeRunner, "compute", partialmethod(partial(patched, NativeRunner.compute)))


@pytest.mark.slow
@pytest.mark.parametrize("failing", [(0,), (1,), (3, 4), (2, 6, 9)])
def test_steps_that_fail_behind_their_layers_change_no_answer(
    llm: LLM, entry: Entry, monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...]
) -> None:
    failed = []

    def fail(number: int) -> None:
        if number in failing:
            failed.append(number)
            raise RuntimeError("planted")

    forget_prefixes(llm)
    patch_steps(llm, monkeypatch, fail)
    assert answers(llm, entry) == wanted(entry)
    assert failed == list(failing)
    monkeypatch.undo()
    assert answers(llm, entry) == wanted(entry), "behind the prefixes that are cached now"
    assert cached_tokens(llm, entry) == [4, 40]


@pytest.mark.slow
def test_a_prompt_aborted_midway_and_sent_again_has_the_same_answer(
    llm: LLM, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_prefixes(llm)
    patch_steps(
        llm, monkeypatch, lambda number: number == 1 and llm._loop.call_soon_threadsafe(llm.engine.abort, "mine")
    )

    async def abort() -> list[Any]:
        stream = llm.engine.generate(entry.answers[1].prompt, SamplingParams(max_tokens=NUM_NEW), request_id="mine")
        return [output async for output in stream]

    assert llm._run(abort())[-1].outputs[0].finish_reason == "abort"
    monkeypatch.undo()
    assert answers(llm, entry) == wanted(entry)
    assert answers(llm, entry) == wanted(entry)


@pytest.mark.slow
def test_steps_in_flight_behind_a_stop_harm_no_sequence_that_takes_the_slot(llm: LLM, entry: Entry) -> None:
    first = entry.answers[0].token_ids
    for stop in (first[0], first[3]):
        cut = answers(llm, entry, stop_token_ids=[stop])
        assert cut[0] == first[: first.index(stop) + 1]
        assert answers(llm, entry) == wanted(entry)


@pytest.mark.slow
@pytest.mark.parametrize("num_new", [6, 7, 8, 9])
def test_the_next_turn_of_a_chat_goes_on_from_the_state_behind_the_last_answer(
    llm: LLM, entry: Entry, num_new: int
) -> None:
    first = entry.answers[1]
    prompt = [*first.prompt, *first.token_ids[:num_new], 7, 8, 9]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    forget_prefixes(llm)
    expected = llm.generate([prompt], params, use_tqdm=False)[0]
    forget_prefixes(llm)
    llm.generate([first.prompt], replace(params, max_tokens=num_new), use_tqdm=False)
    wait_until_idle(llm)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.num_cached_tokens >= len(first.prompt) + num_new - 1 > 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("lfm2", "torch"),
        ("granite-hybrid-dense", "torch"),
        ("nemotron-h", "torch"),
        *[("granite-hybrid-dense", "late")] * FULL,
    ],
)
def test_choices_share_the_state_of_their_prompt_also_when_swapped_and_cached(
    tmp_path: Path, entry: Entry, name: str, backend: str
) -> None:
    other = Zoo(tmp_path, NUM_NEW, LENGTHS).entry(chosen([name])[0])
    few = {"num_gpu_blocks": 26, "num_cpu_blocks": 256, "max_num_batched_tokens": 48, "state_cache_bytes": 2**18}
    few |= {"attention_backend": "torch"} if backend == "late" else {}
    with device_of(backend), LLM(str(other.folder), **{**SETTINGS, **few}) as llm:
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, n=3)
        for num_round in range(2):
            outputs = llm.generate([one.prompt for one in other.answers], params, use_tqdm=False)
            for output, tokens in zip(outputs, wanted(other), strict=True):
                assert [list(choice.token_ids) for choice in output.outputs] == [tokens] * 3, f"round {num_round}"
        assert any(output.num_cached_tokens for output in outputs)


@pytest.mark.slow
def test_a_prefix_without_room_for_its_state_is_computed_again(entry: Entry) -> None:
    with LLM(str(entry.folder), **SETTINGS, state_cache_bytes=0) as llm:
        assert answers(llm, entry) == answers(llm, entry) == wanted(entry)
        assert cached_tokens(llm, entry) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculation": "ngram"}, r"speculation = ngram: is not supported .* recurrent layers \(gdn in 2 of 4\)"),
        ({"enable_lora": True}, "enable_lora = True"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype = fp8"),
        ({"tensor_parallel_size": 2}, "recurrent layers, which ranks do not share"),
    ],
)
def test_a_setting_that_recurrent_layers_do_not_go_with_is_refused(
    entry: Entry, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(entry.folder), **{**SETTINGS, **settings})


def test_no_step_has_drafts_as_a_rejected_one_would_have_changed_the_state(llm: LLM) -> None:
    assert EngineConfig().speculation == "auto" and llm.info.states is not None
    assert num_speculative_tokens(EngineConfig(), llm.info) == 0
    assert num_speculative_tokens(EngineConfig(), replace(llm.info, states=None, attention_backend="native")) > 0


def test_the_memory_table_counts_the_states_of_all_slots(llm: LLM, entry: Entry) -> None:
    assert llm.info.memory is not None and llm.info.states is not None
    spec = read_spec(entry.folder)
    assert llm.info.states.state_bytes == spec.state_bytes(4) == 2 * 4 * (4 * 8 * 8 + 3 * 64)
    assert llm.info.memory.row("recurrent").num_bytes == 4 * llm.info.states.state_bytes


def test_the_memory_table_counts_the_states_of_cached_prefixes(llm: LLM, entry: Entry) -> None:
    assert llm.info.memory is not None and llm.info.states is not None
    states, memory = llm.info.states, llm.info.memory
    fifth = 256 * memory.bytes_per_block // 5
    assert states.num_snapshots == min(256, fifth // states.state_bytes) > 0
    assert memory.row("snapshots").num_bytes == states.num_snapshots * states.state_bytes


def test_states_of_cached_prefixes_take_what_is_set_or_a_fifth_of_the_cache() -> None:
    def most(**settings: Any) -> int:
        return num_snapshots(EngineConfig(block_size=16, max_num_seqs=4, **settings), 1000, 100, 400_000, 160)

    assert most() == 20  # a fifth of a quarter of what is free
    assert most(kv_cache_bytes=50_000) == 10
    assert most(num_gpu_blocks=100) == 2
    assert most(state_cache_bytes=7999) == 7
    assert most(state_cache_bytes=10**9) == 40, "four sequences of ten blocks"
    assert most(state_cache_bytes=0) == most(enable_prefix_caching=False) == 0


def test_fewer_sequences_run_at_once_where_their_states_need_more_memory(entry: Entry) -> None:
    spec, config = read_spec(entry.folder), EngineConfig(max_num_seqs=8)
    each = spec.state_bytes(torch.bfloat16.itemsize)
    assert within_state_memory(config, spec, 2, 64 * each) is config
    assert within_state_memory(config, spec, 2, 64 * each - 8).max_num_seqs == 7
    with pytest.raises(ConfigError, match="the recurrent state of a sequence takes"):
        within_state_memory(config, spec, 2, 8 * each - 8)
    dense = replace(spec, layers=tuple(spec.layers[index] for index in spec.kv_layers))
    assert within_state_memory(config, dense, 2, 0) is config
