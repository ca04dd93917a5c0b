"""The fields of a beam search, and `best_of`: their relations and meaning. See `stages/beam_search/algorithm.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ....stages.beam_search.algorithm import MAX_WIDTH, NO_SAMPLING, BeamParams
from ...errors import wrong_field
from ..schema.hints import Schema, off_with
from ..schema.relations import Relation, switched


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


def search_schema(off: Mapping[str, Any]) -> Schema:
    """The schema of the rules of a beam search: the fields in `off` and all of sampling at the value that is off."""
    in_bodies = {name: value for name, value in NO_SAMPLING.items() if name != "bad_words_token_ids"}
    schema = off_with("use_beam_search", {"const": True}, {**off, **in_bodies})
    schema["then"]["properties"] |= dict.fromkeys(("n", "best_of"), {"maximum": MAX_WIDTH})
    return schema


def _check_best_of(body: BeamFields) -> None:
    n = 1 if body.n is None else body.n
    if body.use_beam_search or body.best_of in (None, n):
        return
    if body.best_of < n:
        raise wrong_field("best_of", f"must be at least n, which is {n}", str(body.best_of))
    if not body.ranks:
        problem = "requires use_beam_search = true on chat; leave it out or set it to n"
        raise wrong_field("best_of", problem, str(body.best_of), code="unsupported_parameter")
    if body.stream:
        problem = "above n is not supported in a stream, as the best answer is known only at the end; leave one out"
        raise wrong_field("best_of", problem, code="unsupported_parameter")


def _check_search(body: BeamFields) -> None:
    if not body.use_beam_search:
        return
    n = 1 if body.n is None else body.n
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


WITH_SEARCH = Relation(search_schema({"stream": False}), _check_search)  # `refuse_sampling` checks values of sampling
BEST_OF = Relation(None, _check_best_of)
WITHOUT_SEARCH = switched("use_beam_search", {"length_penalty": (None, 1.0), "early_stopping": (None, False)})
