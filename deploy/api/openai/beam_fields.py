"""The fields of a beam search, and `best_of`: their checks and meaning. See `stages/beam_search/algorithm.py`."""

from __future__ import annotations

from typing import Any, Protocol

from ....stages.beam_search.algorithm import NO_SAMPLING, BeamParams
from ...errors import wrong_field


class BeamFields(Protocol):
    """The fields of a body that are read here."""

    n: int | None
    best_of: int | None
    use_beam_search: bool | None
    length_penalty: float | None
    early_stopping: Any  # checked as it is read: true, false or "never"
    stream: bool | None

    @property
    def ranks(self) -> bool:
        """Whether more answers are generated than returned."""


def check_beams(body: BeamFields) -> None:
    """Checks the beam-search fields and `best_of`; raises `ApiError`."""
    n = 1 if body.n is None else body.n
    if body.use_beam_search:
        _check_search(body, n)
        return
    if body.best_of is not None and body.best_of < n:
        raise wrong_field("best_of", f"must be at least n, which is {n}", str(body.best_of))
    if body.best_of not in (None, n):
        _check_best_of(body)
    for name, off in (("length_penalty", (None, 1.0)), ("early_stopping", (None, False))):
        if getattr(body, name) not in off:
            raise wrong_field(name, "requires use_beam_search = true")


def beam_params(body: BeamFields) -> BeamParams | None:
    """The beam search of `body`, or None. `Refused` names the field as `BeamParams` does."""
    if not body.use_beam_search:
        return None
    width = body.n if body.best_of is None else body.best_of
    return BeamParams(
        width=1 if width is None else width,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=False if body.early_stopping is None else body.early_stopping,
    )


def _check_best_of(body: BeamFields) -> None:
    if not body.ranks:
        problem = "requires use_beam_search = true on chat; leave it out or set it to n"
        raise wrong_field("best_of", problem, str(body.best_of), code="unsupported_parameter")
    if body.stream:
        problem = "above n is not supported in a stream, as the best answer is known only at the end; leave one out"
        raise wrong_field("best_of", problem, code="unsupported_parameter")


def _check_search(body: BeamFields, n: int) -> None:
    if body.stream:
        problem = "not supported with use_beam_search, as the best answer is known only at the end; leave it out"
        raise wrong_field("stream", problem, code="unsupported_parameter")
    if getattr(body, "echo", None):
        raise wrong_field("echo", "not supported with use_beam_search; leave it out", code="unsupported_parameter")
    for name, off in NO_SAMPLING.items():
        if off is None and getattr(body, name, None) is not None:  # refused for any value, also one without effect
            raise wrong_field(name, "not supported with use_beam_search; leave it out", code="unsupported_parameter")
    if body.best_of is not None and body.best_of < n:
        problem = f"must be at least n, which is {n}, as it is the width of the beam search"
        raise wrong_field("best_of", problem, str(body.best_of))
