"""The fields of a body that ask for a beam search, and what may not be asked for beside them.

Knows names and what goes together. What a search does is `stages/beam_search/algorithm.py`'s to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....stages.beam_search.algorithm import NO_SAMPLING, BeamParams
from ...errors import ApiError

if TYPE_CHECKING:
    from .bodies import GenerationBody


def check_beams(body: GenerationBody) -> None:
    """Raises `ApiError` for fields of a search without one, for a stream of one, and for a `best_of` that is none."""
    n = 1 if body.n is None else body.n
    if body.use_beam_search:
        _check_search(body, n)
        return
    if body.best_of is not None and body.best_of < n:
        raise ApiError("invalid_value", f"best_of = {body.best_of}: must be at least n, which is {n}", param="best_of")
    if body.best_of not in (None, n):
        _check_best_of(body)
    for name, off in (("length_penalty", (None, 1.0)), ("early_stopping", (None, False))):
        if getattr(body, name) not in off:
            raise ApiError("invalid_value", f"{name}: only with use_beam_search = true", param=name)


def _check_best_of(body: GenerationBody) -> None:
    if not body.ranks:
        message = f"best_of = {body.best_of}: on chat only with use_beam_search = true; leave it out, or equal to n"
        raise ApiError("unsupported_parameter", message, param="best_of")
    if body.stream:
        message = "best_of: above n not in a stream, as the best answer is known only at the end; leave one out"
        raise ApiError("unsupported_parameter", message, param="best_of")


def _check_search(body: GenerationBody, n: int) -> None:
    if body.stream:
        message = "stream: a beam search knows its best answer only at its end, so there is nothing to send before"
        raise ApiError("unsupported_parameter", f"{message}; leave it out", param="stream")
    if getattr(body, "echo", None):
        raise ApiError("unsupported_parameter", "echo: not with a beam search; leave it out", param="echo")
    for name, off in NO_SAMPLING.items():
        if off is None and getattr(body, name, None) is not None:  # whatever it asks for, and if it is nothing
            raise ApiError("unsupported_parameter", f"{name}: not with a beam search; leave it out", param=name)
    if body.best_of is not None and body.best_of < n:
        message = f"best_of = {body.best_of}: is the width of the search, so must be at least n, which is {n}"
        raise ApiError("invalid_value", message, param="best_of")


def beam_params(body: GenerationBody) -> BeamParams | None:
    """The search that `body` asks for, if it does. `Refused` names the field by the name that the search has for it."""
    if not body.use_beam_search:
        return None
    width = body.n if body.best_of is None else body.best_of
    return BeamParams(
        width=1 if width is None else width,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=False if body.early_stopping is None else body.early_stopping,
    )
