"""The chunks of a streamed answer, as they come: what every transport sends and frames in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .answers import Answer, Choice, usage

if TYPE_CHECKING:
    from ..stages.outbox import RequestOutbox
    from ..stages.outputs import Delta


class Chunks:
    """An async iterator over the bodies of a request's chunks: JSON, at least one at a time, all that is there.

    It reads the outbox when it is asked for more and at no other time, so a client that asks for nothing is not read
    for, and its request is parked. It raises what ended the request, as the outbox does.
    """

    def __init__(self, answer: Answer, outbox: RequestOutbox, num_choices: int) -> None:
        self.outbox = outbox
        self.choices = [Choice(index) for index in range(num_choices)]
        self._answer = answer
        self._opening = answer.opening(num_choices)

    def is_over(self) -> bool:
        """Whether all has been given: known with the last chunk."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Tokens so far, as clients are told."""
        return usage(self.outbox.num_prompt_tokens, self.outbox.num_cached_tokens, self.choices)

    def __aiter__(self) -> Chunks:
        return self

    async def __anext__(self) -> list[bytes]:
        if self.is_over():
            raise StopAsyncIteration
        bodies: list[bytes] = []
        while not bodies and not self.is_over():
            bodies = self._encode(await anext(self.outbox))
        if self._opening:
            bodies, self._opening = self._opening + bodies, []
        if self._answer.has_usage and self.is_over():
            bodies.append(self._answer.usage_chunk(self.usage()))
        return bodies

    def _encode(self, deltas: Sequence[Delta]) -> list[bytes]:
        bodies = []
        for delta in deltas:
            choice = self.choices[delta.index]
            choice.add(delta, keep=False)
            running = self.usage() if self._answer.has_running_usage else None
            if body := self._answer.chunk(choice, delta, running):
                bodies.append(body)
        return bodies
