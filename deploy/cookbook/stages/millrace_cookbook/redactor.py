"""Redactor: takes words and patterns out of answers, also where a token or a chunk ends inside of one.

    millrace serve --stage redactor@after=detokenize

Text that may be the begin of a match is held until it is clear: the last run of printable ASCII without a space, where
a space between digits counts as no space, and the begin of a word of `words`. So what a pattern matches must be such a
run, of at most `MAX_MATCH_CHARS`; only `words` may have other characters. Patterns are searched in what is held at each
token, so they must be fast on long runs: `{1,64}` in place of `+` before a character that may be missing.

A token's id and its log-probabilities tell its text, so they leave as 0 and without text. Beam searches are refused, as
their answers do not pass here. A stage that keeps answers, such as the semantic cache, stands behind this one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from millrace import Stage
from millrace.runtime.stage import Context, Outlet
from millrace.stages.errors import Refused
from millrace.stages.messages import StepText, TokenLogprobs

MAX_MATCH_CHARS = 2_000  # of twice as many held characters the first half leaves
MAIL = r"[\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63})+"
SECRET = r"\b(sk|pk|rk|ghp|gho|ghs|glpat|xox[abp]|AKIA)[-_A-Za-z0-9]{12,}"  # of well-known services
NUMBER = r"\b\d(?:[ -]?\d){11,18}\b"  # of cards and accounts

# the end of a text that may grow, in the reversed text: a search from the front takes quadratic time
_RUN = re.compile(r"(?: (?=[0-9]))?(?:[!-~]|(?<=[0-9]) (?=[0-9]))*")


class Redactor(Stage[StepText, StepText]):
    """Replaces each match of `words`, in any case, and of the regular expressions `patterns` by `mask`."""

    def __init__(
        self,
        words: Sequence[str] = (),
        patterns: Sequence[str] = (MAIL, SECRET, NUMBER),
        mask: str = "[redacted]",
    ) -> None:
        listed = [words] if isinstance(words, str) else list(words)
        if not all(listed):
            raise ValueError("words: one is empty; leave it out")
        self.mask = mask
        self._begins = {folded[:i] for folded in map(_folded, listed) for i in range(1, len(folded))}
        self._longest = max(map(len, listed), default=1) - 1  # of a begin
        literal = "|".join(re.escape(word) for word in sorted(listed, key=len, reverse=True))
        kinds = ([f"(?iu:{literal})"] if listed else []) + [f"(?:{pattern})" for pattern in patterns]
        if not kinds:
            raise ValueError("words and patterns: both are empty, so nothing would be redacted; name one")
        try:
            self._pattern = re.compile("|".join(kinds), re.ASCII)
        except re.error as error:
            raise ValueError(f"patterns: {error}") from None
        self._held: dict[str, dict[int, str]] = {}  # request id -> sequence id -> text that has not left yet

    async def setup(self, context: Context) -> None:
        self._context = context
        self._num_matches = context.metrics.counter("matches", "Matches that were redacted.")

    async def handle(self, batch: Sequence[StepText], out: Outlet[StepText]) -> None:
        for step in batch:
            texts = [self._text(step, row, out) for row in range(len(step.texts))]
            logprobs = {row: _without_text(one) for row, one in step.logprobs.items()}
            out.send(replace(step, texts=texts, token_ids=[0] * len(texts), logprobs=logprobs))

    def ended(self, request_id: str, cause: str) -> None:
        self._held.pop(request_id, None)

    def _text(self, step: StepText, row: int, out: Outlet[StepText]) -> str:
        """What may leave of a row."""
        sequence_id = step.sequence_ids[row]
        request = self._context.find_request(sequence_id)
        if request is None:
            return ""  # it has ended, and its client gets nothing more
        if request.parent_id is not None:
            refused = Refused("use_beam_search: not supported with a redactor", param="use_beam_search")
            out.fail(request.request_id, refused)
            return ""
        held = self._held.setdefault(request.request_id, {})
        text = held.pop(sequence_id, "") + step.texts[row]
        end = len(text) if row in step.finishes else self.clear(text)
        if end < len(text):
            held[sequence_id] = text[end:]
        return self.redacted(text[:end])

    def redacted(self, text: str) -> str:
        """A whole text without its matches."""
        made, count = self._pattern.subn(lambda match: self.mask, text)
        if count:
            self._num_matches.add(count)
        return made

    def clear(self, text: str) -> int:
        """How many characters of a text that goes on may leave: no match begins in them that does not end there."""
        run = _RUN.match(text[::-1])
        assert run is not None, "it may be empty"
        end, tail = len(text) - run.end(), _folded(text[-self._longest :]) if self._longest else ""
        for length in range(len(tail), 0, -1):
            if tail[-length:] in self._begins:
                end = min(end, len(text) - length)
                break
        is_full = len(text) - end > 2 * MAX_MATCH_CHARS
        end = len(text) - MAX_MATCH_CHARS if is_full else end
        for match in self._pattern.finditer(text):
            if match.start() < end < match.end():
                return match.end() if is_full and match.start() == 0 else match.start()
        return end


def _folded(text: str) -> str:
    """As many characters, the same for two that differ in case: also \u017f and s, which `re` finds equal."""
    return "".join(low if len(low := char.upper().lower()) == 1 else char.lower()[:1] for char in text)


def _without_text(one: TokenLogprobs) -> TokenLogprobs:
    return replace(one, token_id=0, token="", token_bytes=b"", top=())
