"""Grammar masks: the tokens that each sequence with a grammar may choose next.

Used by the sampler on the device thread. The work is done on two side threads while the device runs: one starts
answers, the other consumes each step's tokens and computes the next masks. So a slow start delays no step. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.workers.side_thread import Pending
from ..messages import Bools, Indices, Ints, Started
from ..structured_outputs import StructuredOutputs, ThinkingSection
from .compiled import Grammars

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from ...model.text.thoughts import ThoughtScan

NUM_THREADS = 2  # that compute a step's masks, if there are `MANY`
MANY = 64  # masks; fewer are computed faster than other threads wake up: 4 us each for a simple schema

Longs = NDArray[np.int64]

log = get_logger("millrace.stages")


class AllowedTokens(NamedTuple):
    """The tokens allowed next for n rows of a step."""

    rows: Indices  # [n] ascending
    masks: Ints  # [S, W] a bit for each token, the lowest of a word first; EOS where the answer may end
    mask_rows: Indices  # [n] row of `masks` for each of `rows`

    @property
    def taken(self) -> Ints:
        """[n, W] the mask of each row."""
        taken: Ints = self.masks[self.mask_rows]
        return taken

    def mask_of_each(self, num_rows: int) -> Longs:
        """[num_rows] index into `masks` for each row of the step; -1 where all tokens are allowed."""
        mask_of = np.full(num_rows, -1, np.int64)
        mask_of[self.rows] = self.mask_rows
        return mask_of


@dataclass(frozen=True, slots=True, eq=False)
class GrammarState:
    """The grammar state of one sequence."""

    structured: StructuredOutputs
    matcher: LLMatcher
    goes_on: bool  # `ignore_eos`: it ends only if nothing else is allowed, so its masks have no EOS
    mask: Ints  # [W] the first mask, or the next one after a preemption
    scan: ThoughtScan | None = None  # None: the format has no thoughts before


class GrammarMasks:
    """The tokens that each slot's grammar allows next.

    `prepare` is called on the event loop, when a grant starts a sequence. All other methods are called in the order of
    steps: `read` the masks of a step, which waits until they are ready, then `advance` by the chosen tokens, before the
    next `read` of any of these slots. They run on the device thread; with an asynchronous device, `advance` and `drop`
    may run on its completion thread. The generated tokens of a sequence that resumes after a preemption are replayed.
    """

    def __init__(self, grammars: Grammars, num_slots: int, env: Env) -> None:
        self.grammars = grammars
        self._begin_thread = env.side_thread("grammar-begin")
        self._step_thread = env.side_thread("grammar-step")
        self._beginning: dict[int, Pending[GrammarState | None]] = {}  # by slot
        self._answers: list[GrammarState | None] = [None] * num_slots
        self._masks = np.zeros((num_slots, 0), np.int32)  # [S, W], once a grammar has come
        self._has_failed = np.zeros(num_slots, np.bool_)  # [S] it cannot go on, and its mask is empty
        self._step: Pending[None] | None = None
        self._now_ns = env.now_ns
        self.waited_us = 0  # time that the last `read` waited for masks
        self._executor: LLExecutor | None = None

    def prepare(self, started: Started) -> None:
        """Assigns a slot to a sequence. Its first mask is computed while its prompt runs."""
        if started.params.structured_outputs is not None:
            self._beginning[started.slot] = self._begin_thread.submit_or_run(self._begin, started)
        else:
            self._beginning.pop(started.slot, None)

    def read(self, rows: Indices, slots: Indices) -> AllowedTokens:
        """The masks of `rows`, those of a step's `slots` with a grammar.

        Waits for them; valid until `advance`.
        """
        began_ns = self._now_ns()
        guided = slots[rows]
        self._await_masks(guided)
        self.waited_us = (self._now_ns() - began_ns) // 1000
        return AllowedTokens(rows, self._masks, guided)

    def over(self, allowed: AllowedTokens, token_ids: Longs, is_broken: Bools) -> Indices:
        """The rows that can only end here: their masks allow end tokens or nothing.

        They are found by the step's chosen tokens.
        """
        chosen = token_ids[allowed.rows]
        some = np.flatnonzero(self.grammars.compiler.is_end[chosen] | is_broken[allowed.rows])
        if not len(some):
            return some
        return allowed.rows[some[self.is_ending(allowed.mask_rows[some])]]

    def is_ending(self, slots: Indices) -> Bools:
        """[n] whether the masks of `slots` allow end tokens or nothing, because the answer is complete."""
        ends = self.grammars.compiler.ends
        is_ending = np.array([np.count_nonzero(self._masks[slot]) <= len(ends) for slot in slots.tolist()], np.bool_)
        few = np.flatnonzero(is_ending)
        if len(few):
            masks: Ints = self._masks[slots[few]]
            for word, bits in ends:
                masks[:, word] &= ~bits
            is_ending[few] = ~np.any(masks, axis=1) & ~self._has_failed[slots[few]]
        return is_ending

    def advance(self, slots: Indices, token_ids: Indices) -> None:
        """Slot `slots[i]` got `token_ids[i]`: starts computing the next masks.

        Each slot was read before.
        """
        pairs = zip(slots.tolist(), token_ids.tolist(), strict=True)
        rows = [(answer, slot, token) for slot, token in pairs if (answer := self._answers[slot]) is not None]
        if rows:
            self._step = self._step_thread.submit_or_run(self._advance, rows)

    def drop(self, slots: Indices) -> None:
        """Discards the state of `slots`, whose sequences have ended."""
        for slot in slots.tolist():
            self._answers[slot] = None

    def _await_masks(self, slots: Indices) -> None:
        """Waits for the masks of `slots`, and stores the first masks of new sequences.

        NOTE: not earlier: until now, the side thread may have written the row for the slot's previous sequence.
        """
        step, self._step = self._step, None
        if step is not None:
            step.result()
        if not self._beginning:
            return
        for slot in slots.tolist():
            begun = self._beginning.pop(slot, None)
            if begun is not None:
                self._place(slot, begun.result())

    def _place(self, slot: int, answer: GrammarState | None) -> None:
        self._answers[slot] = answer
        num_words = self.grammars.compiler.num_words
        if self._masks.shape[1] != num_words:
            self._masks = np.zeros((len(self._answers), num_words), np.int32)
        self._masks[slot] = 0 if answer is None else answer.mask
        self._has_failed[slot] = answer is None or answer.matcher.is_error()

    # -- on the side threads

    def _begin(self, started: Started) -> GrammarState | None:
        """The state of a new answer; None if the grammar does not allow its tokens so far."""
        from ...model.text.grammar import GrammarError

        structured = started.params.structured_outputs
        assert structured is not None
        compiler = self.grammars.compiler
        try:
            matcher = self.grammars.begin(structured)
        except GrammarError as error:  # a grammar that did not pass the gate
            log.warning("grammar.failed", request_id=started.request_id, error=str(error))
            return None
        generated = started.token_ids[started.num_prompt :].tolist()
        if matcher.try_consume_tokens(generated) != len(generated):
            self._note_failure(structured, matcher)
            return None
        scan = None if structured.after is None else self._scan(structured.after, generated)
        mask, goes_on = compiler.mask(matcher), started.params.ignore_eos
        if goes_on:
            for word, bits in compiler.ends:
                mask[word] &= ~bits
        return GrammarState(structured, matcher, goes_on, mask, scan)

    def _scan(self, section: ThinkingSection, generated: list[int]) -> ThoughtScan:
        """A scan of an answer with thoughts. Makes their mask here, as it takes tens of milliseconds once."""
        from ...model.text.thoughts import ThoughtScan

        scan = ThoughtScan(section)
        self.grammars.compiler.thought_mask(section)
        for token_id in generated:
            scan.add(self._bytes_of(token_id))
        return scan

    def _advance(self, rows: list[tuple[GrammarState, int, int]]) -> None:
        others = [row for row in rows if row[0].scan is None or not self._think(*row)]
        if len(others) < MANY:
            self._make_masks(others)
        else:
            self._make_many_masks(others)
        going_on = [slot for answer, slot, _ in rows if answer.goes_on]
        if going_on:
            for word, bits in self.grammars.compiler.ends:
                self._masks[going_on, word] &= ~bits
        for answer, slot, _ in rows:
            if answer.matcher.is_error():
                self._masks[slot], self._has_failed[slot] = 0, True
                self._note_failure(answer.structured, answer.matcher)

    def _think(self, answer: GrammarState, slot: int, token: int) -> bool:
        """Takes a token of an answer that is in its thoughts; returns whether it still is."""
        scan, section = answer.scan, answer.structured.after
        assert scan is not None and section is not None
        scan.add(self._bytes_of(token))
        if scan.is_free and answer.matcher.consume_token(token):
            self._masks[slot] = self.grammars.compiler.thought_mask(section)
        return scan.is_free

    def _bytes_of(self, token: int) -> bytes:
        tokens = self.grammars.vocabulary.tokens
        return tokens[token] if token < len(tokens) else b""

    def _make_masks(self, rows: list[tuple[GrammarState, int, int]]) -> None:
        start, row_bytes = self._masks.ctypes.data, self._masks.strides[0]
        for answer, slot, token in rows:
            if answer.matcher.consume_token(token):
                answer.matcher.unsafe_compute_mask_ptr(start + slot * row_bytes, row_bytes)

    def _make_many_masks(self, rows: list[tuple[GrammarState, int, int]]) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(NUM_THREADS)
        self._executor.consume_token_par([(answer.matcher, token) for answer, _, token in rows])
        well = [(answer.matcher, slot) for answer, slot, _ in rows if not answer.matcher.is_error()]
        if well:
            row_bytes = self._masks.strides[0]
            self._executor.unsafe_compute_mask_ptr(well, self._masks.ctypes.data, row_bytes, len(self._masks))

    def _note_failure(self, structured: StructuredOutputs, matcher: LLMatcher) -> None:
        """Logs that a matcher failed, and marks its grammar as worn.

        Most likely the state shared by all answers of the grammar reached a limit.
        """
        log.warning("grammar.failed", kind=structured.kind, error=matcher.get_error()[:200])
        self.grammars.wear_out(structured)
