"""The checkpoint's own tokenizer behind the stage: the same ids as transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.tokenizer import Tokenizer
from millrace.stages.errors import Refused
from millrace.stages.messages import Prompt
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
