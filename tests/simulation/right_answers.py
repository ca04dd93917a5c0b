"""The right answer to a request, whatever happens in between: by the script and the plainest reading of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.byte_tokenizer import EOS, ByteTokenizer
from millrace.stages.testing.scripted.script import Script


@dataclass(frozen=True)
class Answer:
    """The right result of one choice, if nothing ends it early."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | int | None


def right_answer(script: Script, prompt: Sequence[int], params: SamplingParams, choice: int, room: int) -> Answer:
    """The whole answer, by the script and by the plainest reading of stop strings."""
    if params.max_tokens is None:
        params = replace(params, max_tokens=room)
    tokens = script.expected(prompt, params, choice)
    is_stopped = _is_stop(tokens, params)
    num_shown = len(tokens) if not is_stopped or params.include_stop_str_in_output else len(tokens) - 1
    decoder, text = ByteTokenizer().decoder(params), ""
    for place, token in enumerate(tokens):
        if place < num_shown:
            text += decoder.push(token)
        if place == len(tokens) - 1:
            text += decoder.flush()
        found = _first_stop(text, params.stop)
        if found is not None:
            end, stop = found
            text = text[:end] if params.include_stop_str_in_output else text[: end - len(stop)]
            return Answer(tokens[: place + 1], text, "stop", stop)
    if not is_stopped:
        return Answer(tokens, text, "length", None)
    return Answer(tokens, text, "stop", tokens[-1] if tokens[-1] in params.stop_token_ids else None)


def _is_stop(tokens: list[int], params: SamplingParams) -> bool:
    if len(tokens) - 1 < params.min_tokens:
        return False
    return (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string that is complete first, the longest of those."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None
