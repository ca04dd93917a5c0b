"""The answer to a client, and that of a copy of its request, compared by tokens and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["equal", "different"]
Result = Literal["equal", "different", "failed", "late", "shed", "uncompared"]
RESULTS: Sequence[Result] = ("equal", "different", "failed", "late", "shed", "uncompared")


@dataclass(slots=True)
class SequenceTokens:
    """The tokens of one sequence so far, and how its engine ended it; 0: it has not."""

    token_ids: list[int] = field(default_factory=list)
    finish: int = 0  # as in `FinishReason`

    def add(self, place: int, token_id: int, finish: int) -> None:
        """Token number `place`. One that comes again, as the answer went on elsewhere, is the same."""
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
        self.finish = finish or self.finish


@dataclass(slots=True)
class ComparedChoice:
    """One choice of an answer, and the same one of its copy."""

    ours: SequenceTokens = field(default_factory=SequenceTokens)
    copied: SequenceTokens = field(default_factory=SequenceTokens)
    num_tokens: int | None = None  # that the client has got in all; None: its answer goes on

    def first_difference(self) -> int | None:
        """The first place with different tokens, of those that both have."""
        pairs = zip(self.ours.token_ids, self.copied.token_ids, strict=False)
        return next((place for place, (our, copied) in enumerate(pairs) if our != copied), None)

    def verdict(self) -> Verdict | None:
        """None while it is open.

        A stop string ends an answer here, and not in its engine: then the copy must have begun with the same tokens.
        Else it must have ended likewise, too.
        """
        if (due := self.num_tokens) is None:
            return None
        place, num_copied = self.first_difference(), len(self.copied.token_ids)
        if place is not None and place < due:
            return "different"
        if not self.ours.finish or len(self.ours.token_ids) != due:  # a stop string ended it
            if num_copied >= due:
                return "equal"
            return "different" if self.copied.finish else None
        if num_copied > due:
            return "different"
        if not self.copied.finish:
            return None
        return "equal" if num_copied == due and self.copied.finish == self.ours.finish else "different"


def verdict_of(choices: Sequence[ComparedChoice]) -> Verdict | None:
    """Of a whole answer: one different choice decides; equal ones must all be known."""
    verdicts = [choice.verdict() for choice in choices]
    if "different" in verdicts:
        return "different"
    return None if None in verdicts else "equal"
