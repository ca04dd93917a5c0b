"""Stages of a user, as a module that settings name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace.runtime.stage import Context, Outlet, Stage, stage
from millrace.stages.engine.placed_stages import PlacedStage
from millrace.stages.messages import Indices, Request, Started, StepText, StepTokens, TokenRequest
from millrace.stages.replies import reply_text
from millrace.stages.sample.logits_processor import LogitsProcessor


class Clip(Stage[TokenRequest, TokenRequest]):
    """Keeps the last `limit` tokens of a prompt."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit = {limit}: must be at least 1")
        self.limit = limit

    async def handle(self, batch: Sequence[TokenRequest], out: Outlet[TokenRequest]) -> None:
        for request in batch:
            out.send(replace(request, token_ids=request.token_ids[-self.limit :]))


class Mark(Stage[StepText, StepText]):
    """Adds a mark to each text."""

    def __init__(self, mark: str = "!") -> None:
        self.mark = mark

    async def handle(self, batch: Sequence[StepText], out: Outlet[StepText]) -> None:
        for step in batch:
            out.send(replace(step, texts=[text + self.mark for text in step.texts]))


class Pass(Stage[StepTokens, StepTokens]):
    """Passes the tokens of each step on."""

    async def handle(self, batch: Sequence[StepTokens], out: Outlet[StepTokens]) -> None:
        for step in batch:
            out.send(step)


@stage
def shout(step: StepText) -> StepText:
    return replace(step, texts=[text.upper() for text in step.texts])


def pair(mark: str = "!") -> list[PlacedStage]:
    """Two stages that belong together."""
    return [PlacedStage(Clip(4), after="tokenize"), PlacedStage(Mark(mark), before="exit")]


def nothing() -> int:
    return 3


MADE = Mark()


class Tell(Stage[Request, Request]):
    """Answers with the owner and the metadata of a request, and counts requests and their ends by owner."""

    async def setup(self, context: Context) -> None:
        self.context = context
        self.requests = context.metrics.counter("requests", "Requests by owner.", labels=("owner",))
        self.ends = context.metrics.counter("ends", "Ends by cause.", labels=("cause",))
        self.lengths = context.metrics.histogram("prompts", "Prompts of a request.", bounds=(1, 2))

    async def handle(self, batch: Sequence[Request], out: Outlet[Request]) -> None:
        for request in batch:
            assert self.context.find_request(request.request_id) is not None
            assert self.context.find_request(request.first_sequence_id).owner == request.owner
            self.requests.add(owner=request.owner)
            self.lengths.observe(len(request.prompts))
            if request.pooling is not None:
                out.send(request)
            else:
                out.reply(reply_text(request, f"{request.owner} {json.dumps(dict(request.metadata))}"))

    def ended(self, request_id: str, cause: str) -> None:
        assert self.context.find_request(request_id) is None
        self.ends.add(cause=cause)


class Only(LogitsProcessor):
    """Allows the answer only some tokens: the request's `token_ids`, or `default`."""

    always = False

    def __init__(self, default: int = 5) -> None:
        self.default = default
        self.allowed: dict[int, list[int]] = {}  # by slot

    def validate(self, arguments: Mapping[str, Any]) -> None:
        ids = arguments.get("token_ids", [])
        if set(arguments) - {"token_ids"} or not isinstance(ids, list):
            raise ValueError("must have token_ids, a list of numbers, or nothing")

    def start(self, started: Started) -> bool:
        asked = started.params.extra_args[self.name]
        self.allowed[started.slot] = asked.get("token_ids") or [self.default]
        return True

    def process(self, slots: Indices, logits: Any) -> None:
        for row, slot in enumerate(slots.tolist()):
            kept = logits[row, self.allowed[slot]].clone()
            logits[row] = -float("inf")
            logits[row, self.allowed[slot]] = kept


class Shift(LogitsProcessor):
    """Adds one to the logits of a token, for every request."""

    def process(self, slots: Indices, logits: Any) -> None:
        logits[:, 7] += 1


class NotOne:
    pass
