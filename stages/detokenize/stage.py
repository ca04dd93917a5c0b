"""The detokenize stage: converts tokens to text, and ends answers at stop strings.

`model/text/detokenizer.py` converts bytes to characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...runtime.crash_recovery import StageCrashed
from ...runtime.env.log import get_logger
from ...runtime.exit import Outbox
from ...runtime.stage import Context, Crash, Outlet, Stage
from ..array_checks import equal, is_zero
from ..messages import (
    Begun,
    Indices,
    Ints,
    Started,
    StepText,
    StepTokens,
)
from ..params import SamplingParams
from .answer_text import AnswerText, DecodesIncrementally, Scored, TextRows, TextTableProtocol
from .token_gaps import TokenGaps
from .token_traits import ANY, NOT_PLAIN, token_traits

ROWS_AT_ONCE = 64  # slow rows between two yields to the event loop: a few hundred microseconds

log = get_logger("millrace.stages")


class Detokenize(Stage[StepTokens, StepText]):
    """Converts each new token to text, and ends answers at stop strings.

    Fast rows take their text from a table: in steady decoding nearly all rows, for a few numpy operations per step.
    `_traits` holds the traits of each token, `_traits_of_slots` the traits that make a row of a slot slow. Slow rows
    are handled one by one: incomplete characters, log-probabilities, last tokens, and tokens in which a stop string may
    begin or continue.

    A token is identified by its place in the answer. A place seen before is dropped, so a step may be sent twice.
    Tokens after a stop string are dropped as well, until schedule has ended the sequence.

    The exit calls `request_ended` directly, on the same event loop (`exit.on_end`).
    """

    on_crash: ClassVar = Crash.RECOVER
    error_code: ClassVar = "detokenizer_error"

    def __init__(
        self,
        table: TextTableProtocol,
        make_decoder: Callable[[SamplingParams, Ints], DecodesIncrementally],  # of the prompt [P]
        *,
        num_slots: int,
        vocab_size: int,
    ) -> None:
        self._table = table
        self._make_decoder = make_decoder
        self._texts = np.full(vocab_size, "", np.object_)  # [V] the model may have more or fewer ids than its tokenizer
        self._texts[: len(table.texts)] = table.texts[:vocab_size]
        self._traits = token_traits(self._texts.tolist())  # [V]
        self._traits[: len(table.texts)][~table.is_plain[:vocab_size]] |= NOT_PLAIN
        self._traits[len(table.texts) :] |= NOT_PLAIN
        self._sequence_ids = np.full(num_slots, -1, np.int64)  # [S] the sequence in each slot; -1: none
        self._next_places = np.zeros(num_slots, np.intp)  # [S] place of the next token
        self._ones = np.ones(num_slots, np.intp)
        self._traits_of_slots = np.full(num_slots, ANY, np.uint64)  # [S] traits of a token that make its row slow
        self.gaps = TokenGaps(num_slots)
        self._sequences: dict[int, AnswerText] = {}  # by id
        self._begun: dict[int, Begun] = {}  # by sequence id; sent with the next text
        self._is_halfway = False  # whether some rows of the current step were handled
        self._context: Context | None = None

    async def setup(self, context: Context) -> None:
        self._context = context

    async def handle(self, batch: Sequence[StepTokens], out: Outlet[StepText]) -> None:
        for step in batch:
            await self._read(step, out)

    async def recover(self, batch: Sequence[StepTokens], error: BaseException, out: Outlet[StepText]) -> None:
        """Handles the batch again; tokens seen before are dropped.

        After a crash between two rows the error is raised, as the text of the handled rows is lost.
        """
        if self._is_halfway:
            raise error
        await self.handle(batch, out)

    def request_ended(self, outbox: Outbox[Any], cause: str, error: BaseException | None) -> None:
        """Forgets the sequences of a request that has ended."""
        request = outbox.request  # type: ignore[attr-defined]
        for sequence_id in range(request.first_sequence_id, request.first_sequence_id + request.num_sequences):
            self._begun.pop(sequence_id, None)
            self._forget(sequence_id)

    @property
    def num_sequences(self) -> int:
        """Answers that have not ended."""
        return len(self._sequences)

    # -- a step

    async def _read(self, step: StepTokens, out: Outlet[StepText]) -> None:
        for started in step.started:
            self._start(started, step.began_s)
        slots, places = step.slots, step.places
        now_us = self._now_us()
        self._is_halfway = True
        if self._is_plain(step):
            self.gaps.step(slots, places, now_us)
            rows = self._read_fast(slots, places, step.sequence_ids, step.token_ids)
        else:
            is_ours = self._sequence_ids[slots] == step.sequence_ids
            next_places = self._next_places[slots]
            is_fast = (self._traits[step.token_ids] & self._traits_of_slots[slots]) == 0
            is_fast &= is_ours & (places == next_places) & (step.finishes == 0)
            is_new = is_ours & (places >= next_places)
            self._note_gaps(slots[is_new], places[is_new], now_us)
            columns = (slots, places, step.sequence_ids, step.token_ids)
            rows = self._read_fast(*(column[is_fast] for column in columns))
            await self._read_slow(step, (is_new & ~is_fast).nonzero()[0], now_us, rows, out)
        if step.pooled:
            out.send(StepText(step.step, (), (), (), pooled=tuple(step.pooled.values())))
        if rows.texts or step.prompt_logprobs or step.progress:
            out.send(rows.message(step.step, self._begun, step))
            if self._begun:
                self._begun = {}
        self._is_halfway = False

    def _note_gaps(self, slots: Indices, places: Indices, now_us: int) -> None:
        """Counts a gap for the first of an answer's tokens in a step, and 0 for the others."""
        is_first = np.append(True, slots[1:] != slots[:-1])[: len(slots)]
        self.gaps.step(slots[is_first], places[is_first], now_us)
        self.gaps.histogram.observe(0, len(slots) - int(np.count_nonzero(is_first)))

    def _is_plain(self, step: StepTokens) -> bool:
        """Whether all rows are fast: known sequences, next tokens, and texts from the table."""
        slots = step.slots
        return (
            equal(self._sequence_ids[slots], step.sequence_ids)
            and equal(self._next_places[slots], step.places)
            and is_zero(self._traits[step.token_ids] & self._traits_of_slots[slots])
            and is_zero(step.finishes)
        )

    def _read_fast(
        self, slots: Indices, places: Indices, sequence_ids: NDArray[np.int64], token_ids: Indices
    ) -> TextRows:
        """The text of fast rows, from the table."""
        self._next_places[slots] = places + self._ones[: len(places)]
        return TextRows(sequence_ids.tolist(), self._texts[token_ids].tolist(), token_ids.tolist())

    async def _read_slow(
        self, step: StepTokens, slow: NDArray[np.intp], now_us: int, rows: TextRows, out: Outlet[StepText]
    ) -> None:
        assert self._context is not None
        columns = (step.slots, step.sequence_ids, step.places, step.token_ids, step.finishes)
        lists = [column[slow].tolist() for column in columns]
        for count, (row, values) in enumerate(zip(slow.tolist(), zip(*lists, strict=True), strict=True), 1):
            slot, sequence_id, place, token_id, reason = values
            scored = None if (top := step.logprobs.get(row)) is None else (top, now_us, _is_drafted(step.slots, row))
            self._read_row(slot, sequence_id, place, token_id, reason, scored, rows, out)
            if count % ROWS_AT_ONCE == 0 and count < len(slow):
                await self._context.env.sleep(0)

    def _read_row(
        self,
        slot: int,
        sequence_id: int,
        place: int,
        token_id: int,
        finish_reason: int,
        scored: Scored | None,
        rows: TextRows,
        out: Outlet[StepText],
    ) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return  # its request ended while this stage yielded to the event loop
        try:
            assert place == self._next_places[slot], f"token {place} came when {self._next_places[slot]} was due"
            text, finish, logprobs = sequence.read(token_id, place, finish_reason, scored)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # fails only this answer, even for a Rust panic
            log.error("detokenizer.failed", request_id=sequence.request_id, error=type(error).__name__, exc_info=error)
            self._forget(sequence_id)
            out.fail(sequence.request_id, StageCrashed(self.name, self.error_code, error))
            return
        self._next_places[slot] = place + 1
        self._traits_of_slots[slot] = sequence.wanted_traits
        if finish is not None and sequence.num_preempted:
            finish = replace(finish, num_preempted=sequence.num_preempted)
        rows.add(sequence_id, text, token_id, finish, logprobs)
        if finish is not None:
            self._forget(sequence_id)

    # -- sequences

    def _start(self, started: Started, began_s: float | None) -> None:
        """Gives the slot to `started`. After a preemption its text continues where it was."""
        sequence = self._sequences.get(started.sequence_id)
        if sequence is None:
            num_generated = len(started.token_ids) - started.num_prompt
            if num_generated or started.pooling is not None or not self._is_live(started.request_id):
                return  # it has no text; or it has ended here and schedule does not know yet
            decoder = self._make_decoder(started.params, started.token_ids[: started.num_prompt])
            sequence = AnswerText(started.request_id, self._table, decoder, started.params)
            self._sequences[started.sequence_id] = sequence
            self._begun[started.sequence_id] = Begun(started.token_ids, started.num_cached, began_s)
        else:
            sequence.num_preempted += 1
            if sequence.slot is not None:
                self._leave_slot(sequence)
        self._empty(started.slot)
        sequence.slot = started.slot
        self._sequence_ids[started.slot] = started.sequence_id
        self._next_places[started.slot] = sequence.next_place
        self.gaps.enter(started.slot, sequence.last_token_us)
        self._traits_of_slots[started.slot] = sequence.wanted_traits

    def _now_us(self) -> int:
        assert self._context is not None
        return int(self._context.env.now() * 1e6)

    def _is_live(self, request_id: str) -> bool:
        assert self._context is not None
        return self._context.is_live(request_id)

    def _empty(self, slot: int) -> None:
        """Takes the slot from its last sequence, which was preempted or has ended."""
        holder = self._sequences.get(int(self._sequence_ids[slot]))
        if holder is not None:
            self._leave_slot(holder)
        self._sequence_ids[slot] = -1

    def _leave_slot(self, sequence: AnswerText) -> None:
        assert sequence.slot is not None
        sequence.next_place = int(self._next_places[sequence.slot])
        sequence.last_token_us = self.gaps.leave(sequence.slot)
        self._sequence_ids[sequence.slot] = -1
        sequence.slot = None

    def _forget(self, sequence_id: int) -> None:
        """Forgets an ended answer. Its `Begun` stays, as it may not have been sent yet."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None and sequence.slot is not None:
            self._sequence_ids[sequence.slot] = -1


def _is_drafted(slots: Indices, row: int) -> bool:
    """Whether the token in a row is an accepted draft: another token of its sequence follows in the step."""
    return row + 1 < len(slots) and bool(slots[row + 1] == slots[row])
