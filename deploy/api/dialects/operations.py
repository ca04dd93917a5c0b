"""Operations of TGI's and SGLang's dialects; they share `/generate` with token ids."""

from __future__ import annotations

from ..schema.operation import ENGINE_ERRORS, GENERATION_ERRORS, Content, Operation, json
from ..token_ids.operations import GENERATE
from . import shapes
from .tgi import TgiBody

OPERATIONS = (
    GENERATE,
    Operation(
        method="POST",
        path="/generate_stream",
        name="generateStream",
        group="tokens",
        summary="Completion of a text as TGI's stream, an event for each token",
        body=TgiBody,
        answers={200: (Content(content_type="text/event-stream", event=shapes.TgiEvent),)},
        error=shapes.TgiError,
        errors=GENERATION_ERRORS,
    ),
    Operation(
        method="GET",
        path="/info",
        name="tgiInfo",
        group="models",
        summary="The model and its limits, as TGI tells them",
        answers=json(shapes.TgiInfo),
        errors=ENGINE_ERRORS,
    ),
)
