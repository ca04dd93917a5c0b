"""The buffer of one answer: what has arrived and is not read yet."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..messages import NO_INTS, Begun, Finish, PromptLogprobs, TokenLogprobs
from ..outputs import FINISH_NAMES, Delta, Progress
from ..pooling_params import Floats

if TYPE_CHECKING:
    from .request_outbox import RequestOutbox

NOT_BEGUN = Begun(NO_INTS)


class Choice:
    """One choice of a request: the exit fills it, the reader takes `Delta`s from it."""

    __slots__ = (
        "begun",
        "finish",
        "index",
        "is_parked",
        "is_told",
        "logprobs",
        "num_read",
        "num_unspoken_chars",
        "outbox",
        "progress",
        "prompt_logprobs",
        "sequence_id",
        "texts",
        "token_ids",
        "vector",
    )

    def __init__(self, outbox: RequestOutbox, index: int) -> None:
        self.outbox = outbox
        self.index = index
        self.sequence_id = outbox.request.first_sequence_id + index
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.vector: Floats | None = None  # of a pooled sequence, whole
        self.finish: Finish | None = None
        self.is_parked = False
        self.is_told = False  # whether the reader has its finish reason
        self.begun = NOT_BEGUN
        self.progress: Progress | None = None  # the last report, until it is read
        self.prompt_logprobs: list[PromptLogprobs] = []  # of a prompt's first choice, if requested; in order
        self.num_read = 0  # tokens already read
        self.num_unspoken_chars = 0  # characters read whose logprobs are not read yet

    @property
    def num_generated(self) -> int:
        return self.num_read + len(self.token_ids)

    def add_prompt_logprobs(self, scored: PromptLogprobs) -> None:
        """Adds new positions.

        Drops parts that repeat known ones: a preempted prompt is scored again.
        """
        if not self.prompt_logprobs or scored.end > self.prompt_logprobs[-1].end:
            self.prompt_logprobs.append(scored)

    def take(self) -> Delta | None:
        """Takes what is new, or None. Tokens count even if their text is still held back."""
        is_end = self.finish is not None and not self.is_told
        progress, self.progress = self.progress, None
        if not self.token_ids and not is_end:
            return None if progress is None else Delta(self.index, "", (), progress=progress)
        text, token_ids = "".join(self.texts), tuple(self.token_ids)
        self.texts, self.token_ids = [], []
        self.num_read += len(token_ids)
        self.num_unspoken_chars += len(text)
        logprobs = self._take_logprobs() if self.logprobs else ()
        if not is_end or self.finish is None:
            return Delta(self.index, text, token_ids, logprobs, progress=progress)
        self.is_told = True
        finish = self.finish
        reason = FINISH_NAMES[finish.reason]
        return Delta(self.index, text, token_ids, logprobs, reason, finish.stop_reason, finish.score, self.vector)

    def _take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Takes the logprobs whose text has been read, so that their joined texts equal the text.

        Text cut off by a stop string is cut off here too.
        """
        taken: list[TokenLogprobs] = []
        for entry in self.logprobs:
            if len(entry.token) > self.num_unspoken_chars:
                break
            self.num_unspoken_chars -= len(entry.token)
            taken.append(entry)
        del self.logprobs[: len(taken)]
        if self.finish is not None and self.logprobs:
            if self.num_unspoken_chars:
                taken.append(replace(self.logprobs[0], token=self.logprobs[0].token[: self.num_unspoken_chars]))
            self.logprobs.clear()
            self.num_unspoken_chars = 0
        return tuple(taken)
