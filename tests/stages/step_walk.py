"""Steps of sequences that come and go at random, as allocate would grant them, to test what devices make of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np

from millrace.stages.messages import Drafts, Ints, Started, StepGrant, TableEntries
from millrace.stages.params import SamplingParams
from tests.stages.grants import grant, started

EOS = 1
VOCAB_SIZE = 50


class Walk:
    """Sequences in `num_slots` slots. Take grants from `steps`, and report the token of each sampled row with `chose`.

    Blocks are numbered from 1 in the order they are needed, and never used again.
    """

    def __init__(
        self,
        dice: Random,
        num_slots: int = 4,
        max_model_len: int = 40,
        block_size: int = 4,
        *,
        has_stops: bool = True,
        num_kinds: int = 1,
    ) -> None:
        self.num_kinds = num_kinds  # of blocks; those of another kind have other numbers
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_model_len, block_size
        self.has_stops = has_stops  # whether some have stop ids
        self.num_blocks = 1
        self.tokens: dict[int, list[int]] = {}  # of each slot's sequence, all that are known
        self.limits: dict[int, int] = {}
        self._dice = dice
        self._computed: dict[int, int] = {}
        self._placed: dict[int, int] = {}  # blocks

    def steps(self, num_steps: int, *, only_decode: float = 0.5) -> Iterator[StepGrant]:
        """`only_decode`: how often no new sequence is admitted."""
        for step in range(num_steps):
            started = [] if self._dice.random() < only_decode else self._let_in()
            slots = [slot for slot in self.tokens if self._dice.random() < 0.9]
            self._dice.shuffle(slots)
            if slots or started:
                of = self._grant(step, slots, started)
                entries = (of.table_slots, of.table_places, of.table_blocks)
                more = (TableEntries(kind, *entries[:2], entries[2] + 1000 * kind) for kind in range(1, self.num_kinds))
                yield replace(of, more_tables=tuple(more))

    def chose(self, of: StepGrant, token_ids: list[int]) -> None:
        """One for each sampled row, in order."""
        for slot, token_id in zip(of.slots[of.is_sampled].tolist(), token_ids, strict=True):
            self.tokens[slot].append(token_id)
            if len(self.tokens[slot]) >= self.limits[slot] or token_id == EOS:
                del self.tokens[slot]

    def _let_in(self) -> list[Started]:
        """Some sequences, new or with a part of their answers."""
        begun = []
        for slot in range(self.num_slots):
            if slot not in self.tokens and self._dice.random() < 0.7:
                num_prompt = self._dice.choice([1, 3, 4, 5, 9, self.max_model_len - 1])
                num_known = min(num_prompt + self._dice.choice([0, 0, 3]), self.max_model_len - 1)
                ids = [self._dice.randrange(2, VOCAB_SIZE) for _ in range(num_known)]
                is_stopped = self.has_stops and self._dice.random() < 0.3
                max_tokens = self._dice.randint(num_known - num_prompt + 1, 30)
                params = SamplingParams(
                    max_tokens=max_tokens,
                    min_tokens=min(max_tokens, self._dice.choice([0, 0, 3])),
                    temperature=self._dice.choice([0.0, 0.7]),
                    seed=3,
                    stop_token_ids=(self._dice.randrange(3, VOCAB_SIZE),) if is_stopped else (),
                    ignore_eos=self._dice.random() < 0.2,
                )
                self.tokens[slot], self._placed[slot] = ids, 0
                self._computed[slot] = self._dice.choice([0, 0, num_known // 2])
                self.limits[slot] = min(num_prompt + (params.max_tokens or 0), self.max_model_len)
                seed = self._dice.getrandbits(64)
                known: Ints = np.array(ids, np.int32)
                begun.append(
                    Started(slot, 100 + slot, f"r{slot}", known, num_prompt, params, seed, is_long=slot % 2 > 0)
                )
        return begun

    def _grant(self, step: int, slots: list[int], started: list[Started]) -> StepGrant:
        rows, tables = [], []
        for slot in dict.fromkeys([*slots, *(one.slot for one in started)]):
            start, known = self._computed[slot], len(self.tokens[slot])
            left = known - start
            count = left if self._dice.random() < 0.6 else self._dice.randint(1, left)
            rows.append((slot, start, count, count == left))
            self._computed[slot] += count
            while self._placed[slot] * self.block_size < start + count:
                tables.append((slot, self._placed[slot], self.num_blocks))
                self._placed[slot] += 1
                self.num_blocks += 1
        made = grant(rows, step=step, started=started, tables=tables)
        return replace(made, is_decode=bool((made.num_tokens == 1).all()))


def with_drafts(num_slots: int = 3) -> list[StepGrant]:
    """Prompts of 4, 5, 6.. tokens in as many slots, then a step in which slots 1, 3.. draft 1, 3.. tokens.

    The last row of the second step is not sampled. Blocks of 4 tokens; slot i has the blocks from 8 * i + 1 on.
    """
    slots = range(num_slots)
    begun = [started(slot, range(2, 6 + slot), min_tokens=0) for slot in slots]
    tables = [(slot, place, 8 * slot + place + 1) for slot in slots for place in range(6)]
    first = grant([(slot, 0, 4 + slot, True) for slot in slots], started=begun, tables=tables)
    counts = [slot % 4 if slot % 2 else 0 for slot in slots]
    rows = [(slot, 4 + slot, 1 + count, True) for slot, count in zip(slots, counts, strict=True)]
    rows[-1] = (*rows[-1][:2], 1, False)
    counts[-1] = 0
    drafts = Drafts(np.array(counts, np.int32), np.arange(sum(counts)) + 20)
    return [first, replace(grant(rows, step=1), drafts=drafts)]


class DraftedWalk:
    """As `Walk`, for decode steps in which rows have up to `most` drafts, often right ones.

    Sequences begin together, in steps without drafts. One that has ended is a row of one more step.
    """

    def __init__(self, dice: Random, num_slots: int, most: int, max_model_len: int = 40, block_size: int = 4) -> None:
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_model_len, block_size
        self.num_kinds = 1
        self.tokens: dict[int, list[int]] = {}  # of each slot's sequence, all that are known
        self._dice, self._most = dice, most
        self._limits: dict[int, int] = {}
        self._ended: set[int] = set()
        self._step = 0
        blocks = -(-max_model_len // block_size)
        self._tables = [(s, place, 1 + s * blocks + place) for s in range(num_slots) for place in range(blocks)]

    def step(self) -> StepGrant:
        """The next grant: a step with drafts, or prompts if few sequences are left."""
        self._step += 1
        if len(self.tokens) <= self.num_slots // 2:
            return self._begin()
        rows, counts = [], []
        for slot, known in list(self.tokens.items()):
            most = 0 if slot in self._ended else min(self._most, self._limits[slot] - len(known) - 1)
            counts.append(self._dice.randint(0, most) if most > 0 else 0)
            rows.append((slot, len(known) - 1, 1 + counts[-1], self._dice.random() < 0.95 or counts[-1] > 0))
            if slot in self._ended:
                del self.tokens[slot]
        ids = [self._dice.randrange(2, VOCAB_SIZE) for _ in range(sum(counts))]
        drafts = Drafts(np.array(counts, np.int32), np.array(ids, np.intp)) if ids else None
        return replace(grant(rows, step=self._step), drafts=drafts)

    def choose(self, of: StepGrant, drafts: list[int]) -> list[int]:
        """A token for each row of logits: the draft after it, or any; -1 is a broken row."""
        anything = [-1, EOS, *range(2, VOCAB_SIZE)]
        return [draft if draft >= 0 and self._dice.random() < 0.8 else self._dice.choice(anything) for draft in drafts]

    def chose(self, slot: int, token_id: int, *, is_end: bool) -> None:
        """A token of a sequence; tokens of one step in their order."""
        self.tokens[slot].append(token_id)
        if is_end:
            self._ended.add(slot)

    def _begin(self) -> StepGrant:
        self._ended, begun = set(), []
        self.tokens = {}
        for slot in range(self.num_slots):
            ids = [self._dice.randrange(2, VOCAB_SIZE) for _ in range(self._dice.choice([1, 2, 5]))]
            stops = tuple(self._dice.sample(range(3, VOCAB_SIZE), self._dice.choice([0, 1, 5])))
            more = {"max_tokens": self._dice.randint(2, 40), "stop_token_ids": stops}
            begun.append(started(slot, ids, ignore_eos=self._dice.random() < 0.2, **more))
            self.tokens[slot] = ids
            self._limits[slot] = min(len(ids) + begun[-1].params.max_tokens, self.max_model_len)
        rows = [(slot, 0, len(ids), True) for slot, ids in self.tokens.items()]
        return grant(rows, step=self._step, started=begun, tables=self._tables)
