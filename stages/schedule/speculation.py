"""Which sequences draft, how far ahead, and when that stops paying: by what came of it lately.

Drafts are computed behind a row's own token, as a chunk of a prompt is, and kept as far as the sampler then chooses the
very same tokens: so an answer is what it is without them. What they cost is a wider step, and that a row with drafts
needs its last token on the host, so it can not run ahead. Hence three rules. Nobody drafts while so many sequences are
served that each could draft but a few tokens, or while a prompt is computed: a step has better use for its width. A
sequence begins when a whole run of its last tokens stood before; it goes on while the drafts of its steps turn out
right, and drafts further the more of them do. And it stops when it makes no more than it would by running ahead.

Plain state beside the scheduler's. Knows how many tokens there are, not which: all that it decides follows from
guesses, grants and outcomes, so a recording replays whatever it hides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..config import EngineConfig
from ..messages import Drafts, Guess, Indices, TokenRequest
from ..outputs import ModelInfo
from ..params import has_plain_choice
from .sequence import Sequence
from .service_order import Lineup
from .slot_table import SlotTable

FEWEST = 3  # drafts that each row must have room for in a step
FIRST_LENGTH, LEAST_LENGTH = 4, 2  # drafts of a row
LOOK_TOKENS = 4  # between two looks at a sequence that does not draft
PAUSE_TOKENS = 32  # after it stopped
FIRST_SCORE = 3.0
SCORE_WEIGHT = 0.25  # of the newest step in a sequence's score
LEAST_SCORE = 1.0  # drafts accepted a step, where nobody runs ahead


def num_speculative_tokens(config: EngineConfig, info: ModelInfo) -> int:
    """Drafts of a step, at most; 0: nobody drafts. "auto" means the native step on a CPU,
    in which a few rows more cost little, as one row reads all weights."""
    is_on = config.speculation == "ngram" or (config.speculation == "auto" and info.attention_backend == "native")
    return config.num_speculative_tokens if is_on else 0


def may_draft(sequence: Sequence | TokenRequest) -> bool:
    """Whether the choice of each of its tokens depends on logits, seed and position alone, so that several may be
    chosen at once. Log-probabilities may be asked for."""
    return sequence.pooling is None and has_plain_choice(sequence.params)


@dataclass(slots=True)
class _Track:
    """One sequence that is served."""

    sequence_id: int
    may_draft: bool
    is_drafting: bool = False
    score: float = 0.0  # drafts accepted a step
    length: int = FIRST_LENGTH  # of the drafts to come
    look_at: int = 0  # tokens of it, known or in flight, before which it is not worth a look
    guess: Guess | None = None  # the last one


class Speculation:
    """Told of the line-up before each plan, of guesses, and of what became of drafts.

    A step holds `num_tokens` drafts at most, and one token more: several rows share them. With 0 nobody ever drafts.
    """

    def __init__(self, num_tokens: int, most_each: int, steps_in_flight: int) -> None:
        self.num_tokens = min(num_tokens, most_each)  # drafts of a row, at most
        self._width = 1 + num_tokens  # tokens of a step
        self._max_rows = max(1, self._width // (1 + FEWEST))
        self.num_drafts = 0  # rows of steps that had some
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_at = [0] * self.num_tokens  # of the drafts at each place of a row
        self._least_beside_others = max(LEAST_SCORE, steps_in_flight - 0.5)  # who run ahead make as many meanwhile
        self._lineup: Lineup | None = None
        self._tracks: dict[int, _Track] = {}  # by slot

    @property
    def is_drafting(self) -> bool:
        """Whether any sequence drafts."""
        return bool(self._tracks) and any(track.is_drafting for track in self._tracks.values())

    @property
    def num_watched(self) -> int:
        """Sequences that draft or may begin to."""
        return len(self._tracks)

    @property
    def num_drafting(self) -> int:
        """Sequences that draft."""
        return sum(track.is_drafting for track in self._tracks.values())

    def line_up(self, lineup: Lineup, table: SlotTable) -> None:
        """Who is served now. Nobody drafts of too many."""
        if lineup is self._lineup or not self.num_tokens:
            return
        self._lineup, before = lineup, self._tracks
        self._tracks = {}
        for slot in lineup.slots.tolist() if len(lineup.slots) <= self._max_rows else ():
            sequence, track = table.sequences[slot], before.get(slot)
            assert sequence is not None
            if track is None or track.sequence_id != sequence.sequence_id:
                track = _Track(sequence.sequence_id, may_draft(sequence))
            self._tracks[slot] = track

    # -- guesses

    def due(self, table: SlotTable, in_flight: Collection[int]) -> list[int]:
        """The slots of which a guess is wanted, when those `in_flight` have a row in some step. Changes nothing."""
        return [slot for slot, track in self._tracks.items() if _is_due(slot, track, table, slot in in_flight)]

    def take(self, guess: Guess, table: SlotTable) -> None:
        """A guess was made."""
        track = self._tracks.get(guess.slot)
        if track is None or track.sequence_id != guess.sequence_id:
            return
        track.guess = guess
        if track.is_drafting:
            if not len(guess.token_ids):
                self._note_score(track, 0)
            return
        track.look_at = int(table.num_known[guess.slot]) + LOOK_TOKENS
        if guess.is_sure:
            track.is_drafting, track.score, track.length = True, FIRST_SCORE, FIRST_LENGTH

    # -- steps

    def drafting(self) -> list[int]:
        """The slots that draft: each waits for its last token before it is planned again."""
        return [slot for slot, track in self._tracks.items() if track.is_drafting]

    def drafts(self, slots: Indices, table: SlotTable, token_budget: int) -> Drafts | None:
        """What rows that want one token each, [R], are to compute besides; None: nothing."""
        if not len(slots):
            return None
        most = min(self.num_tokens, min(self._width, token_budget) // len(slots) - 1)
        parts = [self._drafts_of(slot, most, table) for slot in slots.tolist()]
        counts = np.array([len(part) for part in parts], np.int32)
        return Drafts(counts, np.concatenate(parts)) if counts.any() else None

    def _drafts_of(self, slot: int, most: int, table: SlotTable) -> Indices:
        track = self._tracks.get(slot)
        num_known = int(table.num_known[slot])
        if track is None or not track.is_drafting or track.guess is None or track.guess.num_known != num_known:
            return np.zeros(0, np.intp)
        room = int(table.limit[slot]) - num_known - 1  # the token behind the last draft is to be the last one
        return track.guess.token_ids[: max(0, min(track.length, most, room))]

    def note(self, slot: int, num_drafts: int, num_accepted: int) -> None:
        """A step with drafts of the sequence in `slot` is done."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.num_accepted_at[place] += 1
        track = self._tracks.get(slot)
        if track is None or not track.is_drafting:
            return
        if num_accepted == num_drafts:
            track.length = min(2 * track.length, self.num_tokens)
        else:
            track.length = max(num_accepted + 1, LEAST_LENGTH)
        self._note_score(track, num_accepted)

    def _note_score(self, track: _Track, num_accepted: int) -> None:
        track.score += (num_accepted - track.score) * SCORE_WEIGHT
        runs_alone = all(other.is_drafting for other in self._tracks.values())
        if track.score < (LEAST_SCORE if runs_alone else self._least_beside_others):
            assert track.guess is not None
            track.is_drafting, track.look_at = False, track.guess.num_known + PAUSE_TOKENS


def _is_due(slot: int, track: _Track, table: SlotTable, is_in_flight: bool) -> bool:
    num_known = int(table.num_known[slot])
    if not track.may_draft or table.limit[slot] - num_known < 2 or not _is_decoding(slot, track, table):
        return False
    if not track.is_drafting:
        return num_known >= track.look_at
    return not is_in_flight and (track.guess is None or track.guess.num_known != num_known)


def _is_decoding(slot: int, track: _Track, table: SlotTable) -> bool:
    """Whether the sequence is there yet, and the device has its newest token from a step of its own."""
    sequence = table.sequences[slot]
    if sequence is None or sequence.sequence_id != track.sequence_id or not table.is_running[slot]:
        return False
    return not table.is_parked[slot] and int(table.num_known[slot]) > len(sequence.token_ids)
