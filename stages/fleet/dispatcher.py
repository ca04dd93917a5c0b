"""The choice of an engine process for a request: the one with the least work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..messages import TokenRequest
from ..routing.policies import ANSWER_TOKENS, DECODE_COST


class CoreLoad(NamedTuple):
    """An engine process that may take a request. The least one comes first in order."""

    work: int  # of the requests in it, by `work_of`
    num_requests: int
    core: int  # its index


def work_of(request: TokenRequest) -> int:
    """What a prompt and its answers cost, in tokens of a prompt."""
    params = request.params
    answer = ANSWER_TOKENS if params.max_tokens is None else min(ANSWER_TOKENS, params.max_tokens)
    return len(request.token_ids) + params.n * DECODE_COST * answer


def choose(cores: Iterable[CoreLoad]) -> int | None:
    """The index of the one with the least work; of equals that with the fewest requests, then the first.

    None if there is none to choose from. Does not depend on a clock.
    """
    best = min(cores, default=None)
    return None if best is None else best.core
