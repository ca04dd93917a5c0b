"""Stages of a user, as a module that settings name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace.runtime.stage import Outlet, Stage, stage
from millrace.stages.engine.placed_stages import PlacedStage
from millrace.stages.messages import StepText, StepTokens, TokenRequest


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
