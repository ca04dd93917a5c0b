"""Perplexity of a text, and how far the predictions of two models of one vocabulary are apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...model.errors import ModelError
from ..errors import ConfigError
from .window_scorer import Floats, WindowScorer
from .windows import TextWindow, TokenizedText

Doubles = NDArray[np.float64]
Progress = Callable[[int], object]  # called with the number of tokens scored since the last call


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """How well a model predicts a text. `nll` is the negative log-likelihood, in nats."""

    num_tokens: int  # scored
    num_bytes: int  # of their text
    mean_nll: float  # per token
    stderr_nll: float  # standard error of that mean, as if tokens were independent

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_nll)

    @property
    def perplexity_stderr(self) -> float:
        return self.perplexity * self.stderr_nll

    @property
    def bits_per_byte(self) -> float:
        return self.mean_nll * self.num_tokens / self.num_bytes / math.log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelComparison:
    """How far a model is from a reference, over the tokens of a text. `kl` is KL(reference || model), in nats."""

    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float  # share of tokens before which both find the same token likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result for a text. `against` and `reference` are None without a second model."""

    context_length: int  # tokens of a window
    stride: int  # tokens between the ends of two windows
    model: TextScore
    reference: TextScore | None = None
    against: ModelComparison | None = None
    seconds: float = 0.0  # of computing, both models together

    @property
    def tokens_per_s(self) -> float:
        """Scored tokens a second."""
        return self.model.num_tokens / max(self.seconds, 1e-9)


def evaluate(
    scorer: WindowScorer,
    text: TokenizedText,
    context_length: int,
    stride: int,
    reference: WindowScorer | None = None,
    on_progress: Progress = lambda _: None,
    clock: Callable[[], float] = lambda: 0.0,
) -> Evaluation:
    """Scores a text with a model, and compares it with a reference if there is one.

    Blocks. `clock` gives seconds. Raises `ConfigError` for a window that makes no sense, and `ModelError` for logits
    that are no numbers.
    """
    text.check(context_length, stride)
    if reference is not None:
        _check_same_vocabulary(scorer, reference)
    sums = _Scores(text.num_scored, has_reference=reference is not None)
    began = clock()
    for window in text.windows(context_length, stride):
        sums.add(window, scorer, reference)
        on_progress(window.num_scored)
    seconds = clock() - began
    return Evaluation(
        context_length=context_length,
        stride=stride,
        model=_score(sums.nll, text.num_bytes),
        reference=None if reference is None else _score(sums.reference_nll, text.num_bytes),
        against=None if reference is None else sums.comparison(),
        seconds=seconds,
    )


class _Scores:
    """The figures of each scored token, in order."""

    def __init__(self, num_tokens: int, *, has_reference: bool) -> None:
        self.nll: Doubles = np.empty(num_tokens)
        num_compared = num_tokens if has_reference else 0
        self.reference_nll: Doubles = np.empty(num_compared)
        self.kl: Doubles = np.empty(num_compared)
        self.agrees = np.empty(num_compared, np.bool_)
        self._done = 0

    def add(self, window: TextWindow, scorer: WindowScorer, reference: WindowScorer | None) -> None:
        """Scores the next window."""
        if reference is None:
            for token_ids, logits in scorer.logits(window, scorer.num_step_tokens):
                self.nll[self._next(len(token_ids))] = negative_log_likelihoods(logits, token_ids)
            return
        chunk = min(scorer.num_step_tokens, reference.num_step_tokens)
        pieces = zip(scorer.logits(window, chunk), reference.logits(window, chunk), strict=True)
        for (token_ids, logits), (_, expected) in pieces:
            at = self._next(len(token_ids))
            self.nll[at] = negative_log_likelihoods(logits, token_ids)
            self.reference_nll[at] = negative_log_likelihoods(expected, token_ids)
            self.kl[at] = divergences(expected, logits)
            self.agrees[at] = logits.argmax(axis=1) == expected.argmax(axis=1)

    def comparison(self) -> ModelComparison:
        return ModelComparison(
            mean_kl=float(self.kl.mean()),
            p99_kl=float(np.quantile(self.kl, 0.99)),
            max_kl=float(self.kl.max()),
            top1_agreement=float(self.agrees.mean()),
        )

    def _next(self, count: int) -> slice:
        begin, self._done = self._done, self._done + count
        return slice(begin, self._done)


def negative_log_likelihoods(logits: Floats, token_ids: NDArray[np.int32]) -> Doubles:
    """[n] in nats, of tokens [n] by their logits [n, V]."""
    most = logits.max(axis=1)
    sums = np.exp(logits - most[:, None]).sum(axis=1, dtype=np.float64)
    chosen = logits[np.arange(len(token_ids)), token_ids].astype(np.float64)
    found: Doubles = np.log(sums) + most.astype(np.float64) - chosen
    return found


def divergences(expected: Floats, logits: Floats) -> Doubles:
    """[n] KL(expected || logits) in nats, of logits [n, V]; in float64, as near models differ by 1e-6."""
    p, q = (_log_softmax(of.astype(np.float64)) for of in (expected, logits))
    found: Doubles = np.maximum(0.0, (np.exp(p) * (p - q)).sum(axis=1))
    return found


def _log_softmax(logits: Doubles) -> Doubles:
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def _score(nll: Doubles, num_bytes: int) -> TextScore:
    broken = np.flatnonzero(~np.isfinite(nll))
    if len(broken):
        raise ModelError(
            f"the logits before scored token {broken[0]} are no finite numbers, and so {len(broken)} of {len(nll)}: "
            "the weights, or a dtype too small for them; try dtype = float32"
        )
    stderr = float(nll.std(ddof=1)) / math.sqrt(len(nll)) if len(nll) > 1 else 0.0
    return TextScore(num_tokens=len(nll), num_bytes=num_bytes, mean_nll=float(nll.mean()), stderr_nll=stderr)


def _check_same_vocabulary(scorer: WindowScorer, reference: WindowScorer) -> None:
    one, two = scorer.info.vocab_size, reference.info.vocab_size
    if one != two:
        raise ConfigError(
            f"against = {reference.info.model_id}: has a vocabulary of {two} tokens, and {scorer.info.model_id} one of "
            f"{one}: must be the same, as predictions are compared token by token"
        )
