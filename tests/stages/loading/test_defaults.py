"""What generation_config.json, config.json and the tokenizer say together about requests that set nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from millrace.model.demo import WEIGHTS
from millrace.stages import LLM, SamplingParams
from millrace.stages.errors import Refused
from millrace.stages.request_limits import RequestLimits


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(WEIGHTS, tmp_path, dirs_exist_ok=True)
    return tmp_path


def change(root: Path, name: str, **keys: Any) -> None:
    file = root / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def loaded(root: Path, **settings: Any) -> LLM:
    return LLM(model=str(root), device="cpu", threads=1, num_gpu_blocks=8, max_model_len=64, **settings)


@pytest.mark.slow
def test_an_answer_ends_at_the_end_tokens_of_all_three_files(root: Path) -> None:
    tokenizer = json.loads((root / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    own, own_id = list(ids.items())[-1]
    change(root, "generation_config.json", eos_token_id=10)
    change(root, "config.json", eos_token_id=[11, 10, -1, 10**6])
    change(root, "tokenizer_config.json", eos_token=own)
    with loaded(root) as llm:
        assert llm.info.eos_token_ids == (10, 11, own_id)


@pytest.mark.slow
def test_defaults_beyond_what_a_request_may_ask_are_brought_into_range(root: Path) -> None:
    change(root, "generation_config.json", temperature=2.5, top_p=0, top_k=-1, do_sample=True, max_new_tokens=7)
    with loaded(root) as llm:
        params = llm.info.default_params
        assert (params.temperature, params.top_k, params.max_tokens) == (2.0, 0, 7) and 0 < params.top_p < 1e-6
        (result,) = llm.generate(["Once upon"])
        assert len(result.outputs[0].token_ids) == 7


def test_max_new_tokens_is_the_default_of_answers_that_may_fill_the_context() -> None:
    limits = RequestLimits(vocab_size=10, max_model_len=100, default_max_tokens=30)
    free, said = SamplingParams(max_tokens=None), SamplingParams(max_tokens=50)
    assert limits.complete_params(free, 10).max_tokens == 30
    assert limits.complete_params(free, 90).max_tokens == 10  # what the context leaves
    assert limits.complete_params(said, 10).max_tokens == 50  # a default is no limit
    assert limits.complete_params(SamplingParams(max_tokens=None, min_tokens=40), 10).max_tokens == 40
    with pytest.raises(Refused):
        limits.complete_params(said, 60)
