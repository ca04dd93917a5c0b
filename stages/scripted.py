"""A device without a model: its answers are known beforehand, and it notices every misplaced token.

The scripted device keeps a "cache" of token ids where a real one keeps keys and values. It writes each token where the
block tables say, reads each sequence's whole history back through them, and makes the next token of what it read. So a
block that is reused too early, a token that is missing or computed twice, or an order that is wrong changes the answer,
and `Script.answer` says what the answer should have been. Needs numpy only.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.env import Env
from .device import SAMPLE, Device
from .messages import (
    NO_INTS,
    Begun,
    BlockCopy,
    Bools,
    ChatPrompt,
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
from .params import SamplingParams
from .pooling import Floats, PoolingParams
from .prompt_runs import PromptRun, ScoredPrompts
from .runs import Runs
from .sequences import choice_seed

Hashes = NDArray[np.uint64]

ALPHABET = b"etaoin shrdlucmfwypvbgkjqxz.,\xc3\xa9e"  # 32 bytes: hashed answers are spelled with these
EOS = 256
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")  # ids from 256
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EMBEDDING_SIZE = 8
EMPTY = -1  # a place of the cache that nobody has written
POISON = -2  # a place that somebody else may be writing

_WORD = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LETTERS = np.frombuffer(ALPHABET, np.uint8).astype(np.int32)


# -- answers


@dataclass(frozen=True)
class Script:
    """What a scripted device answers.

    By default the next token is a keyed hash of all tokens before it (of the seed too, unless greedy): a letter or,
    with `eos_probability`, EOS. With `answer`, a function from the prompt's token ids and the choice's seed to the
    answer's token ids, EOS follows after those. With a `period` answers repeat themselves: letters hang on the seed and
    on their place in it, and only the end on what stands before. Of the sampling parameters, max_tokens, min_tokens,
    ignore_eos, stop_token_ids, seed and temperature = 0 count; the others change nothing.
    """

    key: int = 0
    eos_probability: float = 0.02
    answer: Callable[[Sequence[int], int], Sequence[int]] | None = None
    period: int | None = None

    def next_token(self, context: int, seed: int, place: int, may_end: bool) -> int:
        """The hashed token after a context of hash `context`, at a place of the answer."""
        key = seed * _FACTOR + self.key & _WORD
        mixed = _mix(context ^ key)
        if may_end and (mixed >> 11) * 2.0**-53 < self.eos_probability:
            return EOS
        return ALPHABET[(mixed if self.period is None else _mix(place % self.period ^ key)) & 31]

    def embedding(self, prompt: Sequence[int]) -> Floats:
        """The embedding of a prompt, whole and of length 1: letters of a hash of it. [EMBEDDING_SIZE]"""
        context, factor = 0, 1
        for token in prompt:
            context, factor = (context + (token + 3) * factor) & _WORD, factor * _FACTOR & _WORD
        vector = PoolingParams().finish(self.vector(context))
        assert vector is not None
        return vector

    def vector(self, context: int) -> Floats:
        """The vector of a context of hash `context`. [EMBEDDING_SIZE]"""
        mixed = _mix(context ^ self.key & _WORD)
        return np.frombuffer(mixed.to_bytes(EMBEDDING_SIZE, "little"), np.uint8).astype(np.float32) + 1

    def next_tokens(self, contexts: Hashes, seeds: Hashes, places: Indices, may_end: Bools) -> Ints:
        """The same for many rows, [L] each."""
        with np.errstate(over="ignore"):
            keys = seeds * np.uint64(_FACTOR) + np.uint64(self.key & _WORD)
        z = _mix_all(contexts ^ keys)
        is_end = may_end & ((z >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.eos_probability)
        if self.period is not None:
            z = _mix_all((places % self.period).astype(np.uint64) ^ keys)
        return np.where(is_end, np.int32(EOS), _LETTERS[(z & np.uint64(31)).astype(np.intp)]).astype(np.int32)

    def expected(self, prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> list[int]:
        """The whole answer to a prompt, EOS or stop token id included; `params.max_tokens` must be a number."""
        assert params.max_tokens is not None
        seed = seed_of(params, choice_seed(params.seed or 0, choice))
        written = None if self.answer is None else [*self.answer(list(prompt), seed), EOS]
        context, factor = 0, 1
        tokens: list[int] = []
        for token in prompt:
            context, factor = (context + (token + 3) * factor) & _WORD, factor * _FACTOR & _WORD
        while len(tokens) < params.max_tokens:
            place = len(tokens)
            may_end = not params.ignore_eos and place >= params.min_tokens
            if written is None:
                token = self.next_token(context, seed, place, may_end)
            else:
                token = written[min(place, len(written) - 1)]
            tokens.append(token)
            is_stop = token == EOS or token in params.stop_token_ids
            if is_stop and place >= params.min_tokens and not (token == EOS and params.ignore_eos):
                break
            context, factor = (context + (token + 3) * factor) & _WORD, factor * _FACTOR & _WORD
        return tokens


def seed_of(params: SamplingParams, seed: int) -> int:
    """The seed that counts: none when greedy."""
    return 0 if params.is_greedy else seed


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MIX_1 & _WORD
    z = (z ^ (z >> 27)) * _MIX_2 & _WORD
    return z ^ (z >> 31)


def _mix_all(z: Hashes) -> Hashes:
    """The same of each."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
        return z ^ (z >> np.uint64(31))


# -- the device


class ScriptedModel:
    """Runner and sampler of a scripted device: `forward` and `sample` as execute and sample call them.

    What should never happen is told in `violations`, a sentence each; a real device would compute nonsense in silence.
    `env` gives the fault points `device.out_of_memory` and `device.nan_row`. A forward pass takes `step_s` of real
    time, on its thread, as a real one would.
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
        self._factors = _powers(blocks_per_slot * block_size)
        self._cache = np.full((num_blocks, block_size), EMPTY, np.int32)  # [N, B] token ids
        self._copied: dict[int, Ints] = {}  # step -> new blocks of it whose old contents it copies out
        self._host = np.full((num_host_blocks, block_size), EMPTY, np.int32)  # [H, B] token ids
        self._tables = np.zeros((num_slots, blocks_per_slot), np.int32)
        self._books = _GrantBooks(num_blocks, num_host_blocks, block_size, num_slots, blocks_per_slot, self.violations)
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._known: list[Ints] = [np.zeros(0, np.int32)] * num_slots
        self._written: list[Sequence[int]] = [()] * num_slots  # the answer, if it is scripted
        self._scored = ScoredPrompts(num_slots)
        self._num_known = np.zeros(num_slots, np.int32)
        self._num_prompt = np.zeros(num_slots, np.int32)
        self._num_tokens = np.zeros(num_slots, np.int32)  # known and sampled
        self._last_tokens = np.zeros(num_slots, np.int32)
        self._contexts = np.zeros(num_slots, np.uint64)  # hash of all tokens, as they should be
        self._sequence_ids = np.full(num_slots, -1, np.int64)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._max_tokens = np.zeros(num_slots, np.int32)
        self._min_tokens = np.zeros(num_slots, np.int32)
        self._ignores_eos = np.zeros(num_slots, np.bool_)
        self._has_extras = np.zeros(num_slots, np.bool_)  # stop ids, or log-probabilities asked for
        self._is_finished = np.zeros(num_slots, np.bool_)
        self._started: list[Started | None] = [None] * num_slots
        self._is_pooled = np.zeros(num_slots, np.bool_)
        self._num_seen = np.zeros(num_slots, np.int32)  # tokens computed here since the sequence started

    # -- a step

    def announce(self, grant: StepGrant) -> None:
        """The grant is on its way: from now on its new blocks may be written at any moment, until `complete`."""
        new, new_on_host = self._books.announce(grant)
        if grant.copies:  # what is copied out first is poisoned then
            self._copied[grant.step] = np.intersect1d(new, _copied_out(grant))
            new = np.setdiff1d(new, self._copied[grant.step])
        self._cache[new] = POISON
        self._host[new_on_host] = POISON

    def complete(self, grant: StepGrant) -> None:
        """The device is done with the step, or will never run it."""
        self._books.complete(grant.step)
        self._copied.pop(grant.step, None)

    def forward(self, grant: StepGrant) -> Hashes:
        """[L] hashes of what the cache holds for each sampled row, in their order."""
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
        self._cache[self._tables[slots, positions // self.block_size], positions % self.block_size] = tokens
        self._num_seen[grant.slots] += grant.num_tokens
        self.max_batched_tokens = max(self.max_batched_tokens, len(slots))

    def _read_back(self, grant: StepGrant) -> Hashes:
        rows, runs = grant.is_sampled, Runs.of(grant)
        slots, lengths = grant.logits_slots, grant.starts[rows] + grant.num_certain[rows]
        if not len(slots):
            return np.zeros(0, np.uint64)
        if runs is not None:
            assert grant.drafts is not None
            lengths = np.repeat(lengths, 1 + grant.drafts.counts[rows]) + runs.offsets
        width = -(-int(lengths.max()) // self.block_size)
        history = self._cache[self._tables[slots, :width]].reshape(len(slots), -1)
        return hash_rows(history, lengths, self._factors)

    def prepare(self, started: Sequence[Started]) -> None:
        """A script needs no preparation, and no grammar changes it."""

    def sample(self, grant: StepGrant, logits: Hashes) -> StepTokens:
        """One token for each sampled row whose sequence goes on, and more behind drafts that are right; rows that have
        ended appear no more."""
        slots, runs = grant.logits_slots, Runs.of(grant)
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
        """What becomes of the pooled sequences among `slots` [L]."""
        pooled = {}
        for slot, context in zip(slots.tolist(), contexts.tolist(), strict=True):
            started = self._started[slot]
            if started is None or started.pooling is None or self._is_finished[slot]:
                continue
            if started.pooling.needs_every_position and self._num_seen[slot] != started.num_prompt:
                self.violations.append(
                    f"step {grant.step} pools sequence {started.sequence_id}, of whose {started.num_prompt} tokens "
                    f"{self._num_seen[slot]} were computed"
                )
            vector = started.pooling.finish(self.script.vector(context))
            pooled[slot] = Pooled(started.sequence_id, vector, Begun(started.token_ids, started.num_cached))
            self._is_finished[slot] = True
        return pooled

    def _check_contents(self, grant: StepGrant, contexts: Hashes, rows: Indices) -> None:
        """What `rows` of the logits were read from, before and after the step, is what each sequence's history should
        be."""
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
        """What each token that counts was chosen by is its sequence's history, the tokens before it in the step
        included."""
        expected, terms = self._contexts.tolist(), self._terms(slots, places, tokens).tolist()
        for row, slot in enumerate(slots.tolist()):
            if contexts[row] != expected[slot]:
                self.violations.append(f"step {grant.step} chose token {places[row]} of slot {slot} by another text")
            expected[slot] = (expected[slot] + terms[row]) & _WORD

    def _terms(self, slots: Indices, places: Indices, tokens: Indices) -> Hashes:
        """What answer tokens add to the hashes of their sequences."""
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
        """Made up, in shape: the chosen token is the likeliest, the first letters follow."""
        found = {}
        for row in self._has_extras[slots].nonzero()[0].tolist():
            params = self._params[slots[row]]
            if params is not None and params.logprobs is not None:
                others = [letter for letter in dict.fromkeys(ALPHABET) if letter != tokens[row]]
                ids = (int(tokens[row]), *others)[: params.logprobs]
                found[row] = TopLogprobs(-0.5, 1, ids, tuple(-0.5 - rank for rank in range(len(ids))))
        return found


def _scores(run: PromptRun) -> PromptLogprobs:
    """Made up, and a function of position and token: -(token % 64) / 8 at even positions, less 1/16 at odd ones."""
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


def _powers(count: int) -> Hashes:
    with np.errstate(over="ignore"):
        factors = np.full(count, _FACTOR, np.uint64)
        factors[0] = 1
        return np.cumprod(factors, dtype=np.uint64)


def hash_rows(tokens: Ints, lengths: NDArray[np.integer[Any]], factors: Hashes) -> Hashes:
    """[L] hashes of the first `lengths[i]` of `tokens[i]`, position by position."""
    width = tokens.shape[1]
    with np.errstate(over="ignore"):
        terms = (tokens + 3).astype(np.uint64) * factors[:width]
        hashes: Hashes = np.where(np.arange(width) < lengths[:, None], terms, np.uint64(0)).sum(1, dtype=np.uint64)
        return hashes


class _GrantBooks:
    """Checks grants as they are issued (I13, quarantine): who owns which block, and which steps may still use it."""

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        num_slots: int,
        blocks_per_slot: int,
        violations: list[str],
    ) -> None:
        self._num_blocks, self._block_size, self._num_slots = num_blocks, block_size, num_slots
        self._num_host_blocks = num_host_blocks
        self._violations = violations
        self._tables = np.full((num_slots, blocks_per_slot), -1, np.int32)
        self._num_placed = np.zeros(num_slots, np.int32)  # entries of the table that count
        self._num_computed = np.zeros(num_slots, np.int32)
        self._num_drafted = np.zeros(num_slots, np.int32)  # behind those, in the last step
        self._owner = np.full(num_blocks, -1, np.int32)  # slot that may write it
        # step -> blocks it may read or write, on the device and on the host
        self._in_flight: dict[int, tuple[NDArray[np.bool_], NDArray[np.bool_]]] = {}
        self._last_step = -1

    def announce(self, grant: StepGrant) -> tuple[Ints, Ints]:
        """Checks the grant and notes what it uses. Returns its new blocks on the device and on the host, those that
        exist: not those that begin a sequence because their contents are known, which nobody may write."""
        if grant.step != self._last_step + 1 and self._last_step >= 0:
            self._complain(grant, f"follows step {self._last_step}: steps have no gaps")
        self._last_step = grant.step
        num_found = np.zeros(self._num_slots, np.int32)  # blocks
        for started in grant.started:
            self._num_placed[started.slot] = 0
            self._num_computed[started.slot] = started.num_cached
            self._num_drafted[started.slot] = 0
            num_found[started.slot] = started.num_shared // self._block_size
        is_block = (grant.table_blocks >= 0) & (grant.table_blocks < self._num_blocks)
        if not is_block.all():
            self._complain(grant, f"names blocks {grant.table_blocks[~is_block].tolist()} of {self._num_blocks}")
        blocks, slots, places = grant.table_blocks[is_block], grant.table_slots[is_block], grant.table_places[is_block]
        self._tables[slots, places] = blocks
        np.maximum.at(self._num_placed, slots, places + 1)
        is_new = places >= num_found[slots]
        blocks, slots = blocks[is_new], slots[is_new]
        if len(np.unique(blocks)) != len(blocks):
            self._complain(grant, f"gives a block twice: {sorted(blocks.tolist())}")
        on_host = [copy.destinations for copy in grant.copies if copy.direction is Direction.OUT]
        host_blocks = np.concatenate([NO_INTS, *on_host])
        for step, (used, host_used) in list(self._in_flight.items()):  # a copy: steps end on the device thread
            if used[blocks].any():
                self._complain(grant, f"reuses blocks {blocks[used[blocks]].tolist()}, which step {step} may still use")
            if host_used[host_blocks].any():
                self._complain(grant, f"reuses host blocks {host_blocks.tolist()}, some of which step {step} may use")
        self._owner[blocks] = slots
        used, host_used = np.zeros(self._num_blocks, np.bool_), np.zeros(self._num_host_blocks, np.bool_)
        self._check_rows(grant, used)
        self._check_copies(grant, used, host_used, blocks)
        self._in_flight[grant.step] = used, host_used
        return blocks, host_blocks

    def _check_copies(self, grant: StepGrant, used: NDArray[np.bool_], host_used: NDArray[np.bool_], new: Ints) -> None:
        host_written = np.zeros_like(host_used)
        for copy in grant.copies:
            if copy.direction is Direction.FORK:
                self._check_fork(grant, copy, used, new)
                continue
            is_out = copy.direction is Direction.OUT
            on_device, on_host = (copy.sources, copy.destinations) if is_out else (copy.destinations, copy.sources)
            if host_written[on_host].any() or (is_out and host_used[on_host].any()):
                self._complain(grant, f"copies to host blocks {on_host.tolist()}, which other copies use")
            host_written[on_host] |= is_out
            if not is_out and not np.isin(on_device, new).all():
                self._complain(grant, f"copies into blocks {on_device.tolist()}, not all of which are new")
            used[on_device] = host_used[on_host] = True

    def _check_fork(self, grant: StepGrant, copy: BlockCopy, used: NDArray[np.bool_], new: Ints) -> None:
        if not np.isin(copy.destinations, new).all():
            self._complain(grant, f"copies into blocks {copy.destinations.tolist()}, not all of which are new")
        if np.isin(copy.sources, new).any():
            self._complain(grant, f"copies from blocks {copy.sources.tolist()}, some of which it gives away")
        used[copy.sources] = used[copy.destinations] = True

    def _check_rows(self, grant: StepGrant, used: NDArray[np.bool_]) -> None:
        if len(np.unique(grant.slots)) != len(grant.slots):
            self._complain(grant, f"has two rows for one slot: {sorted(grant.slots.tolist())}")
        ends = grant.starts + grant.num_tokens
        if (grant.num_tokens < 1).any():
            self._complain(grant, f"has a row of no tokens: {grant.num_tokens.tolist()}")
        due = self._num_computed[grant.slots]
        latest = due + self._num_drafted[grant.slots]  # if they all were right
        if (grant.starts < due).any() or (grant.starts > latest).any():
            self._complain(grant, f"starts at {grant.starts.tolist()}, not at {due.tolist()} to {latest.tolist()}")
        if (ends > self._num_placed[grant.slots] * self._block_size).any():
            self._complain(grant, f"writes up to {ends.tolist()} in {self._num_placed[grant.slots].tolist()} blocks")
        for slot, start, end in zip(grant.slots.tolist(), grant.starts.tolist(), ends.tolist(), strict=True):
            table = self._tables[slot, : min(-(-end // self._block_size), self._tables.shape[1])]
            written = table[start // self._block_size :]
            if (self._owner[written] != slot).any():
                self._complain(grant, f"writes blocks {written.tolist()} of slot {slot}, which others own")
            used[table] = True
        self._num_computed[grant.slots] = grant.starts + grant.num_certain
        self._num_drafted[grant.slots] = ends - self._num_computed[grant.slots]

    def complete(self, step: int) -> None:
        """Nothing of `step` runs any more."""
        self._in_flight.pop(step, None)

    def _complain(self, grant: StepGrant, what: str) -> None:
        self._violations.append(f"step {grant.step} {what}")


class ScriptedDevice(Device):
    """The device's order of steps, with a scripted model that hears of each grant when it is issued and when it is
    over, as well as when it runs."""

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
            if self._num_phases <= SAMPLE:  # a slice that ends at the logits
                self.model.complete(grant)

    def _run_sample(self, grant: StepGrant, sample: Callable[[StepGrant, Any], Any]) -> Any:
        try:
            return super()._run_sample(grant, sample)
        finally:
            self.model.complete(grant)


# -- text


class ByteTokenizer:
    """A token a byte, and four special ones. Text to ids and back without a file."""

    eos_token = SPECIAL_TOKENS[0]
    eos_token_id = EOS
    bos_token_id = None
    special_ids = frozenset(range(256, VOCAB_SIZE))

    def __init__(self) -> None:
        self.bytes = [bytes([i]) for i in range(256)] + [name.encode() for name in SPECIAL_TOKENS]
        self.texts = [chr(i) if i < 128 else "" for i in range(VOCAB_SIZE)]
        self.is_plain = np.arange(VOCAB_SIZE) < 128

    def __len__(self) -> int:
        return VOCAB_SIZE

    def encode_text(self, text: str) -> list[int]:
        """UTF-8. Special tokens can not be spelled."""
        return list(text.encode(errors="replace"))

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        """Each message between its role's token and <|end|>; then the assistant's turn."""
        ids: list[int] = []
        for message in chat.messages:
            token = f"<|{message.get('role', 'user')}|>"
            role = SPECIAL_TOKENS.index(token) if token in SPECIAL_TOKENS[1:] else 2
            ids += [256 + role, *self.encode_text(_content(message.get("content"))), EOS]
        if chat.add_generation_prompt:
            ids.append(256 + 3)
        elif chat.continue_final_message and ids:
            ids.pop()
        return ids

    def encode_words(self, text: str) -> list[int]:
        """As `encode_text`."""
        return self.encode_text(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode_text`: there is nothing to add."""
        return self.encode_text(text)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Two texts with <|end|> between them."""
        begin, rest = [*self.encode_text(first), EOS], self.encode_text(second)
        return begin + rest, [0] * len(begin) + [1] * len(rest)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of whole answers."""
        decoder = _ByteDecoder(skip_special_tokens)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def decoder(self, params: SamplingParams) -> _ByteDecoder:
        """A decoder for one answer."""
        return _ByteDecoder(params.skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or the name of a special token."""
        return self.bytes[token_id]


class _ByteDecoder:
    """UTF-8, a byte at a time; what is no UTF-8 becomes U+FFFD."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self._skips = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id < 256:
            return self._decoder.decode(bytes([token_id]))
        return self.flush() + ("" if self._skips else SPECIAL_TOKENS[token_id - 256])

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    @property
    def is_idle(self) -> bool:
        return not self._decoder.getstate()[0]


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, dict))
