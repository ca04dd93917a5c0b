"""What an answer tells of its prompt, where its client asked: the text itself (`echo`), its token ids, and how likely
each of its tokens was.

Knows the shapes. Long ones are made of JSON that is written a slice at a time, so that one call never holds the
interpreter for long. Refuses to know sockets.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from .answers import PromptPart, as_id, finite

if TYPE_CHECKING:
    from ....stages.exit.outboxes import RequestOutbox
    from ....stages.messages import PromptLogprobs

SLICE = 512  # entries in one call of the JSON writer

TokenName = Callable[[int], str]


class Tokenizer(Protocol):
    """What is needed of one."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What to tell of each prompt, and of the answer."""

    echo: bool = False
    echo_logprobs: bool = False  # in the arrays of the answer's own
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    logprobs: bool = True  # of the answer

    @property
    def anything(self) -> bool:
        return self.echo or self.prompt_logprobs or self.token_ids


def tell_prompt(asked: Asked, outbox: RequestOutbox, tokenizer: Tokenizer, index: int) -> PromptPart:
    """Of one prompt, once a first token of answer to it is there."""
    token_ids = outbox.prompt_token_ids(index).tolist()
    scores = outbox.prompt_logprobs(index) if asked.prompt_logprobs or asked.echo_logprobs else None
    name = as_id if asked.tokens_as_ids else _namer(tokenizer)
    text, logprobs = "", None
    if asked.echo:
        given = outbox.request.prompts[index].text
        texts = token_texts(tokenizer, token_ids)
        first = next((at for at, part in enumerate(texts) if part), 0)
        if texts and texts[first].startswith(" ") and given is not None and not given.startswith(" "):
            texts[first] = texts[first][1:]  # the tokenizer's own
        is_whole = given is not None and outbox.request.params.truncate_prompt_tokens is None
        text = given if given is not None and is_whole else "".join(texts)
        if asked.echo_logprobs:
            logprobs = _echo(token_ids, texts, scores, name)
    return PromptPart(
        text=text,
        logprobs=logprobs,
        token_ids=token_ids if asked.token_ids else None,
        prompt_logprobs=_fragment([None], _entries(scores, name)) if asked.prompt_logprobs else None,
    )


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text: the whole of a character comes with its last byte; special tokens add
    nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token_id in token_ids:
        is_special = token_id in tokenizer.special_ids
        texts.append(decoder.decode(b"" if is_special else tokenizer.token_bytes(token_id), is_special))
    if texts:
        texts[-1] += decoder.decode(b"", True)
    return texts


def _namer(tokenizer: Tokenizer) -> TokenName:
    """The tokens' own texts, each made once."""
    names: dict[int, str] = {}

    def name(token_id: int) -> str:
        if token_id not in names:
            names[token_id] = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return names[token_id]

    return name


def _entries(scores: PromptLogprobs | None, name: TokenName) -> Iterable[dict[str, Any]]:
    """For each token but the first: token id -> its log-probability, rank and text; the token's own first."""
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
    """Completions' shape. Nothing comes before the first token, so nothing is said of how likely it was."""
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
    """The JSON array of both."""
    written, rest = [orjson.dumps(entry) for entry in head], iter(entries)
    while piece := list(islice(rest, SLICE)):
        written.append(orjson.dumps(piece)[1:-1])
    return orjson.Fragment(b"[" + b",".join(written) + b"]")
