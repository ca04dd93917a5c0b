"""The chunks of a streamed answer, for any transport to frame and send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .answers import AnswerBuilder
from .choice_state import usage

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ....stages.outputs import ChoiceDelta


PromptEchoer = Callable[[Iterable[int]], Awaitable[None]]


class ChunkIterator:
    """The chunks of a request's stream as JSON, as an async iterator.

    Each item is the list of all chunks that have arrived, at least one. The iterator reads the outbox only when the
    next item is requested. If the client does not read, the outbox fills and the request is parked. The iterator raises
    the error that ended the request, as the outbox does.
    """

    def __init__(
        self,
        answer: AnswerBuilder,
        outbox: RequestOutbox,
        num_choices: int,
        add_prompt_echoes: PromptEchoer | None = None,
        metrics: Callable[[], Mapping[str, Any] | None] = lambda: None,
        *,
        waits_for_tokens: bool = False,
    ) -> None:
        """`add_prompt_echoes` is awaited with the indices of choices before their chunks.

        `metrics` is called at the end. With `waits_for_tokens`, `add_prompt_echoes` gets only choices that have
        a token, as their prompts are scored by then.
        """
        self.outbox = outbox
        self.choices = answer.choices(num_choices)
        self._answer = answer
        self._add_prompt_echoes = add_prompt_echoes
        self._metrics = metrics
        self._waits_for_tokens = waits_for_tokens
        self._is_opened = False
        self._num_unfinished = num_choices

    @property
    def needs_waiting(self) -> bool:
        """Whether chunks must be awaited even if their text has arrived, so `poll` is not allowed."""
        return self._add_prompt_echoes is not None

    def is_over(self) -> bool:
        """Whether the last chunk has been returned."""
        return not self._num_unfinished

    def usage(self) -> dict[str, Any]:
        """The `usage` object for the tokens so far."""
        return usage(self.outbox.num_prompt_tokens, self.outbox.num_cached_tokens, self.choices)

    def __aiter__(self) -> ChunkIterator:
        return self

    async def __anext__(self) -> list[bytes]:
        if self.is_over():
            raise StopAsyncIteration
        bodies: list[bytes] = []
        while not bodies:
            deltas = await anext(self.outbox)
            if self._add_prompt_echoes is not None:
                await self._add_prompt_echoes(
                    delta.index for delta in deltas if delta.token_ids or not self._waits_for_tokens
                )
            bodies = self._encode(deltas)
        return bodies

    def poll(self) -> list[bytes]:
        """The chunks that have arrived, without waiting; often none."""
        assert not self.needs_waiting
        deltas = self.outbox.poll()
        return self._encode(deltas) if deltas else []

    def _encode(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        """The chunks of `deltas`, with the opening chunks first and the closing one last."""
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
