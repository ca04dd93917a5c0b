"""Perplexity of a text against transformers, windows, and two models compared."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.model.decoder.decoder import Decoder
from millrace.model.decoder.native_decoder import NativeDecoder
from millrace.model.demo import WEIGHTS
from millrace.model.errors import ModelError
from millrace.model.text.tokenizer import Tokenizer
from millrace.runtime.env.env import LiveEnv
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.evaluation.perplexity import divergences, evaluate, negative_log_likelihoods
from millrace.stages.evaluation.window_scorer import WindowScorer
from millrace.stages.evaluation.windows import TextWindow, TokenizedText
from tests.families.checkpoint import make_model, write
from tests.families.zoo import chosen

TEXT = "Once upon a time there was a girl named Lily. She had a red ball, and Tom wanted it too.\n" * 4
FLOAT32 = EngineConfig(dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def scorer() -> WindowScorer:
    return WindowScorer.load(FLOAT32, LiveEnv(0))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Gemma 3 of four layers, of which two see 16 tokens."""
    row = next(row for row in chosen(["gemma3"]) if row.name == "gemma3")
    return write(row, make_model(row), tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def text(scorer) -> TokenizedText:
    return TokenizedText.read(scorer.tokenizer, TEXT)


@pytest.fixture(scope="module")
def oracle():
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)


def by_transformers(model, context_length: int, stride: int) -> float:
    """The mean negative log-likelihood over windows whose ends are `stride` apart."""
    ids = AutoTokenizer.from_pretrained(WEIGHTS)(TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    total, done, end = 0.0, 1, min(context_length, len(ids))
    while True:
        begin = max(0, end - context_length)
        with torch.no_grad():
            logits = model(input_ids=ids[None, begin:end]).logits[0].double()
        scores = logits[done - begin - 1 : -1].log_softmax(-1)
        total -= float(scores.gather(1, ids[done:end, None]).sum())
        if end == len(ids):
            return total / (len(ids) - 1)
        done, end = end, min(end + stride, len(ids))


@pytest.mark.parametrize(("context_length", "stride"), [(2048, 1024), (48, 31)])
def test_perplexity_is_that_of_transformers_in_float32(scorer, text, oracle, context_length, stride):
    found = evaluate(scorer, text, context_length, stride).model
    expected = by_transformers(oracle, context_length, stride)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert found.num_tokens == len(text.token_ids) - 1
    bits = expected * found.num_tokens / math.log(2)
    first = scorer.tokenizer.decode(text.token_ids[:1])
    assert found.bits_per_byte == pytest.approx(bits / len(TEXT.removeprefix(first)), rel=1e-4)


def test_torch_finds_the_perplexity_of_the_native_library(scorer, text):
    config = EngineConfig(dtype="float32", device="cpu", threads=1, attention_backend="torch")
    by_torch = WindowScorer.load(config, LiveEnv(0))
    assert by_torch.num_step_tokens != scorer.num_step_tokens  # pieces of the smaller step, in both
    result = evaluate(scorer, text, 600, 599, by_torch)
    assert result.model.perplexity == pytest.approx(result.reference.perplexity, rel=1e-5)
    assert result.against.mean_kl < 1e-7 and result.against.top1_agreement == 1.0


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_windows_that_free_memory_change_no_logits_of_a_text(backend, windowed, monkeypatch):
    sizes = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 64}
    config = replace(FLOAT32, model=str(windowed), attention_backend=backend, **sizes)
    freeing = WindowScorer.load(config, LiveEnv(0), 97)
    assert freeing.info.memory.layout is not None and freeing.max_length == 100 < freeing.info.max_model_len
    for decoder in (NativeDecoder, Decoder):
        monkeypatch.setattr(decoder, "runs_kinds", False)
    whole = WindowScorer.load(config, LiveEnv(0), 97)
    for begin in (8, 29):  # two windows, one after the other, in the same blocks
        window, pieces = TextWindow(np.arange(begin, begin + 97, dtype=np.int32), 96), 0
        for (_, found), (_, expected) in zip(freeing.logits(window, 16), whole.logits(window, 16), strict=True):
            assert np.array_equal(found, expected)
            pieces += 1
        assert pieces == 6  # nothing follows the last token, which is alone in its step


def test_a_comparison_is_kl_and_agreement_of_the_two_models(scorer, text):
    config = EngineConfig(dtype="bfloat16", quantization="int4", device="cpu", threads=1)
    rough = WindowScorer.load(config, LiveEnv(0))
    (window,) = text.windows(2048, 1024)
    p, q = (
        torch.cat([torch.tensor(logits).double() for _, logits in one.logits(window, 512)]).log_softmax(-1)
        for one in (scorer, rough)
    )
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(1)
    found = evaluate(rough, text, 2048, 1024, scorer).against
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-6) and found.mean_kl > 1e-3
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-6)
    assert found.top1_agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))


@pytest.mark.parametrize("before", [[], [9]])
@pytest.mark.parametrize(("count", "length", "stride"), [(2, 5, 1), (5, 5, 3), (6, 5, 4), (23, 5, 1), (24, 7, 3)])
def test_windows_score_each_token_once_in_order(before, count, length, stride):
    text = TokenizedText(np.array(before, np.int32), np.arange(100, 100 + count, dtype=np.int32), 1)
    text.check(length, stride)
    windows = list(text.windows(length, stride))
    scored = np.concatenate([window.token_ids[-window.num_scored :] for window in windows])
    assert scored.tolist() == text.token_ids[0 if before else 1 :].tolist() and len(scored) == text.num_scored
    for number, window in enumerate(windows):
        own = window.token_ids[len(before) :]
        assert window.token_ids[: len(before)].tolist() == before and (np.diff(own) == 1).all()
        assert len(window.token_ids) <= length and 1 <= window.num_scored < len(window.token_ids)
        assert number == 0 or len(window.token_ids) == length


def test_wrong_windows_and_texts_are_refused_with_what_is_right(scorer, text):
    for length, stride, words in (
        (1, 1, "context_length = 1: must be at least 2"),
        (8, 8, "stride = 8: must be at least 1, and at most 7 with context_length = 8"),
        (8, 0, "stride = 0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(scorer, text, length, stride)
    with pytest.raises(ConfigError, match="the text has 0 tokens: must be at least 2"):
        TokenizedText.read(scorer.tokenizer, "")
    with pytest.raises(ConfigError, match=r"context_length = 999999: must be at most \d+, the model's maximum"):
        WindowScorer.load(FLOAT32, LiveEnv(0), 999_999)


def test_logits_that_are_no_numbers_are_an_error(scorer, text, monkeypatch):
    def broken(window, _):
        yield window.token_ids[-window.num_scored :], np.full((window.num_scored, scorer.info.vocab_size), np.nan, "f4")

    monkeypatch.setattr(scorer, "logits", broken)
    with pytest.raises(ModelError, match=f"before scored token 0 are no finite numbers, and so {text.num_scored} of"):
        evaluate(scorer, text, 2048, 1024)


def test_figures_of_rows_are_those_of_the_formula():
    logits = np.array([[0.0, 0.0, 0.0, 0.0], [80.0, -80.0, 0.0, 79.0]], np.float32)
    assert negative_log_likelihoods(logits, np.array([2, 1], np.int32)) == pytest.approx(
        [math.log(4), 160 + math.log1p(math.exp(-1))]
    )
    even = np.log(np.array([[0.5, 0.5]], np.float32))
    skewed = np.log(np.array([[0.25, 0.75]], np.float32))
    assert divergences(even, skewed) == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3)], abs=1e-7)
    assert divergences(even, even).tolist() == [0.0]


def test_a_cut_text_counts_the_bytes_of_its_tokens():
    tokenizer = Tokenizer.read(WEIGHTS)
    cut = TokenizedText.read(tokenizer, TEXT, 10)
    assert len(cut.token_ids) == 10
    assert cut.num_bytes == len(tokenizer.decode(cut.token_ids.tolist())) - len(tokenizer.decode([cut.token_ids[0]]))
