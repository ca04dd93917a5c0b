"""The JSON of answers in OpenAI's form, whole and in chunks; each route has a class of its own below `AnswerBuilder`.

The framing of chunks is left to the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from ..assistant_turn import AssistantTurn
from .choice_state import ChoiceState
from .logprob_fields import token_details

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


def choice_fields(
    index: int, text: dict[str, Any], logprobs: Any, finish_reason: str | None, stop_reason: str | int | None
) -> dict[str, Any]:
    """One choice of a whole answer or a chunk; `text` is the member that holds its text."""
    return {
        "index": index,
        **text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
