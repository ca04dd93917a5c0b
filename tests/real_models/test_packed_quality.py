"""The real models with their files' codes as weights, against transformers in float32 on the numbers of these codes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.model.demo.making.corpus import documents
from millrace.model.demo.making.evaluate import SEED
from millrace.runtime.env.env import LiveEnv
from millrace.stages.config import EngineConfig
from millrace.stages.evaluation.perplexity import divergences, negative_log_likelihoods
from millrace.stages.evaluation.window_scorer import WindowScorer
from millrace.stages.evaluation.windows import TextWindow, TokenizedText
from tests.counts import FULL, count
from tests.real_models.models import MODELS

pytestmark = pytest.mark.slow

CONTEXT, STRIDE = 512, 500  # tokens of a window, and between two
PROSE_BYTES = 20_000
PAGES = Path(__file__).parents[2]


def held_out() -> str:
    """Stories and chats that the bundled model was never trained on."""
    return "\n\n".join(itertools.islice(documents(SEED, "held_out"), 120))[:PROSE_BYTES]


def prose() -> str:
    """Paragraphs of the pages: no tables, lists, headings or code."""
    pages = (PAGES / "README.md", *sorted((PAGES / "deploy" / "docs").glob("*.md")))
    paragraphs = (part for page in pages for part in page.read_text("utf-8").split("\n\n"))
    plain = (part.replace("\n", " ") for part in paragraphs if part[:1].isalpha() and "`" not in part[:1])
    return "\n\n".join(plain)[:PROSE_BYTES]


TEXTS = {"held-out": held_out, "prose": prose}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_predictions_and_perplexity_are_those_of_the_dequantized_checkpoint(name: str, text: str) -> None:
    model = MODELS[name]
    if model.missing:
        pytest.skip(f"not installed: {', '.join(model.missing)}")
    if not FULL and (name, text) != ("smollm2-135m-instruct", "prose"):
        pytest.skip("takes minutes; MILLRACE_FULL=1 runs it")
    scorer = WindowScorer.load(
        EngineConfig(model=str(model.gguf()), device="cpu", dtype="float32"), LiveEnv(0), CONTEXT
    )
    assert str(scorer.info.quantization).startswith("GGUF ")
    oracle = AutoModelForCausalLM.from_pretrained(model.folder(), dtype=torch.float32).eval()
    tokens = TokenizedText.read(scorer.tokenizer, TEXTS[text](), count(400, 100_000))
    losses, kl, agrees = (np.concatenate(figures) for figures in zip(*compared(scorer, oracle, tokens), strict=True))
    ours, theirs = np.exp(losses.mean(axis=0))
    print(
        f"{name}, {text}: {len(kl)} tokens, perplexity {ours:.4f} and {theirs:.4f} ({ours / theirs - 1:+.4%}), "
        f"KL {kl.mean():.2e} a token, at most {kl.max():.1e}, top 1 {agrees.mean():.4%}"
    )
    assert len(kl) == tokens.num_scored
    assert agrees.mean() >= 0.99 and kl.mean() <= 1e-5
    assert math.isclose(ours, theirs, rel_tol=5e-4)


def compared(
    scorer: WindowScorer, oracle: torch.nn.Module, tokens: TokenizedText
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of pieces of n tokens: both negative log-likelihoods [n, 2], KL [n], whether the same token is likeliest [n]."""
    for window in tokens.windows(CONTEXT, STRIDE):
        wanted, done = logits_of(oracle, window), 0
        for token_ids, logits in scorer.logits(window, scorer.num_step_tokens):
            expected = wanted[done : done + len(token_ids)].numpy()
            done += len(token_ids)
            losses = [negative_log_likelihoods(of, token_ids) for of in (logits, expected)]
            agrees = logits.argmax(axis=1) == expected.argmax(axis=1)
            yield np.stack(losses, axis=1), divergences(expected, logits), agrees
        assert done == window.num_scored


def logits_of(oracle: torch.nn.Module, window: TextWindow) -> torch.Tensor:
    """The logits that predict the scored tokens, [scored, vocabulary]."""
    with torch.inference_mode():
        ids = torch.from_numpy(window.token_ids.astype(np.int64))[None, :-1]
        found: torch.Tensor = oracle(ids, logits_to_keep=window.num_scored).logits[0]
    return found
