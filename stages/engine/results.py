"""Reads an outbox as the `RequestOutput`s that callers of the engine get."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from ..exit.outboxes import RequestOutbox
from ..outputs import CompletionOutput, Delta, OutputKind, RequestOutput
from ..params import SamplingParams


async def read_outputs(outbox: RequestOutbox, kind: OutputKind = "delta") -> AsyncIterator[RequestOutput]:
    """Yields the outputs of an outbox: deltas, cumulative ones, or one final output."""
    request = outbox.request
    choices = [_empty(index, request.params) for index in range(request.num_sequences)]
    given, prompt_ids = request.prompts[0].token_ids, None
    async for deltas in outbox:
        for delta in deltas:
            _add(choices[delta.index], delta)
        if given is not None and prompt_ids is None and kind != "final":
            prompt_ids = given.tolist()  # of all outputs but the last
        if kind == "delta":
            yield _output(outbox, [_part(delta, request.params) for delta in deltas], choices, prompt_ids)
        elif kind == "cumulative":
            yield _output(outbox, [_copy(choice) for choice in choices], choices, prompt_ids)
    if kind == "final":
        yield _output(outbox, choices, choices, None)


def _empty(index: int, params: SamplingParams) -> CompletionOutput:
    return CompletionOutput(index, logprobs=None if params.logprobs is None else [])


def _add(choice: CompletionOutput, delta: Delta) -> None:
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    if choice.logprobs is not None:
        choice.logprobs += delta.logprobs
    choice.finish_reason, choice.stop_reason, choice.score = delta.finish_reason, delta.stop_reason, delta.score


def _part(delta: Delta, params: SamplingParams) -> CompletionOutput:
    part = _empty(delta.index, params)
    _add(part, delta)
    return part


def _copy(choice: CompletionOutput) -> CompletionOutput:
    logprobs = None if choice.logprobs is None else list(choice.logprobs)
    return replace(choice, token_ids=list(choice.token_ids), logprobs=logprobs)


def _output(
    outbox: RequestOutbox,
    outputs: list[CompletionOutput],
    choices: Sequence[CompletionOutput],
    prompt_ids: list[int] | None,
) -> RequestOutput:
    is_finished = all(choice.finish_reason is not None for choice in choices)
    return RequestOutput(
        request_id=outbox.request_id,
        prompt=outbox.request.prompts[0].text,
        prompt_token_ids=outbox.prompt_token_ids(0).tolist() if is_finished else prompt_ids,
        outputs=outputs,
        finished=is_finished,
        num_prompt_tokens=outbox.num_prompt_tokens,
        num_generated_tokens=outbox.num_generated_tokens,
        num_cached_tokens=outbox.num_cached_tokens,
        prompt_logprobs=outbox.prompt_logprobs(0) if is_finished else None,
        metrics=outbox.metrics() if is_finished else None,
    )
