"""Warm-up: the first requests of an engine, before it is ready.

They trigger all lazy initialization, and show what does not work. With CUDA graphs there are requests for each size of
graph, and for each way of choosing tokens that no graph covers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from ...runtime.env.log import get_logger
from ...runtime.pipeline import Pipeline
from ..errors import Overloaded, TimedOut
from ..messages import Prompt, Request
from ..outputs import GraphBatch, ModelInfo
from ..params import MAX_N, SamplingParams
from ..pooling_params import PoolingParams
from ..request_limits import MAX_PROMPTS, as_token_ids
from .pooled_requests import ScoringPairs, pooled_request

log = get_logger("millrace.stages")

WARM_UP_PROMPT_TOKENS = 16
WARM_UP_TOKENS = 4
SHARED_TOKENS = 6  # of answers that must share steps: the first starts some steps before the last


async def warm_up(pipeline: Pipeline, info: ModelInfo) -> None:
    """Runs the warm-up requests, and waits for them. May leave blocks in the prefix cache."""
    if "generate" in info.tasks:
        await pipeline.call(_request("warm-up", info))
        if info.captured is not None:
            await _warm_up_steps(pipeline, info, info.captured.batches)
    elif "embed" in info.tasks:
        await pipeline.call(pooled_request("warm-up", (_prompt(info),), PoolingParams()))
    else:
        await pipeline.call(ScoringPairs(["warm"], ["up"]).request("warm-up", info.tasks))


async def _warm_up_steps(pipeline: Pipeline, info: ModelInfo, batches: tuple[GraphBatch, ...]) -> None:
    """Runs requests for each size of step, and for each way of choosing tokens."""
    for batch in batches:
        requests = _decoding(info, batch) if batch.is_decode else _mixed(info, batch)
        await asyncio.gather(*(_call(pipeline, request) for request in requests))
    for name, params in _ways(info):
        await _call(pipeline, _request(f"warm-up-{name}", info, params))


async def _call(pipeline: Pipeline, request: Request) -> None:
    try:
        await pipeline.call(request)
    except (Overloaded, TimedOut) as error:  # the settings allow fewer requests at once, or shorter waits
        log.info("warm_up.left_out", request_id=request.request_id, reason=str(error))


def _decoding(info: ModelInfo, batch: GraphBatch) -> Iterator[Request]:
    """Requests for as many answers to one prompt as the steps of this size have rows."""
    for first in range(0, batch.num_rows, MAX_N):
        count = min(MAX_N, batch.num_rows - first)
        params = _greedy(SHARED_TOKENS, info, n=count)
        yield _request(f"warm-up-{batch.num_rows}-rows-{first}", info, params)


def _mixed(info: ModelInfo, batch: GraphBatch) -> Iterator[Request]:
    """A request whose prompts fill a step of this size; no two prompts share a prefix."""
    longest = max(1, info.max_model_len - WARM_UP_TOKENS)
    num_left, prompts = batch.num_tokens, list[Prompt]()
    while num_left and len(prompts) < min(batch.num_rows, MAX_PROMPTS):
        prompts.append(_prompt(info, min(longest, num_left), batch.num_tokens + len(prompts)))
        num_left -= min(longest, num_left)
    yield Request(f"warm-up-{batch.num_tokens}-tokens", tuple(prompts), _greedy(2, info))


def _ways(info: ModelInfo) -> Iterator[tuple[str, SamplingParams]]:
    """The ways of choosing tokens, by name.

    The last one makes the step attended: the host chooses.
    """
    yield "truncated", SamplingParams(max_tokens=_num_tokens(info), top_p=0.9, seed=0, ignore_eos=True)
    yield "edited", _greedy(WARM_UP_TOKENS, info, repetition_penalty=1.1)
    yield "scored", _greedy(WARM_UP_TOKENS, info, logprobs=1)
    yield "guided", _greedy(WARM_UP_TOKENS, info, allowed_token_ids=(0, 1))
    yield "attended", _greedy(WARM_UP_TOKENS, info, prompt_logprobs=1)


def _greedy(num_tokens: int, info: ModelInfo, **more: object) -> SamplingParams:
    count = _num_tokens(info, num_tokens)
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]


def _num_tokens(info: ModelInfo, num_wanted: int = WARM_UP_TOKENS) -> int:
    return min(num_wanted, info.max_model_len - _prompt_tokens(info))


def _prompt_tokens(info: ModelInfo) -> int:
    return min(WARM_UP_PROMPT_TOKENS, info.max_model_len - 1, info.vocab_size)


def _prompt(info: ModelInfo, num_tokens: int | None = None, first: int = 0) -> Prompt:
    count = _prompt_tokens(info) if num_tokens is None else num_tokens
    return Prompt(token_ids=as_token_ids([(first + i) % info.vocab_size for i in range(count)]))


def _request(name: str, info: ModelInfo, params: SamplingParams | None = None) -> Request:
    return Request(name, (_prompt(info),), params or _greedy(WARM_UP_TOKENS, info))
