"""Weights in 12 bits a number, where that is faster: the answers are unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.kernels.native import build, loading, machine
from millrace.kernels.native.weights import NativeWeights
from millrace.model.demo import WEIGHTS
from millrace.stages import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
    ),
]

PROMPTS = ["Once upon a time", "The cat said:", "A list: one, two, three,"]


def answers() -> tuple[list[Any], int]:
    """Tokens and log-probabilities of some answers, and bytes of weights."""
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, ignore_eos=True)
    with LLM(device="cpu", max_model_len=256, max_num_seqs=8, threads=1) as llm:
        assert llm.info.memory is not None
        choices = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
        told = [(tuple(choice.token_ids), tuple(choice.logprobs or ())) for choice in choices]
        return told, llm.info.memory.row("weights").num_bytes


def test_the_bundled_models_answers_are_the_same_from_a_sixth_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if loading.load_best()[0] not in ("amx", "avx512_bf16"):
        pytest.skip("no engine here multiplies bf16 as such")
    coded, coded_bytes = answers()
    monkeypatch.setattr(NativeWeights, "encode_bf16_12bit", lambda model: None)
    plain, plain_bytes = answers()
    assert coded == plain and len(set(coded)) == len(PROMPTS)
    assert coded_bytes < 0.85 * plain_bytes
    assert plain_bytes > 0.9 * (WEIGHTS / "model.safetensors").stat().st_size


def test_without_memory_for_it_an_engine_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(weights: NativeWeights) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(NativeWeights, "encode_bf16_12bit", lack)
    told, _ = answers()
    assert len(told) == len(PROMPTS)
