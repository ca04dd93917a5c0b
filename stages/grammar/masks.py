"""What running sequences with a grammar may say next: a matcher and a mask of tokens for each slot.

Lives beside the sampler on the device thread, and has its work done on two threads of its own while the device runs:
one begins answers, one takes each step's tokens and makes the next masks, so a long beginning holds no step up. Plain
numpy; refuses to know tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...runtime.env import Env
from ...runtime.log import get_logger
from ...runtime.side_thread import Pending
from ..messages import Bools, Indices, Ints, Started
from .grammars import Grammars
from .structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

NUM_THREADS = 2  # that a step's masks are made on, for batches of more than a few

log = get_logger("millrace.stages")


class Allowed(NamedTuple):
    """What n rows may say next."""

    masks: Ints  # [n, W] a bit for each token, the lowest of a word first; EOS where the answer may end
    is_over: Bools  # [n] it can only end here
    has_failed: Bools  # [n] it can not go on, and is not complete


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One sequence's way through its grammar."""

    structured: StructuredOutputs
    matcher: LLMatcher
    mask: Ints  # [W] what may come first, or next after a preemption


class GrammarMasks:
    """For each slot the tokens that its grammar allows next.

    `prepare` is called on the loop, when a grant begins a sequence; all else on the device thread, in the order of the
    steps: `read` what a step may choose from, which waits for masks that are not ready, then `advance` by what it
    chose. A sequence that comes back from a preemption has its generated tokens replayed.
    """

    def __init__(self, grammars: Grammars, num_slots: int, env: Env) -> None:
        self.grammars = grammars
        self._begin_thread = env.side_thread("grammar-begin")
        self._step_thread = env.side_thread("grammar-step")
        self._beginning: dict[int, Pending[Answer | None]] = {}  # by slot
        self._answers: list[Answer | None] = [None] * num_slots
        self._masks = np.zeros((num_slots, 0), np.int32)  # [S, W], once a grammar has come
        self._step: Pending[None] | None = None
        self._now_ns = env.now_ns
        self.waited_us = 0  # by the last `read`, for masks that were not ready
        self._executor: LLExecutor | None = None

    def prepare(self, started: Started) -> None:
        """A sequence takes a slot; its first mask is made while its prompt runs."""
        if started.params.structured_outputs is not None:
            self._beginning[started.slot] = self._begin_thread.submit(self._begin, started)
        else:
            self._beginning.pop(started.slot, None)

    def read(self, slots: Indices) -> Allowed:
        """For `slots` [n], whose sequences have a grammar and go on."""
        began_ns = self._now_ns()
        self._settle(slots)
        self.waited_us = (self._now_ns() - began_ns) // 1000
        masks = self._masks[slots]
        bits = masks.view(np.uint32)
        is_open: Bools = np.any(bits & ~self.grammars.compiler.eos_words, axis=1)
        may_end: Bools = np.any(bits, axis=1)
        return Allowed(masks, ~is_open & may_end, ~is_open & ~may_end)

    def forbid_end(self, allowed: Allowed, rows: Indices) -> None:
        """None of these rows may end."""
        allowed.masks[rows] &= ~self.grammars.compiler.eos_words.view(np.int32)

    def advance(self, slots: Indices, token_ids: Indices) -> None:
        """`slots[i]` got `token_ids[i]`: the next masks are made from now on. Each of them was read before."""
        pairs = zip(slots.tolist(), token_ids.tolist(), strict=True)
        rows = [(answer, slot, token) for slot, token in pairs if (answer := self._answers[slot]) is not None]
        if rows:
            self._step = self._step_thread.submit(self._advance, rows)

    def drop(self, slots: Indices) -> None:
        """The sequences in `slots` have ended."""
        for slot in slots.tolist():
            self._answers[slot] = None

    def _settle(self, slots: Indices) -> None:
        """Waits for the masks of `slots`. Only here does what was begun get its row: until now, the row may have been
        written for the slot's last holder."""
        step, self._step = self._step, None
        if step is not None:
            step.result()
        if not self._beginning:
            return
        for slot in slots.tolist():
            begun = self._beginning.pop(slot, None)
            if begun is not None:
                self._place(slot, begun.result())

    def _place(self, slot: int, answer: Answer | None) -> None:
        self._answers[slot] = answer
        num_words = self.grammars.compiler.num_words
        if self._masks.shape[1] != num_words:
            self._masks = np.zeros((len(self._answers), num_words), np.int32)
        self._masks[slot] = 0 if answer is None else answer.mask

    # -- on the side threads

    def _begin(self, started: Started) -> Answer | None:
        """None if the grammar can not be followed this far."""
        from ...model.grammar import GrammarError

        structured = started.params.structured_outputs
        assert structured is not None
        compiler = self.grammars.compiler
        try:
            matcher = self.grammars.begin(structured)
        except GrammarError as error:  # it came past the gate
            log.warning("grammar.failed", request_id=started.request_id, error=str(error))
            return None
        generated = started.token_ids[started.num_prompt :].tolist()
        if matcher.try_consume_tokens(generated) != len(generated):
            self._note_failure(structured, matcher)
            return None
        return Answer(structured, matcher, compiler.mask(matcher))

    def _advance(self, rows: list[tuple[Answer, int, int]]) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(NUM_THREADS)
        self._executor.consume_token_par([(answer.matcher, token) for answer, _, token in rows])
        well = [(answer.matcher, slot) for answer, slot, _ in rows if not answer.matcher.is_error()]
        if well:
            row_bytes = self._masks.shape[1] * 4
            self._executor.unsafe_compute_mask_ptr(well, self._masks.ctypes.data, row_bytes, len(self._masks))
        for answer, slot, _ in rows:
            if answer.matcher.is_error():
                self._masks[slot] = 0
                self._note_failure(answer.structured, answer.matcher)

    def _note_failure(self, structured: StructuredOutputs, matcher: LLMatcher) -> None:
        """It came to a limit, most likely of what all answers of this grammar have found out together."""
        log.warning("grammar.failed", kind=structured.kind, error=matcher.get_error()[:200])
        self.grammars.wear_out(structured)
