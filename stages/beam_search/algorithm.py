"""Beam search: which answers to a prompt live on, which are finished, and when no better one can come.

Plain code, told a step at a time which tokens are likely behind each live beam. What lives, what is finished and in
which order is transformers' `generate(num_beams=...)`, sums in float32 as there. Knows tokens and log-probabilities;
refuses to know who computes them: that is `searches.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import Refused
from ..messages import Finish, FinishReason, Ints, TopLogprobs
from ..params import SamplingParams

MAX_WIDTH = 64
EARLY_STOPPINGS = (True, False, "never")
MAX_LENGTH_PENALTY = 5.0  # a float32 holds a million tokens to the power of it

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How wide to search, and what makes an answer good. `Refused` names the field.

    An answer's score is the sum of its tokens' log-probabilities / (their number ** `length_penalty`), EOS included: 0
    is the plain sum, which short answers win, 1 the mean; below 0 longer is worse still.
    """

    width: int  # beams; 1 is greedy, and ends with its first answer
    length_penalty: float = 1.0
    # once `width` answers are finished: True ends; False goes on while the best live beam would beat the worst of
    # them if it ended now; "never" while it would at its longest (with a length_penalty above 0)
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if type(self.width) is not int or not 1 <= self.width <= MAX_WIDTH:
            raise Refused(f"width = {self.width!r}: a beam search is 1 to {MAX_WIDTH} wide", param="width")
        penalty = self.length_penalty
        is_number = type(penalty) in (int, float) and math.isfinite(penalty)
        if not is_number or not abs(penalty) <= MAX_LENGTH_PENALTY:
            least, most = -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
            message = f"length_penalty = {penalty!r}: must be a number from {least:g} to {most:g}"
            raise Refused(message, param="length_penalty")
        if self.early_stopping not in EARLY_STOPPINGS or type(self.early_stopping) not in (bool, str):  # 0 == False
            message = f'early_stopping = {self.early_stopping!r}: must be true, false or "never"'
            raise Refused(message, param="early_stopping")

    def score(self, logprob: np.float32, num_tokens: int) -> np.float32:
        """That of an answer of so many tokens."""
        return np.float32(logprob / np.float32(float(num_tokens) ** self.length_penalty))


def refuse_sampling(params: SamplingParams) -> None:
    """Raises `Refused` for what asks for another choice of tokens than the likeliest answers as the model has them."""
    for name, off in NO_SAMPLING.items():
        value = getattr(params, name)
        if value != off:
            shown = "" if name in ("logit_bias", "structured_outputs") else f" = {value}"
            message = f"{name}{shown}: a beam search takes the likeliest answers as the model has them; leave it out"
            raise Refused(message, param=name)
    if params.max_tokens == 0:
        raise Refused("max_tokens = 0: a beam search looks for answers of at least 1 token", param="max_tokens")


NO_SAMPLING: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "logit_bias": {},
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "bad_words_token_ids": (),
    "top_k": 0,
    "structured_outputs": None,
}


class CandidateParams(SamplingParams):
    """For the steps of a search, which look at more candidates than any client may ask for."""

    __slots__ = ()
    most_logprobs: ClassVar[int] = 2**31 - 1


class Text(Protocol):
    """The text of a beam, as far as it is needed to see a stop string."""

    def grown(self, token_id: int) -> tuple[Text, str | None]:
        """That with one token more, and the stop string that is complete with it."""


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One answer as far as it has come."""

    token_ids: Ints  # [P + G] the prompt's and its own
    logprob: np.float32 = np.float32(0)  # the sum over its own
    tops: tuple[TopLogprobs, ...] = ()  # [G] if they were asked for
    text: Text | None = None  # where there are stop strings


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A finished answer."""

    beam: Beam
    finish: Finish  # with its score


class BeamSearch:
    """One search from one prompt. While it `is_over` not: hand `step` the `num_candidates` likeliest tokens behind each
    of the `live` beams, in their order. `finished` are the best answers so far, best first, at most `width`.

    A step looks at all candidates of all beams in falling order of their sums. Of the first `width`, those that end are
    finished; the first `width` that do not end live on. An answer ends with a token of `end_ids`, which is counted and
    scored; with a token that completes a stop string, likewise; or at `max_tokens`. Before `min_tokens` the end ids are
    no candidates. With stop strings there may be fewer live beams than `width`, if most of the candidates end.
    """

    def __init__(
        self,
        params: BeamParams,
        prompt: Ints,
        max_tokens: int,
        end_ids: Collection[int] = (),
        *,
        min_tokens: int = 0,
        num_logprobs: int | None = None,
        text: Text | None = None,
    ) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.live = [Beam(prompt, text=text)]  # best first
        self.finished: list[Hypothesis] = []
        self.num_tokens = 0  # of each live beam
        self.is_over = False
        self.num_candidates = num_candidates(params.width, len(set(end_ids)), has_stops=text is not None)
        self._end_ids = frozenset(end_ids)
        self._num_logprobs = num_logprobs  # to keep of each token's candidates, for who asks

    def step(self, token_ids: Ints, logprobs: Floats) -> None:
        """The candidates behind each of the B live beams, likeliest first, [B, C] each."""
        self.num_tokens += 1
        sums = logprobs + np.array([beam.logprob for beam in self.live], np.float32)[:, None]
        if self.num_tokens <= self.min_tokens:
            sums[np.isin(token_ids, list(self._end_ids))] = -np.inf
        order = np.argsort(-sums, axis=None, kind="stable")
        width, is_last = self.params.width, self.num_tokens == self.max_tokens
        live: list[Beam] = []
        ended: list[Hypothesis] = []
        for rank, at in enumerate(order[: np.count_nonzero(sums > -np.inf)].tolist()):
            if len(live) == width or (is_last and rank == width):
                break
            row, column = divmod(at, sums.shape[1])
            token_id = int(token_ids[row, column])
            if rank >= width and token_id in self._end_ids:
                continue
            beam, stop = self._grow(self.live[row], token_ids[row], logprobs[row], column, sums[row, column])
            finish = self._finish(beam, token_id, stop)
            if finish is None:
                live.append(beam)
            elif rank < width:
                ended.append(Hypothesis(beam, finish))
        self.live = live
        self.finished = sorted([*self.finished, *ended], key=_score, reverse=True)[:width]
        self.is_over = is_last or not live or not self._may_improve()

    def _grow(
        self, parent: Beam, token_ids: Ints, logprobs: Floats, column: int, logprob: np.float32
    ) -> tuple[Beam, str | None]:
        """`parent` with its candidate at `column`, and the stop string that this completes."""
        token_id, tops, stop, text = int(token_ids[column]), parent.tops, None, parent.text
        if self._num_logprobs is not None:
            some = slice(self._num_logprobs)
            ids, numbers = tuple(token_ids[some].tolist()), tuple(logprobs[some].tolist())
            tops = (*tops, TopLogprobs(float(logprobs[column]), column + 1, ids, numbers))
        if text is not None and token_id not in self._end_ids:
            text, stop = text.grown(token_id)
        return Beam(np.append(parent.token_ids, np.int32(token_id)), logprob, tops, text), stop

    def _finish(self, beam: Beam, token_id: int, stop: str | None) -> Finish | None:
        score = float(self.params.score(beam.logprob, self.num_tokens))
        if stop is not None:
            return Finish(FinishReason.STOP, stop, score)
        if token_id in self._end_ids:
            return Finish(FinishReason.STOP, None, score)
        return Finish(FinishReason.LENGTH, None, score) if self.num_tokens == self.max_tokens else None

    def _may_improve(self) -> bool:
        """Whether a live beam may still become one of the best, as far as `early_stopping` wants to know."""
        params = self.params
        if len(self.finished) < params.width:
            return True
        if params.early_stopping is True or params.width == 1:
            return False
        is_hopeful = params.early_stopping == "never" and params.length_penalty > 0
        best = params.score(self.live[0].logprob, self.max_tokens if is_hopeful else self.num_tokens)
        return float(best) > _score(self.finished[-1])


def num_candidates(width: int, num_end_ids: int, *, has_stops: bool) -> int:
    """Tokens of each beam that a step looks at, so that `width` are left if all end ids are among them."""
    return width * (1 + has_stops) + num_end_ids


def _score(hypothesis: Hypothesis) -> float:
    return cast(float, hypothesis.finish.score)
