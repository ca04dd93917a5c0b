"""Guesses how an answer goes on: as it went on where its last tokens stood before, in its prompt or in itself.

That is all the drafting there is (prompt lookup): no second model. Knows tokens; refuses to know who should guess, and
when that pays (`speculation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..messages import NO_INDICES, Guess, Indices, Ints
from .slot_table import SlotTable

MOST_TEXTS = 16  # kept, of as many slots; the one that was asked for longest ago goes first


def continuation(tokens: Ints, least: int, most: int, num_tokens: int) -> tuple[Indices, int]:
    """(the next `num_tokens` tokens, how many of the last ones they were found by), of `tokens` [T].

    The longest run of last tokens that stood there before counts, up to `most`, and of several such places the last;
    nothing comes of less than `least`. Where what followed runs into the end, it goes on as a period does. Takes as
    long as one comparison of all tokens: 10 us for a few thousand, 40 for 100,000.
    """
    found = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the earlier ones end
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
    """Guesses of sequences that are served."""

    def guess(self, table: SlotTable, slot: int) -> Guess:
        """What may come next of the sequence in `slot`, by what is told of it."""


@dataclass(slots=True)
class _Text:
    """All tokens of a sequence that are known, in a buffer that has room for more."""

    sequence_id: int
    tokens: Ints
    count: int


class NgramDrafter:
    """Looks into the books of the scheduler, and keeps each text that it reads in one piece."""

    def __init__(self, least: int, most: int, num_tokens: int) -> None:
        self._least, self._most, self._num_tokens = least, most, num_tokens
        self._texts: dict[int, _Text] = {}  # by slot, the one asked for last at the end

    def guess(self, table: SlotTable, slot: int) -> Guess:
        """What may come next of the sequence in `slot`, by what is told of it."""
        text = self._read(table, slot)
        token_ids, num_matched = continuation(text.tokens[: text.count], self._least, self._most, self._num_tokens)
        return Guess(slot, text.sequence_id, text.count, token_ids, num_matched >= self._most)

    def _read(self, table: SlotTable, slot: int) -> _Text:
        sequence = table.sequences[slot]
        assert sequence is not None, f"nobody runs in slot {slot}"
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
