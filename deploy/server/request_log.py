"""Logs the start and the end of each request; without client text unless it is enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...runtime.env.log import get_logger

if TYPE_CHECKING:
    from ...stages.exit.outboxes import Outboxes, RequestOutbox
    from ...stages.messages import Prompt

log = get_logger("millrace.deploy")


class RequestLog:
    """The request log of one engine.

    Includes the first `num_chars` characters of prompts; 0 leaves prompts out.
    """

    def __init__(self, num_chars: int = 0) -> None:
        self._num_chars = num_chars

    def watch(self, exit: Outboxes) -> None:
        """Starts to log the requests of `exit`."""
        exit.on_open.append(self._began)
        exit.on_end.append(self._ended)

    def _began(self, outbox: RequestOutbox) -> None:
        request = outbox.request
        if request.parent_id is not None:
            return  # one step of a beam search, which is logged once, as its parent request
        params = request.params
        logged_fields: dict[str, Any] = (
            {} if request.pooling is not None else {"n": params.n, "max_tokens": params.max_tokens}
        )
        if request.adapter is not None:
            logged_fields["adapter"] = request.adapter.name
        if self._num_chars:
            logged_fields["prompts"] = [excerpt(prompt, self._num_chars) for prompt in request.prompts[:4]]
        log.info(
            "request.began",
            request_id=outbox.request_id,
            num_prompts=len(request.prompts),
            priority=request.priority,
            **logged_fields,
        )

    def _ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if outbox.request.parent_id is not None:
            return
        reasons = sorted({choice.finish.reason.name.lower() for choice in outbox.choices if choice.finish is not None})
        log.info(
            "request.ended",
            request_id=outbox.request_id,
            cause=cause,
            error=None if outbox.error is None else outbox.error.code,
            finish_reasons=reasons,
            num_prompt_tokens=outbox.num_prompt_tokens,
            num_cached_tokens=outbox.num_cached_tokens,
            num_generated_tokens=outbox.num_generated_tokens,
            **outbox.metrics(),
        )


def excerpt(prompt: Prompt, num_chars: int) -> str:
    """The first `num_chars` characters of a prompt, in the form in which the client sent it."""
    if prompt.text is not None:
        return prompt.text[:num_chars]
    if prompt.token_ids is not None:
        return str(prompt.token_ids[:num_chars].tolist())[:num_chars]
    if prompt.chat is not None:
        return str([dict(message) for message in prompt.chat.messages])[:num_chars]
    return str(prompt.pair)[:num_chars]
