"""The scripted device: no model, predictable answers, and checks for misplaced tokens.

It keeps a "cache" of token ids where a real device keeps keys and values. It writes each token to the place in the
block tables, reads each sequence's whole history back through them, and derives the next token from what it read. So a
block that is reused too early, a missing or repeated token, or a wrong order changes the answer. `Script.expected`
gives the right answer. Needs numpy only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....runtime.env.env import Env
from ...device.device import SAMPLE, Device
from ...device.scored_prompts import ScoredChunk, ScoredPrompts
from ...messages import (
    NO_INTS,
    Begun,
    BlockCopy,
    Direction,
    FinishReason,
    Indices,
    Ints,
    Pooled,
    PromptLogprobs,
    Started,
    StepGrant,
    StepTokens,
    TopLogprobs,
)
from ...params import SamplingParams
from ...sample.draft_acceptance import DraftRuns
from .byte_tokenizer import EOS, VOCAB_SIZE
from .grant_checker import GrantChecker
from .script import ALPHABET, WORD, Hashes, Script, hash_rows, powers, seed_of

LONG = 1 << 16  # added in the cache to the token ids of long sequences, see `Script.short_length`
EMPTY = -1  # a place of the cache that was never written
POISON = -2  # a place that a step in flight may write


class ScriptedModel:
    """The runner and sampler of a scripted device.

    Their methods run on the same threads as those of a real one. Errors that a real device would not notice are
    collected in `violations`, one sentence each. `env` has the fault points `device.out_of_memory`, `device.copy` and
    `device.nan_row`. A forward pass takes `step_s` of real time on the device thread.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        script: Script | None = None,
        env: Env | None = None,
        step_s: float = 0.0,
        num_host_blocks: int = 0,
        num_lanes: int = 1,
    ) -> None:
        self.step_s = step_s
        self.script = script or Script()
        self.block_size = block_size
        self.violations: list[str] = []
        self.num_steps = 0
        self.num_copied = 0  # blocks, to the host or back
        self.num_forked = 0  # blocks copied on the device
        self.max_batched_tokens = 0  # of any step
        self._env = env
        blocks_per_slot = -(-max_model_len // block_size)
        self._factors = powers(blocks_per_slot * block_size)
        self._cache = np.full((num_blocks, block_size), EMPTY, np.int32)  # [N, B] token ids
        self._copied: dict[int, Ints] = {}  # step -> new blocks of it whose old contents it copies out
        self._host = np.full((num_host_blocks, block_size), EMPTY, np.int32)  # [H, B] token ids
        self._tables = np.zeros((num_slots, blocks_per_slot), np.int32)
        self._grant_checker = GrantChecker(
            num_blocks, num_host_blocks, block_size, num_slots, blocks_per_slot, self.violations, num_lanes
        )
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._known: list[Ints] = [np.zeros(0, np.int32)] * num_slots
        self._written: list[Sequence[int]] = [()] * num_slots  # the answer, if it is scripted
        self._scored = ScoredPrompts(num_slots)
        self._num_known = np.zeros(num_slots, np.int32)
        self._num_prompt = np.zeros(num_slots, np.int32)
        self._num_tokens = np.zeros(num_slots, np.int32)  # known and sampled
        self._last_tokens = np.zeros(num_slots, np.int32)
        self._contexts = np.zeros(num_slots, np.uint64)  # expected hash of all tokens
        self._sequence_ids = np.full(num_slots, -1, np.int64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._max_tokens = np.zeros(num_slots, np.int32)
        self._min_tokens = np.zeros(num_slots, np.int32)
        self._ignores_eos = np.zeros(num_slots, np.bool_)
        self._has_extras = np.zeros(num_slots, np.bool_)  # stop ids, or logprobs requested
        self._is_finished = np.zeros(num_slots, np.bool_)
        self._started: list[Started | None] = [None] * num_slots
        self._is_pooled = np.zeros(num_slots, np.bool_)
        self._num_seen = np.zeros(num_slots, np.int32)  # tokens computed here since the sequence started
        self._key_offset = np.zeros(num_slots, np.int32)  # LONG for long sequences

    # -- a step

    def announce(self, grant: StepGrant) -> None:
        """A grant was issued: until `complete`, its new blocks may be written at any time.

        On the event loop.
        """
        new, new_on_host = self._grant_checker.announce(grant)
        if grant.copies:  # blocks that are copied out first are poisoned after that
            self._copied[grant.step] = np.intersect1d(new, _copied_out(grant))
            new = np.setdiff1d(new, self._copied[grant.step])
        self._cache[new] = POISON
        self._host[new_on_host] = POISON

    def complete(self, grant: StepGrant) -> None:
        """The device has finished the step, or will never run it."""
        self._grant_checker.complete(grant.step)
        self._copied.pop(grant.step, None)

    def forward(self, grant: StepGrant) -> Hashes:
        """[L] hashes of the cache's contents for each sampled row, in their order."""
        for started in grant.started:
            self._start(started)
        self._tables[grant.table_slots, grant.table_places] = grant.table_blocks
        if self.is_fault("device.out_of_memory"):
            raise MemoryError("the scripted device is out of memory")
        for copy in grant.copies:
            self._copy(copy)
            if copy.direction is Direction.OUT:
                copied = self._copied[grant.step]
                self._cache[copied[np.isin(copied, copy.sources)]] = POISON
        if self.step_s:
            time.sleep(self.step_s)
        self._write(grant)
        self.num_steps += 1
        return self._read_back(grant)

    def is_fault(self, name: str) -> bool:
        """Whether the fault point strikes now."""
        return self._env is not None and self._env.fault(name)

    def _start(self, started: Started) -> None:
        slot, params = started.slot, started.params
        self._scored.start(started)
        token_ids, num_prompt = started.token_ids, started.num_prompt
        assert params.max_tokens is not None, "max_tokens is a number once the request is tokenized"
        seed = seed_of(params, started.seed)
        self._params[slot], self._known[slot] = params, token_ids
        if self.script.answer is not None:
            self._written[slot] = [*self.script.answer(token_ids[:num_prompt].tolist(), seed), EOS]
        self._num_known[slot] = self._num_tokens[slot] = len(token_ids)
        self._num_prompt[slot] = num_prompt
        self._contexts[slot] = hash_rows(token_ids[None], np.array([len(token_ids)]), self._factors)[0]
        self._sequence_ids[slot] = started.sequence_id
        self._seeds[slot] = seed
        self._max_tokens[slot], self._min_tokens[slot] = params.max_tokens, params.min_tokens
        self._ignores_eos[slot] = params.ignore_eos
        self._has_extras[slot] = bool(params.stop_token_ids) or params.logprobs is not None
        self._is_finished[slot] = False
        self._started[slot], self._is_pooled[slot] = started, started.pooling is not None
        self._num_seen[slot] = 0
        self._key_offset[slot] = LONG * started.is_long

    def _copy(self, copy: BlockCopy) -> None:
        source = self._host if copy.direction is Direction.IN else self._cache
        destination = self._host if copy.direction is Direction.OUT else self._cache
        if self.is_fault("device.copy"):
            half = len(copy.sources) // 2
            destination[copy.destinations[:half]] = source[copy.sources[:half]]
            raise MemoryError("the scripted device stopped in the middle of a copy")
        destination[copy.destinations] = source[copy.sources]
        if copy.direction is Direction.FORK:
            self.num_forked += len(copy.sources)
        else:
            self.num_copied += len(copy.sources)

    def _write(self, grant: StepGrant) -> None:
        slots = np.repeat(grant.slots, grant.num_tokens)
        ends = np.cumsum(grant.num_tokens)
        within = np.arange(len(slots), dtype=np.int32) - np.repeat(ends - grant.num_tokens, grant.num_tokens)
        positions = np.repeat(grant.starts, grant.num_tokens) + within
        tokens = self._last_tokens[slots]
        for row in (grant.starts < self._num_known[grant.slots]).nonzero()[0].tolist():
            start, count, end = int(grant.starts[row]), int(grant.num_tokens[row]), int(ends[row])
            known = self._known[grant.slots[row]][start : start + count]
            tokens[end - count : end - count + len(known)] = known
        if grant.drafts is not None:
            places = [np.arange(end - count, end) for end, count in zip(ends, grant.drafts.counts, strict=True)]
            tokens[np.concatenate(places)] = grant.drafts.token_ids
        if self.script.short_length:
            tokens = tokens + self._key_offset[slots]
            self._check_lengths(grant)
        self._cache[self._tables[slots, positions // self.block_size], positions % self.block_size] = tokens
        self._num_seen[grant.slots] += grant.num_tokens
        self.max_batched_tokens = max(self.max_batched_tokens, len(slots))

    def _check_lengths(self, grant: StepGrant) -> None:
        """Checks that no short sequence has more tokens than a short one may have."""
        ends = grant.starts + grant.num_tokens
        is_wrong = (self._key_offset[grant.slots] == 0) & (ends > self.script.short_length)
        for slot, end in zip(grant.slots[is_wrong].tolist(), ends[is_wrong].tolist(), strict=True):
            self.violations.append(f"step {grant.step} computes {end} tokens of slot {slot} as of a short sequence")

    def _read_back(self, grant: StepGrant) -> Hashes:
        rows, runs = grant.is_sampled, DraftRuns.of(grant)
        slots, lengths = grant.logits_slots, grant.starts[rows] + grant.num_certain[rows]
        if not len(slots):
            return np.zeros(0, np.uint64)
        if runs is not None:
            assert grant.drafts is not None
            lengths = np.repeat(lengths, 1 + grant.drafts.counts[rows]) + runs.offsets
        width = -(-int(lengths.max()) // self.block_size)
        history = self._cache[self._tables[slots, :width]].reshape(len(slots), -1)
        if self.script.short_length:
            history = history - self._key_offset[slots, None]
        return hash_rows(history, lengths, self._factors)

    def prepare(self, started: Sequence[Started]) -> None:
        """Does nothing: a script needs no preparation, and ignores grammars."""

    def sample(self, grant: StepGrant, logits: Hashes) -> StepTokens:
        """One token for each live sampled row, and one more for each accepted draft.

        Rows whose sequence has ended are left out.
        """
        slots, runs = grant.logits_slots, DraftRuns.of(grant)
        firsts = np.arange(len(slots)) if runs is None else (runs.offsets == 0).nonzero()[0]
        self._check_contents(grant, logits, firsts)
        is_alive = ~self._is_finished[slots]
        pooled = self._pool(grant, slots, logits) if self._is_pooled.any() else {}
        alive = (is_alive & ~self._is_pooled[slots]).nonzero()[0]
        slots, contexts = slots[alive], logits[alive]
        places = (self._num_tokens[slots] - self._num_prompt[slots]).astype(np.intp)
        if runs is not None:
            runs = runs.take(alive)
            places += runs.offsets
        tokens = self._choose(slots, places, contexts)
        finishes = self._finishes(slots, places, tokens)
        if runs is not None:
            kept = runs.that_count(tokens)
            kept = kept[runs.up_to_the_end(kept, finishes[kept])]
            slots, places, tokens, finishes = slots[kept], places[kept], tokens[kept], finishes[kept]
            self._check_drafted(grant, slots, places, tokens, contexts[kept])
        self._last_tokens[slots] = tokens  # of several the last
        np.add.at(self._contexts, slots, self._terms(slots, places, tokens))
        np.add.at(self._num_tokens, slots, 1)
        self._is_finished[slots] = finishes != FinishReason.NONE
        return StepTokens(
            step=grant.step,
            slots=slots,
            sequence_ids=self._sequence_ids[slots],
            places=places,
            token_ids=tokens,
            finishes=finishes,
            started=grant.started,
            logprobs=self._logprobs(slots, tokens),
            prompt_logprobs=[_scores(run) for run in self._scored.runs(grant)],
            pooled=pooled,
        )

    def _pool(self, grant: StepGrant, slots: Indices, contexts: Hashes) -> dict[int, Pooled]:
        """The results of the pooled sequences among `slots` [L]."""
        pooled = {}
        for slot, context in zip(slots.tolist(), contexts.tolist(), strict=True):
            started = self._started[slot]
            if started is None or started.pooling is None or self._is_finished[slot]:
                continue
            if started.pooling.needs_every_position and self._num_seen[slot] != started.num_prompt:
                self.violations.append(
                    f"step {grant.step} pools sequence {started.sequence_id}, with {started.num_prompt} prompt tokens, "
                    f"of which {self._num_seen[slot]} were computed"
                )
            vector = started.pooling.finish(self.script.vector(context))
            pooled[slot] = Pooled(started.sequence_id, vector, Begun(started.token_ids, started.num_cached))
            self._is_finished[slot] = True
        return pooled

    def _check_contents(self, grant: StepGrant, contexts: Hashes, rows: Indices) -> None:
        """Checks that `rows` of the logits were read from the right history.

        The step must also have left it unchanged.
        """
        slots = grant.logits_slots[rows]
        is_ours = ~self._is_finished[slots]
        after = self._read_back(grant)
        for found, when in ((contexts[rows], "read"), (after[rows], "left")):
            for row in (is_ours & (found != self._contexts[slots])).nonzero()[0].tolist():
                self.violations.append(
                    f"step {grant.step} {when} another history of sequence {self._sequence_ids[slots[row]]} "
                    f"(slot {slots[row]}) than was written"
                )

    def _check_drafted(
        self, grant: StepGrant, slots: Indices, places: Indices, tokens: Indices, contexts: Hashes
    ) -> None:
        """Checks that each accepted token was chosen by its sequence's history.

        The history includes earlier tokens of the step.
        """
        expected, terms = self._contexts.tolist(), self._terms(slots, places, tokens).tolist()
        for row, slot in enumerate(slots.tolist()):
            if contexts[row] != expected[slot]:
                self.violations.append(f"step {grant.step} chose token {places[row]} of slot {slot} by another text")
            expected[slot] = (expected[slot] + terms[row]) & WORD

    def _terms(self, slots: Indices, places: Indices, tokens: Indices) -> Hashes:
        """The terms that answer tokens add to the hashes of their sequences."""
        with np.errstate(over="ignore"):
            factors = self._factors[np.minimum(self._num_prompt[slots] + places, len(self._factors) - 1)]
            terms: Hashes = (tokens + 3).astype(np.uint64) * factors
            return terms

    def _choose(self, slots: Indices, places: Indices, contexts: Hashes) -> Indices:
        if self.script.answer is not None:
            written = (self._written[slot] for slot in slots.tolist())
            return np.array([w[min(p, len(w) - 1)] for w, p in zip(written, places.tolist(), strict=True)], np.intp)
        may_end = ~self._ignores_eos[slots] & (places >= self._min_tokens[slots])
        return self.script.next_tokens(contexts, self._seeds[slots], places, may_end).astype(np.intp)

    def _finishes(self, slots: Indices, places: Indices, tokens: Indices) -> NDArray[np.int8]:
        """By `finish_of` in `kernels/layout/finish_rule.py`."""
        may_end = places >= self._min_tokens[slots]
        finishes = np.where(places + 1 >= self._max_tokens[slots], FinishReason.LENGTH, FinishReason.NONE)
        finishes[(tokens == EOS) & may_end & ~self._ignores_eos[slots]] = FinishReason.STOP
        for row in (self._has_extras[slots] & may_end).nonzero()[0].tolist():
            params = self._params[slots[row]]
            if params is not None and int(tokens[row]) in params.stop_token_ids:
                finishes[row] = FinishReason.STOP
        if len(slots) and self.is_fault("device.nan_row"):
            finishes[0] = FinishReason.ERROR
        return finishes.astype(np.int8)

    def _logprobs(self, slots: Indices, tokens: Indices) -> dict[int, TopLogprobs]:
        """Invented log-probabilities: the chosen token is the likeliest, the first letters follow."""
        found = {}
        for row in self._has_extras[slots].nonzero()[0].tolist():
            params = self._params[slots[row]]
            if params is not None and params.logprobs is not None:
                others = [letter for letter in dict.fromkeys(ALPHABET) if letter != tokens[row]]
                ids = (int(tokens[row]), *others)[: params.logprobs]
                found[row] = TopLogprobs(-0.5, 1, ids, tuple(-0.5 - rank for rank in range(len(ids))))
        return found


def _scores(run: ScoredChunk) -> PromptLogprobs:
    """Invented prompt scores: -(token % 64) / 8 at even positions, less 1/16 at odd ones."""
    scores = run.empty(VOCAB_SIZE)
    at = np.arange(run.start, run.start + len(run))
    scores.logprobs[:] = -(run.token_ids % 64) / 8 - (at % 2) / 16
    scores.ranks[:] = 1
    for rank in range(scores.top_ids.shape[1]):
        scores.top_ids[:, rank] = (run.token_ids + rank) % VOCAB_SIZE
        scores.top_logprobs[:, rank] = scores.logprobs - rank
    return scores


def _copied_out(grant: StepGrant) -> Ints:
    sources = [copy.sources for copy in grant.copies if copy.direction is Direction.OUT]
    return np.concatenate([NO_INTS, *sources])


class ScriptedDevice(Device):
    """A `Device` that also reports to its scripted model when a grant is issued and ends."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, grant: StepGrant, forward: Callable[[StepGrant], Any]) -> Any:
        self.model.announce(grant)
        return super().forward(grant, forward)

    def _run_forward(self, grant: StepGrant, forward: Callable[[StepGrant], Any]) -> Any:
        try:
            return super()._run_forward(grant, forward)
        finally:
            if self._num_phases <= SAMPLE:  # a pipeline that ends at the logits
                self.model.complete(grant)

    def _run_sample(self, grant: StepGrant, sample: Callable[[StepGrant, Any], Any]) -> Any:
        try:
            return super()._run_sample(grant, sample)
        finally:
            self.model.complete(grant)
