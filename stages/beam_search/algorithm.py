"""The beam search algorithm: live beams, finished answers, and the end of a search.

Plain code that takes, step by step, the likeliest next tokens of each live beam. Its results and their order equal
those of transformers' `generate(num_beams=...)`, with sums in float32 as there. `searches.py` computes the steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.sampling_fields import FIELDS
from ..errors import Refused, field_text
from ..messages import Finish, FinishReason, Ints, TopLogprobs
from ..params import SamplingParams

MAX_WIDTH = 64
EARLY_STOPPINGS = (True, False, "never")
MAX_LENGTH_PENALTY = 5.0  # a float32 can hold a million to this power

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """The width of a search and the score of an answer.

    Raises `Refused` for an invalid field, and names it. The score is the sum of the tokens' log-probabilities / (number
    of tokens ** `length_penalty`), EOS included. A penalty of 0 gives the sum, which favours short answers, and 1 the
    mean; below 0, longer answers score even worse.
    """

    width: int  # number of beams; 1 is greedy, and ends with the first answer
    length_penalty: float = 1.0
    # once `width` answers are finished: True ends the search; False continues while the best live beam would beat the
    # worst of them if it ended now; "never" while it would at max_tokens (if length_penalty is above 0)
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if type(self.width) is not int or not 1 <= self.width <= MAX_WIDTH:
            raise Refused(field_text("width", f"must be a whole number from 1 to {MAX_WIDTH}", repr(self.width)))
        penalty = self.length_penalty
        is_number = type(penalty) in (int, float) and math.isfinite(penalty)
        if not is_number or not abs(penalty) <= MAX_LENGTH_PENALTY:
            least, most = -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
            problem = f"must be a number from {least:g} to {most:g}"
            raise Refused(field_text("length_penalty", problem, repr(penalty)))
        if self.early_stopping not in EARLY_STOPPINGS or type(self.early_stopping) not in (bool, str):  # 0 == False
            problem = 'must be true, false or "never"'
            raise Refused(field_text("early_stopping", problem, repr(self.early_stopping)))

    def score(self, logprob: np.float32, num_tokens: int) -> np.float32:
        """The score of an answer of `num_tokens` tokens whose log-probabilities sum to `logprob`."""
        return np.float32(logprob / np.float32(float(num_tokens) ** self.length_penalty))


def refuse_sampling(params: SamplingParams) -> None:
    """Raises `Refused` if a sampling parameter is set that a beam search does not support."""
    for name, off in NO_SAMPLING.items():
        value = getattr(params, name)
        if value != off:
            shown = None if name in ("logit_bias", "structured_outputs") else str(value)
            raise Refused(field_text(name, "not supported by a beam search; leave it out", shown))
    if params.max_tokens == 0:
        raise Refused(field_text("max_tokens", "must be at least 1 for a beam search", "0"))


# field -> the only value that a search supports
NO_SAMPLING: dict[str, Any] = {
    field.name: field.default if field.in_beams is None else field.in_beams
    for field in FIELDS
    if field.is_refused_by_beams
}


class CandidateParams(SamplingParams):
    """Parameters of a search step, which needs more logprobs than a client may request."""

    __slots__ = ()
    most_logprobs: ClassVar[int] = 2**31 - 1


class BeamText(Protocol):
    """The text of a beam, for matching stop strings."""

    def grown(self, token_id: int) -> tuple[BeamText, str | None]:
        """Returns the text with one more token, and the stop string that it completes, if any."""


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One unfinished answer."""

    token_ids: Ints  # [P + G] the prompt and the answer so far
    logprob: np.float32 = np.float32(0)  # sum over the answer's tokens
    tops: tuple[TopLogprobs, ...] = ()  # [G] if requested
    text: BeamText | None = None  # only with stop strings


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A finished answer."""

    beam: Beam
    finish: Finish  # including the score


class BeamSearch:
    """One search from one prompt.

    Until `is_over`, call `step` with the `num_candidates` likeliest next tokens of each of the `live` beams, in their
    order. `finished` holds the best answers so far, best first, at most `width`.

    A step ranks all candidates of all beams by their sums. Of the first `width`, those that end are finished; the first
    `width` that do not end live on. An answer ends with a token of `end_ids` or one that completes a stop string, both
    counted and scored, or at `max_tokens`. Before `min_tokens`, end ids are not candidates. With stop strings fewer
    than `width` beams may live, if most candidates end.
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
        text: BeamText | None = None,
    ) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.live = [Beam(prompt, text=text)]  # best first
        self.finished: list[Hypothesis] = []
        self.num_tokens = 0  # generated in each live beam
        self.is_over = False
        self.num_candidates = num_candidates(params.width, len(set(end_ids)), has_stops=text is not None)
        self._end_ids = frozenset(end_ids)
        self._num_logprobs = num_logprobs  # candidates to keep per token as `tops`; None: none

    def step(self, token_ids: Ints, logprobs: Floats) -> None:
        """Takes the C candidates of each of the B live beams, likeliest first, [B, C] each."""
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
        """`parent` with its candidate at `column`, and the stop string that it completes, if any."""
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
        """Whether a live beam may still become one of the best, under the rule of `early_stopping`."""
        params = self.params
        if len(self.finished) < params.width:
            return True
        if params.early_stopping is True or params.width == 1:
            return False
        is_hopeful = params.early_stopping == "never" and params.length_penalty > 0
        best = params.score(self.live[0].logprob, self.max_tokens if is_hopeful else self.num_tokens)
        return float(best) > _score(self.finished[-1])


def num_candidates(width: int, num_end_ids: int, *, has_stops: bool) -> int:
    """Candidates per beam that leave `width` even if all end ids are among them."""
    return width * (1 + has_stops) + num_end_ids


def _score(hypothesis: Hypothesis) -> float:
    return cast(float, hypothesis.finish.score)
