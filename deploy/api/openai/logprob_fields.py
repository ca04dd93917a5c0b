"""The JSON of log-probabilities, in the shapes of chat and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ....stages.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
    """Logprobs in the shape of chat: one entry per token."""
    return {"content": token_logprobs(tokens)}


def token_logprobs(tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """One entry per token, with its bytes, as a token may be half a character."""
    return [
        {
            **_token(token.token, token.token_bytes, token.logprob),
            "top_logprobs": [_token(text, raw, logprob) for _, text, raw, logprob in token.top],
        }
        for token in tokens
    ]


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], num_before: int = 0, *, as_ids: bool = False
) -> dict[str, list[Any]]:
    """Logprobs in the shape of completions: parallel lists. `num_before`: characters before the first token."""
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, spelled in zip(tokens, spelled_as(tokens, as_ids), strict=True):
        chosen = {spelled.token: finite(token.logprob)}
        shape["tokens"].append(spelled.token)
        shape["token_logprobs"].append(finite(token.logprob))
        shape["top_logprobs"].append({text: finite(logprob) for _, text, _, logprob in spelled.top} | chosen)
        shape["text_offset"].append(num_before)
        num_before += len(token.token)
    return shape


def token_details(token: TokenLogprobs, since_s: float) -> dict[str, Any]:
    """The details of one token; its time is in milliseconds from the arrival of the request."""
    return {
        "token_id": token.token_id,
        "token": token.token,
        "rank": token.rank,
        "time_ms": max(0.0, round(token.time_us / 1e3 - 1e3 * since_s, 3)),
        "is_drafted": token.is_drafted,
        "top": [
            {"token_id": token_id, "token": text, "logprob": finite(logprob)}
            for token_id, text, _, logprob in token.top
        ],
    }


def as_id(token_id: int) -> str:
    """The form of a token under `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def spelled_as(tokens: Sequence[TokenLogprobs], as_ids: bool) -> Sequence[TokenLogprobs]:
    """The tokens, spelled as their ids where asked for."""
    if not as_ids:
        return tokens
    return [
        replace(
            token,
            token=as_id(token.token_id),
            top=tuple((token_id, as_id(token_id), raw, logprob) for token_id, _, raw, logprob in token.top),
        )
        for token in tokens
    ]


def _token(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def finite(logprob: float) -> float:
    """A log-probability that JSON can represent: minus infinity becomes `LEAST_LOGPROB`."""
    return max(logprob, LEAST_LOGPROB)
