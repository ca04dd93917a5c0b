"""The chunks of a streamed answer, as they come: what every transport sends and frames in its own way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .answers import Answer, usage

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ....stages.outputs import Delta


Tell = Callable[[Iterable[int]], Awaitable[None]]


class Chunks:
    """An async iterator over the bodies of a request's chunks: JSON, at least one at a time, all that is there.

    It reads the outbox when it is asked for more and at no other time, so a client that asks for nothing is not read
    for, and its request is parked. It raises what ended the request, as the outbox does.
    """

    def __init__(
        self,
        answer: Answer,
        outbox: RequestOutbox,
        num_choices: int,
        tell: Tell | None = None,
        metrics: Callable[[], Mapping[str, Any] | None] = lambda: None,
        *,
        waits_for_tokens: bool = False,
    ) -> None:
        """`tell` hears of choices before their first chunk; with `waits_for_tokens`, when they have a token, as their
        prompts are scored by then. `metrics` is asked at the end."""
        self.outbox = outbox
        self.choices = answer.choices(num_choices)
        self._answer = answer
        self._tell = tell
        self._metrics = metrics
        self._waits_for_tokens = waits_for_tokens
        self._is_opened = False
        self._num_unfinished = num_choices

    @property
    def needs_waiting(self) -> bool:
        """Whether chunks are waited for even when their text is there, so that they can not be polled."""
        return self._tell is not None

    def is_over(self) -> bool:
        """Whether all has been given: known with the last chunk."""
        return not self._num_unfinished

    def usage(self) -> dict[str, Any]:
        """Tokens so far, as clients are told."""
        return usage(self.outbox.num_prompt_tokens, self.outbox.num_cached_tokens, self.choices)

    def __aiter__(self) -> Chunks:
        return self

    async def __anext__(self) -> list[bytes]:
        if self.is_over():
            raise StopAsyncIteration
        bodies: list[bytes] = []
        while not bodies:
            deltas = await anext(self.outbox)
            if self._tell is not None:
                await self._tell(delta.index for delta in deltas if delta.token_ids or not self._waits_for_tokens)
            bodies = self._encode(deltas)
        return bodies

    def poll(self) -> list[bytes]:
        """The same of what is there, without waiting for more; often nothing."""
        assert not self.needs_waiting
        deltas = self.outbox.poll()
        return self._encode(deltas) if deltas else []

    def _encode(self, deltas: Sequence[Delta]) -> list[bytes]:
        """With what stands before the first and behind the last."""
        answer = self._answer
        bodies: list[bytes] = []
        for delta in deltas:
            choice = self.choices[delta.index]
            if delta.progress is not None:
                bodies.append(answer.progress_chunk(delta.progress))
            choice.add(delta, keep=False)
            if delta.finish_reason is not None:
                self._num_unfinished -= 1
            running = self.usage() if answer.has_running_usage else None
            bodies += answer.chunks(choice, delta, running)
        if bodies and not self._is_opened:
            bodies, self._is_opened = answer.opening(len(self.choices)) + bodies, True
        if not self._num_unfinished:
            closing = answer.closing(self.usage() if answer.has_usage else None, self._metrics())
            bodies += [] if closing is None else [closing]
        return bodies
