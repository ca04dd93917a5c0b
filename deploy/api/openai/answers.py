"""The JSON of chat and completion answers, whole and in chunks, with logprobs and usage.

The framing of chunks is left to the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from ..assistant_turn import AssistantTurn, Piece, ToolCallArguments, ToolCallBegun
from ..parsers.interface import Reasoning, Text
from .logprob_fields import chat_logprobs, completion_logprobs, spelled_as, token_details

if TYPE_CHECKING:
    from ....stages.messages import TokenLogprobs
    from ....stages.outputs import ChoiceDelta, PrefillProgress

MARK = "\x00text\x00"  # placeholder for the text in a chunk
_MARK = orjson.dumps(MARK)


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The data about one prompt that the client requested."""

    text: str = ""  # echoed before the answer's text
    logprobs: dict[str, list[Any]] | None = None  # of the echoed text, in the shape of completions
    token_ids: list[int] | None = None
    prompt_logprobs: Any = None  # null, then for each token: id -> log-probability, rank and text


@dataclass(slots=True)
class ChoiceState:
    """One answer as it grows. `num_chars` counts the text of its tokens, for `text_offset`."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # not in `written` yet
    written: dict[str, bytearray] = field(default_factory=dict)  # the lists of logprobs as JSON without brackets
    num_scored: int = 0  # tokens in `written`, and the sum of their log-probabilities
    sum_logprobs: float = 0.0
    num_tokens: int = 0
    num_chars: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    turn: AssistantTurn | None = None  # parser of the text; None if it is plain text
    pieces: list[Piece] = field(default_factory=list)  # of the turn: all, or those of the last delta if not kept
    is_opened: bool = False  # its first chunk, which may hold prompt data, has been sent

    def add(self, delta: ChoiceDelta, keep: bool) -> None:
        """Adds a delta. With `keep`, its text, token ids and logprobs are stored too."""
        self.num_tokens += len(delta.token_ids)
        if self.turn is not None:
            pieces = self.turn.read(delta.text, delta.token_ids, delta.finish_reason is not None)
            if not keep:
                self.pieces.clear()
            self.pieces += pieces
        if keep:
            self.texts.append(delta.text)
            self.token_ids.extend(delta.token_ids)
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            if self.turn is not None:
                self.finish_reason = self.turn.finish_reason(delta.finish_reason)

    def completion_logprobs(self, tokens: Sequence[TokenLogprobs], *, as_ids: bool) -> dict[str, list[Any]]:
        """Its next tokens in the shape of completions; offsets continue from the last call's."""
        lists = completion_logprobs(tokens, self.num_chars, as_ids=as_ids)
        self.num_chars += sum(len(token.token) for token in tokens)
        return lists


def usage(num_prompt: int, num_cached: int, choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """The `usage` object: tokens of all prompts and all choices of a request."""
    num_completion = sum(choice.num_tokens for choice in choices)
    token_counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    thoughts = [choice.turn.num_reasoning_tokens for choice in choices if choice.turn is not None]
    if any(count is not None for count in thoughts):
        token_counts["completion_tokens_details"] = {"reasoning_tokens": sum(count or 0 for count in thoughts)}
    return token_counts


def best(choices: Sequence[ChoiceState], best_of: int, n: int) -> list[ChoiceState]:
    """Selects the `n` best of each prompt's `best_of` choices, best first, and renumbers them.

    Choices are ranked by mean log-probability per token. Among equals the earlier choice wins.
    """
    chosen: list[ChoiceState] = []
    for first in range(0, len(choices), best_of):
        ranked = sorted(choices[first : first + best_of], key=_mean_logprob, reverse=True)
        chosen += ranked[:n]
    for index, choice in enumerate(chosen):
        choice.index = index
    return chosen


def _mean_logprob(choice: ChoiceState) -> float:
    return choice.sum_logprobs / choice.num_scored if choice.num_scored else float("-inf")


class AnswerBuilder:
    """Writes one request's answer as JSON. The common part of its chunks is encoded once."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    HAS_DONE: ClassVar[bool] = True  # a stream ends with [DONE]

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        has_usage: bool,
        has_running_usage: bool,
        *,
        make_turn: Callable[[], AssistantTurn] | None = None,
        has_token_ids: bool = False,
        has_logprobs: bool = True,
        has_tokens_as_ids: bool = False,
        details_since_s: float | None = None,
    ) -> None:
        """`make_turn` makes the parser of a choice; None if choices are plain text.

        `details_since_s`, the request's arrival, adds details to the logprobs of each token.
        """
        self.id = answer_id
        self._make_turn = make_turn
        self.has_token_ids = has_token_ids  # of each choice, and of the prompts
        self.has_logprobs = has_logprobs  # False: logprobs were computed for ranking only, so leave them out
        self.has_tokens_as_ids = has_tokens_as_ids  # tokens in logprobs are spelled as their ids
        self._details_since_s = details_since_s
        self.prompts: dict[int, PromptEcho] = {}  # prompt index -> its data, if requested; filled at its first token
        self.choices_per_prompt = 1
        self._affixes: dict[int, tuple[bytes, bytes]] = {}  # choice -> JSON before and after the text of a chunk
        self.has_usage = has_usage
        self.has_running_usage = has_running_usage
        self._common = {"id": answer_id, "created": created, "model": model}
        shared = {"id": answer_id, "object": self.CHUNK, "created": created, "model": model}
        self._head = orjson.dumps(shared)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if has_usage else b"]}"

    def choices(self, num_choices: int) -> list[ChoiceState]:
        """New, empty choices."""
        make_turn = self._make_turn
        return [ChoiceState(index, turn=None if make_turn is None else make_turn()) for index in range(num_choices)]

    def keep(self, choice: ChoiceState, delta: ChoiceDelta) -> None:
        """Adds a delta to a choice whose answer is not streamed.

        Log-probabilities are written as JSON as they come. At the end of a long answer they would hold the loop for
        seconds, and as objects they take ten times the memory.
        """
        choice.add(delta, keep=True)
        if choice.logprobs:
            tokens, choice.logprobs = choice.logprobs, []
            choice.num_scored += len(tokens)
            choice.sum_logprobs += sum(token.logprob for token in tokens)
            if self.has_logprobs:
                for name, values in self.logprob_lists(choice, tokens).items():
                    written = choice.written.setdefault(name, bytearray())
                    written += (b"," if written else b"") + orjson.dumps(values)[1:-1]

    def logprob_lists(self, choice: ChoiceState, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The logprobs of some tokens of a choice in the shape of the API, which is an object of lists."""
        raise NotImplementedError

    def _detailed(self, lists: dict[str, list[Any]], tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Adds the list of details of the answer's tokens, if they were requested."""
        if (since_s := self._details_since_s) is not None:
            lists["details"] = [token_details(token, since_s) for token in tokens]
        return lists

    def _kept_logprobs(self, choice: ChoiceState) -> dict[str, orjson.Fragment] | None:
        """All logprobs of a choice: empty lists if no token is in its text, None if they were not requested."""
        if not self.has_logprobs:
            return None
        lists = choice.written or dict.fromkeys(self.logprob_lists(choice, ()), bytearray())
        return {name: orjson.Fragment(b"[" + written + b"]") for name, written in lists.items()}

    def whole(self, choices: Sequence[ChoiceState], usage: dict[str, Any]) -> Any:
        """The body of an answer that is not streamed, with the logprobs that `keep` has written."""
        return {
            "id": self.id,
            "object": self.WHOLE,
            "created": self._common["created"],
            "model": self._common["model"],
            "choices": [self._whole_choice(choice) for choice in choices],
            "usage": usage,
            "system_fingerprint": None,
        }

    def opening(self, num_choices: int) -> list[bytes]:
        """The chunks before any text."""
        return []

    def chunks(
        self, choice: ChoiceState, delta: ChoiceDelta, running_usage: dict[str, Any] | None = None
    ) -> list[bytes]:
        """The chunks of one delta of one choice; none if there is no output yet (half a character)."""
        if not (delta.finish_reason or delta.logprobs or self.has_token_ids or running_usage is not None):
            return [self._plain(choice, delta)] if delta.text else []
        has_unread = delta.text or delta.finish_reason or delta.logprobs or (self.has_token_ids and delta.token_ids)
        if not has_unread and running_usage is None:
            return []
        piece = self._chunk_choice(choice, delta)
        if self.has_token_ids:
            piece["token_ids"] = delta.token_ids
        return [self._encoded(piece, running_usage)]

    def _plain(self, choice: ChoiceState, delta: ChoiceDelta) -> bytes:
        """The chunk of a delta that is only text, the common case.

        The JSON around it is encoded once per choice.
        """
        affixes = self._affixes.get(choice.index)
        if affixes is None:
            before, _, after = self._encoded(self._chunk_choice(choice, replace(delta, text=MARK))).partition(_MARK)
            affixes = self._affixes[choice.index] = (before, after)
        return affixes[0] + orjson.dumps(delta.text) + affixes[1]

    def closing(self, usage: dict[str, Any] | None, metrics: Mapping[str, Any] | None) -> bytes | None:
        """The extra chunk at the end of a stream, if usage or metrics were requested."""
        extras = {"usage": usage, "metrics": metrics}
        fields = {name: value for name, value in extras.items() if value is not None}
        return self._head + b"]," + orjson.dumps(fields)[1:] if fields else None

    def progress_chunk(self, progress: PrefillProgress) -> bytes:
        """A chunk with the progress of the prefill and no text."""
        progress_fields = {
            "total": progress.total,
            "cached": progress.cached,
            "cache": progress.cached,  # as llama.cpp's clients read it
            "processed": progress.processed,
            "time_ms": round(1e3 * progress.time_s, 3),
        }
        return self._head + b'],"prompt_progress":' + orjson.dumps(progress_fields) + b"}"

    def _prompt(self, choice: ChoiceState) -> PromptEcho | None:
        return self.prompts.get(choice.index // self.choices_per_prompt)

    def _encoded(self, choice: dict[str, Any], running_usage: dict[str, Any] | None = None) -> bytes:
        if running_usage is not None:
            return self._head + orjson.dumps(choice) + b'],"usage":' + orjson.dumps(running_usage) + b"}"
        return self._head + orjson.dumps(choice) + self._tail

    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choice(self, choice: ChoiceState, delta: ChoiceDelta) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswerBuilder(AnswerBuilder):
    """`chat.completion` and `chat.completion.chunk`."""

    PREFIX = "chatcmpl-"
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def whole(self, choices: Sequence[ChoiceState], usage: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = super().whole(choices, usage)
        for part in self.prompts.values():  # chat has one prompt
            if part.prompt_logprobs is not None:
                body["prompt_logprobs"] = part.prompt_logprobs
            if part.token_ids is not None:
                body["prompt_token_ids"] = part.token_ids
        return body

    def opening(self, num_choices: int) -> list[bytes]:
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self._encoded(_choice_fields(index, {"delta": delta}, None, None, None)) for index in range(num_choices)
        ]
        if self.prompts and self.prompts[0].token_ids is not None:
            ids = b'"prompt_token_ids":' + orjson.dumps(self.prompts[0].token_ids) + b","
            chunks[0] = chunks[0].replace(b'"choices":[', ids + b'"choices":[', 1)
        return chunks

    def chunks(
        self, choice: ChoiceState, delta: ChoiceDelta, running_usage: dict[str, Any] | None = None
    ) -> list[bytes]:
        """One chunk per piece of the turn, as clients join pieces of the same kind."""
        if choice.turn is None:
            return super().chunks(choice, delta, running_usage)
        deltas = [_piece_delta(piece) for piece in choice.pieces]
        has_unread = deltas or delta.finish_reason or delta.logprobs or (self.has_token_ids and delta.token_ids)
        if not has_unread and running_usage is None:
            return []
        chunk_choices = [_choice_fields(choice.index, {"delta": part}, None, None, None) for part in deltas or [{}]]
        chunk_choices[0]["logprobs"] = self._logprobs(choice, delta.logprobs)
        if self.has_token_ids:
            chunk_choices[0]["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            chunk_choices[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return [self._encoded(chunk_choice, running_usage) for chunk_choice in chunk_choices]

    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        if choice.turn is None:
            message: dict[str, Any] = {"role": "assistant", "content": "".join(choice.texts)}
        else:
            message = _message(choice.pieces)
        logprobs = self._kept_logprobs(choice)
        whole = _choice_fields(choice.index, {"message": message}, logprobs, choice.finish_reason, choice.stop_reason)
        return whole | {"token_ids": choice.token_ids} if self.has_token_ids else whole

    def logprob_lists(self, choice: ChoiceState, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        return self._detailed(chat_logprobs(spelled_as(tokens, self.has_tokens_as_ids)), tokens)

    def _logprobs(self, choice: ChoiceState, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return self.logprob_lists(choice, tokens) if tokens else None

    def _chunk_choice(self, choice: ChoiceState, delta: ChoiceDelta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        logprobs = self._logprobs(choice, delta.logprobs)
        return _choice_fields(choice.index, {"delta": content}, logprobs, delta.finish_reason, delta.stop_reason)


class CompletionAnswerBuilder(AnswerBuilder):
    """`text_completion`, whole and in chunks."""

    PREFIX = "cmpl-"
    WHOLE = "text_completion"
    CHUNK = "text_completion"

    def _whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        part = self._prompt(choice) or PromptEcho()
        self._open(choice, part)
        logprobs = self._kept_logprobs(choice)
        text = {"text": part.text + "".join(choice.texts)}
        whole = _choice_fields(choice.index, text, logprobs, choice.finish_reason, choice.stop_reason)
        if self.has_token_ids:
            whole |= {"token_ids": choice.token_ids, "prompt_token_ids": part.token_ids}
        return whole if part.prompt_logprobs is None else whole | {"prompt_logprobs": part.prompt_logprobs}

    def chunks(
        self, choice: ChoiceState, delta: ChoiceDelta, running_usage: dict[str, Any] | None = None
    ) -> list[bytes]:
        part = self._prompt(choice)
        if part is None or choice.is_opened:
            return super().chunks(choice, delta, running_usage)
        self._open(choice, part)
        logprobs, text = self._logprobs(choice, delta.logprobs, part), {"text": part.text + delta.text}
        piece = _choice_fields(choice.index, text, logprobs, delta.finish_reason, delta.stop_reason)
        if self.has_token_ids:
            piece |= {"token_ids": delta.token_ids, "prompt_token_ids": part.token_ids}
        return [self._encoded(piece, running_usage)]

    def keep(self, choice: ChoiceState, delta: ChoiceDelta) -> None:
        if (part := self._prompt(choice)) is not None:
            self._open(choice, part)
        super().keep(choice, delta)

    def logprob_lists(self, choice: ChoiceState, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        return self._detailed(choice.completion_logprobs(tokens, as_ids=self.has_tokens_as_ids), tokens)

    def _open(self, choice: ChoiceState, part: PromptEcho) -> None:
        """Begins a choice with the echo of its prompt, once; before the first of its tokens."""
        if choice.is_opened:
            return
        choice.is_opened = True
        choice.num_chars += len(part.text)
        if self.has_logprobs and part.logprobs is not None:
            for name, values in part.logprobs.items():
                choice.written[name] = bytearray(orjson.dumps(values)[1:-1])

    def _chunk_choice(self, choice: ChoiceState, delta: ChoiceDelta) -> dict[str, Any]:
        logprobs = self._logprobs(choice, delta.logprobs)
        return _choice_fields(choice.index, {"text": delta.text}, logprobs, delta.finish_reason, delta.stop_reason)

    def _logprobs(
        self, choice: ChoiceState, tokens: Sequence[TokenLogprobs], part: PromptEcho | None = None
    ) -> dict[str, Any] | None:
        of_prompt = None if part is None else part.logprobs
        if not self.has_logprobs or (not tokens and of_prompt is None):
            return None
        shape = self.logprob_lists(choice, tokens)
        return (
            shape if of_prompt is None else {name: of_prompt.get(name, []) + values for name, values in shape.items()}
        )


def _piece_delta(piece: Piece) -> dict[str, Any]:
    """The `delta` of a chunk for a piece."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    if isinstance(piece, ToolCallBegun):
        return {"tool_calls": [{"index": piece.index, **_call(piece, "")}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """All pieces as one message. `content` is null if there are calls or reasoning but no text."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    begun = [piece for piece in pieces if isinstance(piece, ToolCallBegun)]
    arguments: list[list[str]] = [[] for _ in begun]
    for piece in pieces:
        if isinstance(piece, ToolCallArguments):
            arguments[piece.index].append(piece.text)
    calls = [_call(call, "".join(texts)) for call, texts in zip(begun, arguments, strict=True)]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls or thoughts else "")}
    if thoughts:
        message |= {"reasoning": thoughts, "reasoning_content": thoughts}
    if calls:
        message["tool_calls"] = calls
    return message


def _call(begun: ToolCallBegun, arguments: str) -> dict[str, Any]:
    return {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": arguments}}


def _choice_fields(
    index: int, text: dict[str, Any], logprobs: Any, finish_reason: str | None, stop_reason: str | int | None
) -> dict[str, Any]:
    return {
        "index": index,
        **text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
