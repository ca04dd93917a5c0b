"""The detokenize stage: tokens become text, a step at a time, and stop strings end it.

Knows text and which tokens it has seen. Refuses to know how bytes become characters: that is
`model/text/detokenizer.py`.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ...runtime.env.log import get_logger
from ...runtime.exit import Outbox
from ...runtime.stage import Context, Crash, Outlet, Stage
from ...runtime.stage_runner import StageCrashed
from ..array_checks import equal, is_zero
from ..messages import (
    Begun,
    Bools,
    Finish,
    FinishReason,
    Indices,
    Started,
    StepText,
    StepTokens,
    TokenLogprobs,
    TopLogprobs,
)
from ..params import SamplingParams
from .stop_strings import StopMatcher
from .token_gaps import TokenGaps

NOT_PLAIN = 1 << 63  # trait: the text depends on what stands before
ANY = 1 << 62  # trait of every token; the lower bits are classes of characters in its text
ROWS_AT_ONCE = 64  # slow rows between two turns of the event loop: a few hundred microseconds

log = get_logger("millrace.stages")


class IncrementalDecoder(Protocol):
    """Turns the tokens of one answer into text, never half a character."""

    def push(self, token_id: int) -> str:
        """The text that is certain now."""

    def flush(self) -> str:
        """The rest, at the end of the answer."""

    @property
    def is_idle(self) -> bool:
        """Whether a plain token's text may be taken from the table, with no push."""


class TextTable(Protocol):
    """What each token of a tokenizer's T is by itself. `texts[i]` holds wherever token i stands, if `is_plain[i]`."""

    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def bytes(self) -> Sequence[bytes]: ...  # of a special token: its name
    @property
    def is_plain(self) -> Bools: ...  # [T]


class Detokenize(Stage[StepTokens, StepText]):
    """Gives each new token its text, and ends answers at stop strings.

    Rows that need no more than a look into a table, in steady decoding nearly all, cost a few numpy operations a step:
    for each slot `_cares` says which traits of a token call for a closer look, and `_traits` has those of each token.
    Half characters, log-probabilities, last rows, and tokens in which a stop string of theirs may begin or go on, are
    looked at one by one. A token is known by its place in the answer: one seen before is dropped, so that a step may be
    told twice. What follows a stop string is dropped too, until schedule has heard of it.

    `request_ended` is a call that the exit makes in passing, on the same loop (`exit.on_end`).
    """

    on_crash: ClassVar = Crash.RECOVER
    error_code: ClassVar = "detokenizer_error"

    def __init__(
        self,
        table: TextTable,
        make_decoder: Callable[[SamplingParams], IncrementalDecoder],
        *,
        num_slots: int,
        vocab_size: int,
    ) -> None:
        self._table = table
        self._make_decoder = make_decoder
        self._texts = np.full(vocab_size, "", np.object_)  # [V] a model may know more ids than its tokenizer, or fewer
        self._texts[: len(table.texts)] = table.texts[:vocab_size]
        self._traits = token_traits(self._texts.tolist())  # [V]
        self._traits[: len(table.texts)][~table.is_plain[:vocab_size]] |= NOT_PLAIN
        self._traits[len(table.texts) :] |= NOT_PLAIN
        self._sequence_ids = np.full(num_slots, -1, np.int64)  # [S] who has the slot, -1 nobody
        self._next_places = np.zeros(num_slots, np.intp)  # [S] of the token to come
        self._ones = np.ones(num_slots, np.intp)
        self._cares = np.full(num_slots, ANY, np.uint64)  # [S] traits of tokens that are no matter of a table
        self.gaps = TokenGaps(num_slots)
        self._sequences: dict[int, Answer] = {}  # by id
        self._begun: dict[int, Begun] = {}  # by sequence id, to go out with the next text
        self._is_halfway = False  # in a step, with some of its rows seen
        self._context: Context | None = None

    async def setup(self, context: Context) -> None:
        self._context = context

    async def handle(self, batch: Sequence[StepTokens], out: Outlet[StepText]) -> None:
        for step in batch:
            await self._read(step, out)

    async def recover(self, batch: Sequence[StepTokens], error: BaseException, out: Outlet[StepText]) -> None:
        """Reads the batch again: what was read before is dropped by its place. Between two rows nothing can be saved:
        some have moved on, and their text is lost."""
        if self._is_halfway:
            raise error
        await self.handle(batch, out)

    def request_ended(self, outbox: Outbox[Any], cause: str, error: BaseException | None) -> None:
        """Forgets the sequences of a request that is over."""
        request = outbox.request  # type: ignore[attr-defined]
        for sequence_id in range(request.first_sequence_id, request.first_sequence_id + request.num_sequences):
            self._begun.pop(sequence_id, None)
            self._forget(sequence_id)

    @property
    def num_sequences(self) -> int:
        """Answers that are not over."""
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
            is_fast = (self._traits[step.token_ids] & self._cares[slots]) == 0
            is_fast &= is_ours & (places == next_places) & (step.finishes == 0)
            is_new = is_ours & (places >= next_places)
            self._note_gaps(slots[is_new], places[is_new], now_us)
            columns = (slots, places, step.sequence_ids, step.token_ids)
            rows = self._read_fast(*(column[is_fast] for column in columns))
            await self._read_slow(step, (is_new & ~is_fast).nonzero()[0], rows, out)
        if step.pooled:
            out.send(StepText(step.step, (), (), (), pooled=tuple(step.pooled.values())))
        if rows.texts or step.prompt_logprobs or step.progress:
            out.send(rows.message(step.step, self._begun, step))
            if self._begun:
                self._begun = {}
        self._is_halfway = False

    def _note_gaps(self, slots: Indices, places: Indices, now_us: int) -> None:
        """Of several tokens of one answer the first ends the gap, and the others have none."""
        is_first = np.append(True, slots[1:] != slots[:-1])[: len(slots)]
        self.gaps.step(slots[is_first], places[is_first], now_us)
        self.gaps.histogram.observe(0, len(slots) - int(np.count_nonzero(is_first)))

    def _is_plain(self, step: StepTokens) -> bool:
        """Whether nothing in the step needs a closer look: each row goes on with the next token of a sequence that is
        known here, and its text is in the table."""
        slots = step.slots
        return (
            equal(self._sequence_ids[slots], step.sequence_ids)
            and equal(self._next_places[slots], step.places)
            and is_zero(self._traits[step.token_ids] & self._cares[slots])
            and is_zero(step.finishes)
        )

    def _read_fast(self, slots: Indices, places: Indices, sequence_ids: NDArray[np.int64], token_ids: Indices) -> Rows:
        """Rows whose text is in the table."""
        self._next_places[slots] = places + self._ones[: len(places)]
        return Rows(sequence_ids.tolist(), self._texts[token_ids].tolist(), token_ids.tolist())

    async def _read_slow(self, step: StepTokens, slow: NDArray[np.intp], rows: Rows, out: Outlet[StepText]) -> None:
        assert self._context is not None
        columns = (step.slots, step.sequence_ids, step.places, step.token_ids, step.finishes)
        lists = [column[slow].tolist() for column in columns]
        for count, (row, values) in enumerate(zip(slow.tolist(), zip(*lists, strict=True), strict=True), 1):
            slot, sequence_id, place, token_id, reason = values
            self._read_row(slot, sequence_id, place, token_id, reason, step.logprobs.get(row), rows, out)
            if count % ROWS_AT_ONCE == 0 and count < len(slow):
                await self._context.env.sleep(0)

    def _read_row(
        self,
        slot: int,
        sequence_id: int,
        place: int,
        token_id: int,
        finish_reason: int,
        top: TopLogprobs | None,
        rows: Rows,
        out: Outlet[StepText],
    ) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return  # its request ended while this stage let others run
        try:
            assert place == self._next_places[slot], f"token {place} came when {self._next_places[slot]} was due"
            text, finish, logprobs = sequence.read(token_id, place, finish_reason, top)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # one answer's, a Rust panic included: the other rows go on
            log.error("detokenizer.failed", request_id=sequence.request_id, error=type(error).__name__, exc_info=error)
            self._forget(sequence_id)
            out.fail(sequence.request_id, StageCrashed(self.name, self.error_code, error))
            return
        self._next_places[slot] = place + 1
        self._cares[slot] = sequence.cares
        if finish is not None and sequence.num_preempted:
            finish = replace(finish, num_preempted=sequence.num_preempted)
        rows.add(sequence_id, text, token_id, finish, logprobs)
        if finish is not None:
            self._forget(sequence_id)

    # -- sequences

    def _start(self, started: Started, began_s: float) -> None:
        """`started` has the slot from now on. It may be back after a preemption; then its text goes on where it was."""
        sequence = self._sequences.get(started.sequence_id)
        if sequence is None:
            num_generated = len(started.token_ids) - started.num_prompt
            if num_generated or started.pooling is not None or not self._is_live(started.request_id):
                return  # it has no text; or it has ended here, and schedule did not know that yet
            sequence = Answer(started.request_id, self._table, self._make_decoder(started.params), started.params)
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
        self._cares[started.slot] = sequence.cares

    def _now_us(self) -> int:
        assert self._context is not None
        return int(self._context.env.now() * 1e6)

    def _is_live(self, request_id: str) -> bool:
        assert self._context is not None
        return self._context.is_live(request_id)

    def _empty(self, slot: int) -> None:
        """Whoever has the slot was preempted, or is over."""
        holder = self._sequences.get(int(self._sequence_ids[slot]))
        if holder is not None:
            self._leave_slot(holder)
        self._sequence_ids[slot] = -1

    def _leave_slot(self, sequence: Answer) -> None:
        assert sequence.slot is not None
        sequence.next_place = int(self._next_places[sequence.slot])
        sequence.last_token_us = self.gaps.leave(sequence.slot)
        self._sequence_ids[sequence.slot] = -1
        sequence.slot = None

    def _forget(self, sequence_id: int) -> None:
        """The answer is over. Its beginning, if this was its first token, has yet to go out with the text."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None and sequence.slot is not None:
            self._sequence_ids[sequence.slot] = -1


def token_traits(texts: Sequence[str]) -> NDArray[np.uint64]:
    """For each text the classes of characters in it, one bit each, and the bit ANY. [len(texts)]"""
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    classes = _CHARACTER_CLASS[np.minimum(codes, 128)]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    traits = np.full(len(texts), ANY, np.uint64)
    is_spelled = np.diff(ends, prepend=0) > 0
    if len(codes):
        starts = np.concatenate([[0], ends[:-1]])[is_spelled]
        traits[is_spelled] |= np.bitwise_or.reduceat(np.left_shift(np.uint64(1), classes), starts)
    return traits


def _classes_of(characters: Iterable[str]) -> int:
    """The classes of a few characters, one bit each."""
    bits = 0
    for character in characters:
        bits |= 1 << int(_CHARACTER_CLASS[min(ord(character), 128)])
    return bits


def _character_classes() -> NDArray[np.uint64]:
    """[129] the class of each ASCII character, and of all others: a class each for letters of both cases, for space and
    punctuation, which stop strings like to begin with, and one for the rest."""
    classes = np.full(129, 61, np.uint64)
    for index, character in enumerate(string.punctuation + " \n\t"):
        classes[ord(character)] = index
    for index, (lower, upper) in enumerate(zip(string.ascii_lowercase, string.ascii_uppercase, strict=True), 35):
        classes[[ord(lower), ord(upper)]] = index
    return classes


_CHARACTER_CLASS = _character_classes()


@dataclass(slots=True)
class Rows:
    """A step's text as it is put together."""

    sequence_ids: list[int]
    texts: list[str]
    token_ids: list[int]
    finishes: dict[int, Finish] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    def add(
        self, sequence_id: int, text: str, token_id: int, finish: Finish | None, logprobs: TokenLogprobs | None
    ) -> None:
        row = len(self.texts)
        self.sequence_ids.append(sequence_id)
        self.texts.append(text)
        self.token_ids.append(token_id)
        if finish is not None:
            self.finishes[row] = finish
        if logprobs is not None:
            self.logprobs[row] = logprobs

    def message(self, step: int, begun: dict[int, Begun], told: StepTokens | None = None) -> StepText:
        """With what `told` says besides tokens."""
        return StepText(
            step,
            self.sequence_ids,
            self.texts,
            self.token_ids,
            self.finishes,
            self.logprobs,
            begun,
            prompt_logprobs=() if told is None else told.prompt_logprobs,
            progress=() if told is None else told.progress,
        )


class Answer:
    """One answer on its way to text, a token at a time."""

    __slots__ = (
        "_decoder",
        "_matcher",
        "_params",
        "_table",
        "_usual_cares",
        "last_token_us",
        "next_place",
        "num_preempted",
        "request_id",
        "slot",
    )

    def __init__(self, request_id: str, table: TextTable, decoder: IncrementalDecoder, params: SamplingParams) -> None:
        self.request_id = request_id
        self.slot: int | None = None
        self.next_place = 0  # while it has no slot, as the next
        self.last_token_us = 0  # when it got its last token
        self.num_preempted = 0
        self._table = table
        self._params = params
        self._decoder = decoder
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._usual_cares = ANY if params.logprobs is not None else NOT_PLAIN | _classes_of(s[0] for s in params.stop)

    def fork(self) -> Answer:
        """Another one that has read the same, and goes on by itself."""
        twin = copy.copy(self)
        twin._decoder, twin._matcher = copy.deepcopy((self._decoder, self._matcher))
        return twin

    @property
    def cares(self) -> int:
        """Traits of the next token that make its text another than the table's, or something else wanted of it."""
        is_idle = self._decoder.is_idle and (self._matcher is None or self._matcher.is_idle)
        return self._usual_cares if is_idle else ANY

    def read(
        self, token_id: int, place: int, finish_reason: int, top: TopLogprobs | None
    ) -> tuple[str, Finish | None, TokenLogprobs | None]:
        """The text that may go out now, how the answer ended if it did, and the token's log-probabilities if wanted."""
        params = self._params
        if params.max_tokens == 0 and finish_reason != FinishReason.ERROR:
            return "", Finish(FinishReason.LENGTH), None
        is_ended = finish_reason != FinishReason.NONE
        is_shown = finish_reason == FinishReason.NONE or finish_reason == FinishReason.LENGTH
        is_shown |= finish_reason == FinishReason.STOP and params.include_stop_str_in_output
        text = self._decoder.push(token_id) if is_shown else ""
        if is_ended:
            text += self._decoder.flush()
        logprobs = None if top is None else self._logprobs(token_id, text, top)
        matched = None
        if self._matcher is not None and place >= params.min_tokens:
            text, matched = self._matcher.push(text)
            if is_ended and matched is None:
                text += self._matcher.flush()
        if matched is not None:
            return text, Finish(FinishReason.STOP, matched), logprobs
        if not is_ended:
            return text, None, logprobs
        is_stop_id = finish_reason == FinishReason.STOP and token_id in params.stop_token_ids
        return text, Finish(FinishReason(finish_reason), token_id if is_stop_id else None), logprobs

    def _logprobs(self, token_id: int, text: str, top: TopLogprobs) -> TokenLogprobs:
        """The token's text is what it added to the answer, so that tokens joined are the answer."""
        alternatives = tuple(
            (other, text if other == token_id else self._name(other), self._bytes(other), logprob)
            for other, logprob in zip(top.token_ids, top.logprobs, strict=True)
        )
        return TokenLogprobs(token_id, text, self._bytes(token_id), top.chosen, top.rank, alternatives)

    def _name(self, token_id: int) -> str:
        return self._bytes(token_id).decode("utf-8", "replace")

    def _bytes(self, token_id: int) -> bytes:
        return self._table.bytes[token_id] if token_id < len(self._table.bytes) else b""
