"""Which front answers a request, where fronts have different models: by the name in the body, or in the address."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from ..config import ServerConfig
from ..errors import ApiError, did_you_mean, shorten, wrong_field
from ..http.body_reader import FORMS, read_ahead
from ..http.json_limits import INLINE_BYTES, JsonLimits, parse_object
from .words import FrontState

MAX_NAMES = 8  # of models, that an error lists
# beginnings of paths; what is asked of a response goes where that is
NOT_OF_MODELS = ("/admin/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/responses/")
OLLAMA = "/api/"  # beginning of paths whose bodies may have an older field for the name
TAG = ":latest"  # that Ollama's clients add


class ModelFronts:
    """The fronts of each model. `states` are those of all fronts."""

    def __init__(self, states: Sequence[FrontState]) -> None:
        self._states = states
        self.names = list(dict.fromkeys(name for state in states for name in state.models))

    @property
    def has_several(self) -> bool:
        """Whether fronts have different models."""
        return len(self.names) > 1

    def group_of(self, name: str | None) -> list[int]:
        """The numbers of the fronts with a model; None: the first one. `ApiError` 404 names those that there are."""
        wanted = self.names[0] if name is None else name
        names = {wanted, wanted.removesuffix(TAG)}
        found = [state.number for state in self._states if not names.isdisjoint(state.models)]
        if not found:
            served = ", ".join(self.names[:MAX_NAMES]) + (" and others" if len(self.names) > MAX_NAMES else "")
            problem = f"not served here{did_you_mean(wanted, self.names)}; the models are {served}"
            raise wrong_field("model", problem, shorten(repr(wanted), 128), code="model_not_found")
        return found

    def name_of(self, front: int) -> str:
        """The model of a front, of several."""
        return next(state.models[0] for state in self._states if state.number == front)

    def ready(self, group: Sequence[int], name: str | None) -> list[int]:
        """Those of a group that take requests. `ApiError` 503 if none does."""
        found = [state.number for state in self._states if state.number in group and state.state == "ready"]
        if not found:
            message = f"model {shorten(name or self.names[0], 128)} takes no requests now; try again shortly"
            raise ApiError("loading", message, retry_after_s=1.0)
        return found


def is_for_a_model(request: web.Request, path: str) -> bool:
    """Whether the body of a request may name a model."""
    return request.method == "POST" and request.can_read_body and not path.startswith(NOT_OF_MODELS)


async def model_in(request: web.Request, path: str, config: ServerConfig) -> str | None:
    """The model that the body of a request to `path` names; None: none, or its handler will refuse the body.

    `ApiError` for a body that is too long or too slow. The handler gets the bytes that were read.
    """
    if request.content_type != "application/json" and request.content_type not in FORMS:
        return None
    data = await read_ahead(request, config)
    read = partial(parse_object, data, JsonLimits(num_bytes=config.max_body_bytes))
    try:
        if len(data) <= INLINE_BYTES:
            body = read()
        else:
            body = await asyncio.get_running_loop().run_in_executor(None, read)
    except ApiError:
        return None
    named: Any = body.get("model")
    if not named and path.startswith(OLLAMA):
        named = body.get("name") or None
    return named if isinstance(named, str) else None
