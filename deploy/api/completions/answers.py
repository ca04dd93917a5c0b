"""The JSON of completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from ..openai.answers import AnswerBuilder, PromptEcho, choice_fields
from ..openai.choice_state import ChoiceState

if TYPE_CHECKING:
    from ....stages.messages import TokenLogprobs
    from ....stages.outputs import ChoiceDelta


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
        whole = choice_fields(choice.index, text, logprobs, choice.finish_reason, choice.stop_reason)
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
        piece = choice_fields(choice.index, text, logprobs, delta.finish_reason, delta.stop_reason)
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
        return choice_fields(choice.index, {"text": delta.text}, logprobs, delta.finish_reason, delta.stop_reason)

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
