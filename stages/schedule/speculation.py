"""Speculative decoding: which sequences draft, and how many tokens.

Drafts are computed after a row's own token, like a chunk of a prompt, and accepted as long as the sampler chooses the
same tokens. So drafting never changes an answer. It costs a wider step, and a row with drafts cannot run ahead: it
needs its last token on the host. Three rules follow:

- No sequence drafts while so many are served that each could draft only a few tokens, or while a prompt is computed.
- A sequence begins to draft when a long enough run of its last tokens has occurred before. It continues while its
  drafts are accepted, and drafts more tokens the more are accepted.
- It stops when it gains no more than it would by running ahead.

All decisions depend on numbers of tokens in guesses, grants and outcomes, never on token ids. So a recording with
masked token ids replays.
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
from .service_order import ServiceOrder
from .slot_table import SlotTable

FEWEST = 3  # drafts for which each row must have room in a step
FIRST_LENGTH, LEAST_LENGTH = 4, 2  # drafts of a row: at first, at least
LOOKUP_INTERVAL = 4  # tokens between two lookups for a sequence that does not draft
PAUSE_TOKENS = 32  # tokens until the next lookup, after drafting stopped
FIRST_SCORE = 3.0
SCORE_WEIGHT = 0.25  # weight of the newest step in a sequence's score
LEAST_SCORE = 1.0  # accepted drafts per step, where all sequences draft


def num_speculative_tokens(config: EngineConfig, info: ModelInfo) -> int:
    """Drafts per step, at most; 0: speculation is off.

    "auto" turns it on for the native library on a CPU, where a few more rows cost little, since one row already reads
    all weights. With recurrent layers it is off: a rejected draft has changed their state for good.
    """
    if info.states is not None:
        return 0
    is_on = config.speculation == "ngram" or (config.speculation == "auto" and info.attention_backend == "native")
    return config.num_speculative_tokens if is_on else 0


def may_draft(sequence: Sequence | TokenRequest) -> bool:
    """Whether each token depends only on logits, seed and position.

    Then several can be chosen in one step. Requests for log-probabilities may draft.
    """
    return sequence.pooling is None and has_plain_choice(sequence.params)


@dataclass(slots=True)
class _Track:
    """The drafting state of one served sequence."""

    sequence_id: int
    may_draft: bool
    is_drafting: bool = False
    score: float = 0.0  # accepted drafts per step, a running mean
    length: int = FIRST_LENGTH  # number of drafts to compute next
    next_lookup_at: int = 0  # number of known tokens from which the next lookup is due
    guess: Guess | None = None  # the last one taken


class Speculation:
    """The drafting state of all served sequences.

    Call `follow_order` before each plan, `take` for each guess, `note` for each outcome. A step computes at most
    `num_tokens` + 1 tokens while rows draft; the rows share them. 0 turns speculation off.
    """

    def __init__(self, num_tokens: int, most_each: int, steps_in_flight: int) -> None:
        self.num_tokens = min(num_tokens, most_each)  # drafts per row, at most
        self._width = 1 + num_tokens  # tokens of a step with drafts, at most
        self._max_rows = max(1, self._width // (1 + FEWEST))
        self.num_drafts = 0  # rows with drafts, over all steps
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_at = [0] * self.num_tokens  # accepted drafts at each position of a row
        self._least_beside_others = max(LEAST_SCORE, steps_in_flight - 0.5)  # what running ahead yields meanwhile
        self._service_order: ServiceOrder | None = None
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

    def follow_order(self, service_order: ServiceOrder, table: SlotTable) -> None:
        """Takes the current service order. If it has too many rows, no sequence is tracked."""
        if service_order is self._service_order or not self.num_tokens:
            return
        self._service_order, before = service_order, self._tracks
        self._tracks = {}
        for slot in service_order.slots.tolist() if len(service_order.slots) <= self._max_rows else ():
            sequence, track = table.sequences[slot], before.get(slot)
            assert sequence is not None
            if track is None or track.sequence_id != sequence.sequence_id:
                track = _Track(sequence.sequence_id, may_draft(sequence))
            self._tracks[slot] = track

    # -- guesses

    def due(self, table: SlotTable, in_flight: Collection[int]) -> list[int]:
        """The slots that need a guess. Slots `in_flight` have a row in some step. Changes no state."""
        return [slot for slot, track in self._tracks.items() if _is_due(slot, track, table, slot in in_flight)]

    def take(self, guess: Guess, table: SlotTable) -> None:
        """Takes a guess; a sequence may begin to draft with it."""
        track = self._tracks.get(guess.slot)
        if track is None or track.sequence_id != guess.sequence_id:
            return
        track.guess = guess
        if track.is_drafting:
            if not len(guess.token_ids):
                self._note_score(track, 0)
            return
        track.next_lookup_at = int(table.num_known[guess.slot]) + LOOKUP_INTERVAL
        if guess.is_sure:
            track.is_drafting, track.score, track.length = True, FIRST_SCORE, FIRST_LENGTH

    # -- steps

    def drafting(self) -> list[int]:
        """The slots that draft. Each waits for its last token before it is planned again."""
        return [slot for slot, track in self._tracks.items() if track.is_drafting]

    def drafts(self, slots: Indices, table: SlotTable, token_budget: int) -> Drafts | None:
        """The drafts of rows that each want one token, [R]; None if no row has any."""
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
        num_left = int(table.limit[slot]) - num_known - 1  # the token after the last draft may be the last one
        return track.guess.token_ids[: max(0, min(track.length, most, num_left))]

    def note(self, slot: int, num_drafts: int, num_accepted: int) -> None:
        """Records the outcome of a step with drafts for the sequence in `slot`."""
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
            track.is_drafting, track.next_lookup_at = False, track.guess.num_known + PAUSE_TOKENS


def _is_due(slot: int, track: _Track, table: SlotTable, is_in_flight: bool) -> bool:
    num_known = int(table.num_known[slot])
    if not track.may_draft or table.limit[slot] - num_known < 2 or not _is_decoding(slot, track, table):
        return False
    if not track.is_drafting:
        return num_known >= track.next_lookup_at
    return not is_in_flight and (track.guess is None or track.guess.num_known != num_known)


def _is_decoding(slot: int, track: _Track, table: SlotTable) -> bool:
    """Whether the sequence has the slot, is served, and has a new token since it started."""
    sequence = table.sequences[slot]
    if sequence is None or sequence.sequence_id != track.sequence_id or not table.is_running[slot]:
        return False
    return not table.is_parked[slot] and int(table.num_known[slot]) > len(sequence.token_ids)
