"""What generation_config.json, config.json and the tokenizer say together about requests that set nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.model.checkpoint.generation_defaults import GenerationDefaults
from millrace.model.demo import WEIGHTS
from millrace.model.errors import CheckpointError, DownloadError, TemplateError
from millrace.model.spec import DecoderSpec
from millrace.stages import LLM, SamplingParams
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError, Refused
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


def read_defaults(root: Path, overrides: dict[str, Any], is_applied: bool = True) -> GenerationDefaults:
    shape: Any = SimpleNamespace(vocab_size=640, eos_token_ids=(2,))
    return GenerationDefaults.read(root, cast(DecoderSpec, shape), overrides, is_applied=is_applied)


def test_overrides_replace_the_files_keys_also_where_the_file_is_off(root: Path) -> None:
    change(root, "generation_config.json", eos_token_id=10, temperature=0.7, top_k=5, do_sample=False, max_new_tokens=7)
    assert read_defaults(root, {}).sampling == {"temperature": 0.0}  # do_sample
    both = read_defaults(root, {"temperature": 0.2, "top_p": 0.5})
    assert (both.sampling, both.max_tokens) == ({"temperature": 0.2, "top_p": 0.5, "top_k": 5}, 7)
    only = read_defaults(root, {"top_p": 0.5}, is_applied=False)
    assert (only.sampling, only.max_tokens) == ({"top_p": 0.5}, None)
    assert both.eos_token_ids == only.eos_token_ids == (10, 2)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"temprature": 1}, "temprature is not a key of it; keys are do_sample"),
        ({"num_beams": 4}, "num_beams is not applied as a default"),
        ({"top_p": 3}, "top_p: must be a number from 0 to 1"),
    ],
)
def test_an_override_without_effect_is_refused(root: Path, overrides: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        read_defaults(root, overrides)


@pytest.mark.parametrize("text", ["temperature=1", "[1]", "{", "1"])
def test_a_setting_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        EngineConfig(override_generation_config=text)


@pytest.mark.slow
def test_the_operators_defaults_reach_requests_and_limit_them(root: Path, tmp_path: Path) -> None:
    own = tmp_path / "tokenizer"
    own.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / file, own)
    template = "{{ messages[0].content is string }} {{ messages[0].content[0].text }} {{ voice }}"
    (own / "chat_template.jinja").write_text(template + "{% for message in messages %}{% endfor %}")
    (root / "tokenizer.json").unlink()
    settings: dict[str, Any] = {
        "override_generation_config": {"temperature": 0.2, "top_k": 3},
        "default_chat_template_kwargs": {"voice": "low"},
        "chat_template_content_format": "openai",
        "tokenizer": str(own),
        "max_logprobs": 2,
    }
    with loaded(root, generation_config="off", **settings) as llm:
        params = llm.info.default_params
        assert (params.temperature, params.top_k) == (0.2, 3)
        template = llm._engine.encoder.template
        assert template.render([{"role": "user", "content": "hi"}]).text == "False hi low"
        assert template.render([{"role": "user", "content": "hi"}], kwargs={"voice": "high"}).text == "False hi high"
        llm.generate(["Once"], SamplingParams(max_tokens=1, logprobs=2))
        with pytest.raises(Refused, match="logprobs = 3: this server allows at most 2"):
            llm.generate(["Once"], SamplingParams(max_tokens=1, logprobs=3))


@pytest.mark.slow
def test_a_tokenizer_or_variable_that_does_not_fit_is_refused(root: Path) -> None:
    with pytest.raises(DownloadError, match="tokenizer = 'no such name'"):
        loaded(root, tokenizer="no such name")
    with pytest.raises(TemplateError, match="'voice' is not read by this model's chat template"):
        loaded(root, default_chat_template_kwargs={"voice": "low"})
