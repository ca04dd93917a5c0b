"""Stages of a user, as a module that settings name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from millrace.runtime.stage import Context, Outlet, Stage, stage
from millrace.stages.engine.placed_stages import PlacedStage
from millrace.stages.messages import Request, StepText, StepTokens, TokenRequest
from millrace.stages.replies import reply_text


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
