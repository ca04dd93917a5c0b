"""A validated body, ready to submit, and what its client is told: errors in its own names, and ignored fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from ....runtime.env.log import get_logger
from ....stages.beam_search.algorithm import BeamParams
from ....stages.messages import AdapterRef, Prompt
from ....stages.params import SamplingParams
from ...errors import ApiError, describe, unforeseen
from ...metrics.ignored_fields import shown_name
from ..assistant_turn import AssistantTurn
from .generation_body import MAX_TIMEOUT_S, GenerationBody
from .prompt_echo import EchoOptions

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

log = get_logger("millrace.deploy")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated body, ready to submit.

    Checks that depend on the prompt's tokens follow at intake.
    """

    body: GenerationBody
    ignored: Sequence[str]  # names of unknown fields
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    beams: BeamParams | None  # None: no beam search
    echo_options: EchoOptions  # what the answer returns about the prompts
    make_turn: Callable[[], AssistantTurn] | None = None  # one per choice; None if choices are plain text
    adapter: AdapterRef | None = None  # None: the served model
    name_of: Callable[[str], str] | None = None  # the client's names of fields, if they are not those of the body

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


def client_error(order: PreparedRequest, error: Exception) -> Exception:
    """An error of the engine as the client's API has it, e.g. with `prompt` as `messages` on chat."""
    known = None if isinstance(error, ApiError) else describe(error)
    if known is None:
        return error
    known = known.named(order.body.client_name)
    return known if order.name_of is None else known.named(order.name_of)


def stream_error(order: PreparedRequest | None, error: Exception, answer_id: str) -> ApiError:
    """The error that a stream ends with, as the client's API has it. An unexpected `error` is logged.

    `order` is None if the error came before there was one.
    """
    known = describe(error if order is None else client_error(order, error))
    if known is None:
        log.error("request.failed", error=type(error).__name__, exc_info=error)
    return known or unforeseen(answer_id)


def ignored_headers(ignored: Sequence[str]) -> dict[str, str]:
    """The response header that lists unknown fields, if there are any."""
    return {"X-Ignored-Fields": listed_names(ignored)} if ignored else {}


def listed_names(names: Sequence[str]) -> str:
    """The first 32 names, each cut to 64 characters; characters unsafe in a header become `?`."""
    return ", ".join(map(shown_name, names[:32]))


def time_limit_s(request: web.Request, body: GenerationBody) -> float | None:
    """The time limit from the body, else from the `X-Request-Timeout` header, in seconds."""
    given = request.headers.get("X-Request-Timeout")
    if body.timeout_s is not None or given is None:
        return body.timeout_s
    limit_s = float(given) if _SECONDS.fullmatch(given) else 0.0
    if not 0 < limit_s <= MAX_TIMEOUT_S:
        message = f"X-Request-Timeout: must be a number of seconds above 0 and at most {MAX_TIMEOUT_S:g}"
        raise ApiError("invalid_value", message, param="timeout_s")
    return limit_s
