"""The checkpoint's own tokenizer behind the stage: the same ids as transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.tokenizer import Tokenizer
from millrace.stages.errors import Refused
from millrace.stages.messages import ChatPrompt, Prompt
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import RequestLimits
from millrace.stages.tokenize.prompt_encoder import ModelEncoder
from millrace.stages.tokenize.stage import encode_prompt
from tests.model.tiny_tokenizers import VOCAB_SIZE, make_tokenizer

LIMITS = RequestLimits(vocab_size=VOCAB_SIZE, max_model_len=1_000)


@pytest.fixture(scope="module", params=["llama3", "mistral"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer that puts BOS in front of a text."""
    path: Path = tmp_path_factory.mktemp(request.param)
    make_tokenizer(request.param, path, VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def encoder(root: Path) -> ModelEncoder:
    tokenizer = Tokenizer.read(root)
    return ModelEncoder(tokenizer, ChatTemplate.read(root, tokenizer), "tiny")


@pytest.fixture(scope="module")
def theirs(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root)


def test_a_prompt_without_added_special_tokens_has_the_bos_that_it_spells(encoder, theirs):
    spelled = theirs.bos_token + "Once upon a time"
    for add_special_tokens, num_bos in ((True, 2), (False, 1)):
        prompt = Prompt(text=spelled, add_special_tokens=add_special_tokens)
        token_ids = encode_prompt(encoder, LIMITS, prompt).tolist()
        assert token_ids == theirs(spelled, add_special_tokens=add_special_tokens).input_ids
        assert token_ids[: num_bos + 1].count(theirs.bos_token_id) == num_bos


def test_an_empty_prompt_is_the_bos_alone_where_the_tokenizer_adds_one(encoder, theirs):
    assert encode_prompt(encoder, LIMITS, Prompt(text="")).tolist() == theirs("").input_ids == [theirs.bos_token_id]
    with pytest.raises(Refused, match="adds no token; send at least one character") as caught:
        encode_prompt(encoder, LIMITS, Prompt(text="", add_special_tokens=False))
    assert (caught.value.code, caught.value.param) == ("empty_prompt", "prompt")


def test_a_text_that_cannot_fit_is_refused_after_a_part_of_it(encoder, monkeypatch):
    seen: list[int] = []
    real = encoder.encode_words
    monkeypatch.setattr(encoder, "encode_words", lambda text, param: seen.append(len(text)) or real(text, param))
    text = "The quick brown fox. " * 40_000
    chat = ChatPrompt(({"role": "user", "content": [{"type": "text", "text": text}]},))
    for prompt in (Prompt(text=text), Prompt(chat=chat)):
        with pytest.raises(Refused, match="maximum context length is 1000 tokens") as caught:
            encode_prompt(encoder, LIMITS, prompt)
        assert caught.value.code == "context_length_exceeded" and str(len(text)) in caught.value.message
    assert sum(seen) < len(text) // 4


@pytest.mark.parametrize("length", [1, 40_000])
def test_an_unpaired_surrogate_is_an_error_of_the_field_that_holds_it(encoder, length):
    text = "a" * length + "\ud800"
    chat = ChatPrompt(({"role": "user", "content": text},))
    for prompt, param in ((Prompt(text=text, add_special_tokens=False), "prompt"), (Prompt(chat=chat), "messages")):
        with pytest.raises(Refused, match=rf"^{param} holds an unpaired surrogate \(U\+D800\)") as caught:
            encode_prompt(encoder, LIMITS, prompt)
        assert caught.value.param == param


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_of_any_length_may_be_cut_from_either_side(encoder, theirs, side):
    text = "The quick brown fox. " * 12_000
    ids = theirs(text).input_ids
    made = encode_prompt(encoder, LIMITS, Prompt(text=text), is_cut=True)
    params = SamplingParams(truncate_prompt_tokens=900, truncation_side=side)
    right = ids[-900:] if side == "left" else ids[:900]
    assert LIMITS.truncate(params, made).tolist() == right
