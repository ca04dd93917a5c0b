"""Prompt lookup: drafts the tokens after an earlier match of a sequence's last tokens.

There is no draft model. `speculation.py` decides which sequences draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..messages import NO_INDICES, Guess, Indices, Ints
from .slot_table import SlotTable

MOST_TEXTS = 16  # texts kept, one per slot; the least recently used is dropped first


def continuation(tokens: Ints, least: int, most: int, num_tokens: int) -> tuple[Indices, int]:
    """Returns (`num_tokens` draft tokens, length of the match) for `tokens` [T].

    The match is the longest run of last tokens, up to `most`, that occurs earlier; of several places, the last. A match
    shorter than `least` gives no drafts. If the continuation reaches the end of `tokens`, it repeats from the place
    after the match. Takes about one comparison of all tokens: 10 us for a few thousand, 40 us for 100,000.
    """
    found = np.flatnonzero(tokens[:-1] == tokens[-1])  # where earlier matches end
    num_matched = 0
    while len(found):
        num_matched += 1
        longer = found[found >= num_matched]
        if num_matched == most or not len(longer):
            break
        longer = longer[tokens[longer - num_matched] == tokens[-1 - num_matched]]
        if not len(longer):
            break
        found = longer
    if num_matched < least:
        return NO_INDICES, num_matched
    start = int(found[-1]) + 1
    places = start + np.arange(num_tokens) % (len(tokens) - start)
    return tokens[places].astype(np.intp), num_matched


class Drafter(Protocol):
    """Makes drafts for served sequences."""

    def guess(self, table: SlotTable, slot: int) -> Guess:
        """Draft tokens for the sequence in `slot`, from its reported tokens."""


@dataclass(slots=True)
class _Text:
    """All known tokens of a sequence, in a buffer with room for more."""

    sequence_id: int
    tokens: Ints
    count: int


class NgramDrafter:
    """A `Drafter` that reads the slot table and keeps each text in one buffer."""

    def __init__(self, least: int, most: int, num_tokens: int) -> None:
        self._least, self._most, self._num_tokens = least, most, num_tokens
        self._texts: dict[int, _Text] = {}  # by slot, the most recently used last

    def guess(self, table: SlotTable, slot: int) -> Guess:
        """Draft tokens for the sequence in `slot`, from its reported tokens."""
        text = self._read(table, slot)
        token_ids, num_matched = continuation(text.tokens[: text.count], self._least, self._most, self._num_tokens)
        return Guess(slot, text.sequence_id, text.count, token_ids, num_matched >= self._most)

    def _read(self, table: SlotTable, slot: int) -> _Text:
        sequence = table.sequences[slot]
        assert sequence is not None, f"no sequence runs in slot {slot}"
        answer, num_prompt = table.answer(slot), sequence.num_prompt
        text = self._texts.pop(slot, None)
        if text is None or text.sequence_id != sequence.sequence_id:
            text = _Text(sequence.sequence_id, np.empty(sequence.limit, np.int32), num_prompt)
            text.tokens[:num_prompt] = sequence.token_ids[:num_prompt]
        text.tokens[text.count : num_prompt + len(answer)] = answer[text.count - num_prompt :]
        text.count = num_prompt + len(answer)
        self._texts[slot] = text
        if len(self._texts) > MOST_TEXTS:
            del self._texts[next(iter(self._texts))]
        return text
