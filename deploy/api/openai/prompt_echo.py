"""Prompt data in an answer: the text (`echo`), its token ids and log-probabilities.

Long JSON arrays are written in slices, so that one call of the JSON writer does not hold the GIL for long.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from .answers import PromptEcho
from .logprob_fields import as_id, finite

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ....stages.messages import PromptLogprobs

SLICE = 512  # entries in one call of the JSON writer

TokenName = Callable[[int], str]


class SpellsTokens(Protocol):
    """The members of a tokenizer that are used here."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def strips_first_space(self) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """The data about each prompt that the answer must contain."""

    echo: bool = False
    echo_logprobs: bool = False  # in front of the answer's own logprobs
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    logprobs: bool = True  # log-probabilities of the answer itself

    @property
    def anything(self) -> bool:
        return self.echo or self.prompt_logprobs or self.token_ids


def echo_prompt(options: EchoOptions, outbox: RequestOutbox, tokenizer: SpellsTokens, index: int) -> PromptEcho:
    """The requested data of prompt `index`.

    Call it after the first token of an answer to that prompt.
    """
    token_ids = outbox.prompt_token_ids(index).tolist()
    scores = outbox.prompt_logprobs(index) if options.prompt_logprobs or options.echo_logprobs else None
    name = as_id if options.tokens_as_ids else _namer(tokenizer)
    text, logprobs = "", None
    if options.echo:
        given = outbox.request.prompts[index].text
        texts = token_texts(tokenizer, token_ids)
        first = next((at for at, part in enumerate(texts) if part), 0)
        is_whole = given is not None and outbox.request.params.truncate_prompt_tokens is None
        has_added_space = is_whole and given is not None and not given.startswith(" ")
        if texts and texts[first].startswith(" ") and (tokenizer.strips_first_space or has_added_space):
            texts[first] = texts[first][1:]  # a space that the tokenizer added
        text = given if given is not None and is_whole else "".join(texts)
        if options.echo_logprobs:
            logprobs = _echo(token_ids, texts, scores, name)
    return PromptEcho(
        text=text,
        logprobs=logprobs,
        token_ids=token_ids if options.token_ids else None,
        prompt_logprobs=_fragment([None], _entries(scores, name)) if options.prompt_logprobs else None,
    )


def token_texts(tokenizer: SpellsTokens, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds.

    A character comes with its last byte; special tokens add nothing.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token_id in token_ids:
        is_special = token_id in tokenizer.special_ids
        texts.append(decoder.decode(b"" if is_special else tokenizer.token_bytes(token_id), is_special))
    if texts:
        texts[-1] += decoder.decode(b"", True)
    return texts


def _namer(tokenizer: SpellsTokens) -> TokenName:
    """A function from token id to the token's text, cached."""
    names: dict[int, str] = {}

    def name(token_id: int) -> str:
        if token_id not in names:
            names[token_id] = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return names[token_id]

    return name


def _entries(scores: PromptLogprobs | None, name: TokenName) -> Iterable[dict[str, Any]]:
    """For each token but the first: token id -> log-probability, rank and text.

    The prompt's own token comes first.
    """
    if scores is None:
        return
    columns = (scores.token_ids, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    for token_id, logprob, rank, top_ids, top in zip(*(column.tolist() for column in columns), strict=True):
        entry = {str(token_id): _entry(logprob, rank, name(token_id))}
        for place, (other, other_logprob) in enumerate(zip(top_ids, top, strict=True), 1):
            entry.setdefault(str(other), _entry(other_logprob, place, name(other)))
        yield entry


def _entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


def _echo(
    token_ids: Sequence[int], texts: Sequence[str], scores: PromptLogprobs | None, name: TokenName
) -> dict[str, list[Any]]:
    """Prompt logprobs in the shape of completions. The first token has no log-probability."""
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [None], "top_logprobs": [None], "text_offset": []}
    num_chars = 0
    for token_id, text in zip(token_ids, texts, strict=True):
        shape["tokens"].append(name(token_id))
        shape["text_offset"].append(num_chars)
        num_chars += len(text)
    if scores is None:
        return shape
    shape["token_logprobs"] += [finite(logprob) for logprob in scores.logprobs.tolist()]
    columns = (scores.token_ids, scores.logprobs, scores.top_ids, scores.top_logprobs)
    for token_id, logprob, top_ids, top in zip(*(column.tolist() for column in columns), strict=True):
        likeliest = {name(other): finite(value) for other, value in zip(top_ids, top, strict=True)}
        shape["top_logprobs"].append(likeliest | {name(token_id): finite(logprob)})
    return shape


def _fragment(head: Sequence[Any], entries: Iterable[Any]) -> orjson.Fragment:
    """The JSON array of `head` and then `entries`."""
    written, rest = [orjson.dumps(entry) for entry in head], iter(entries)
    while piece := list(islice(rest, SLICE)):
        written.append(orjson.dumps(piece)[1:-1])
    return orjson.Fragment(b"[" + b",".join(written) + b"]")
