"""The messages of steps: from the plan of a step to its text. See `messages.py`.

The arrays of a step are parallel: row i of each describes the same sequence.

Extents: R rows of a step, L sampled rows, B new block-table entries, E ended slots, P prompt tokens, G generated
tokens.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.layout.kv_layout import KVRoom
from ..runtime.message import Moment, message
from .params import SamplingParams
from .pooling_params import PoolingParams
from .request_messages import Ints

Indices = NDArray[np.intp]  # numpy indexes with intp directly; int32 costs 3 us more per use at 256 rows
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

AdapterLoads = tuple[tuple[int, str], ...]  # (device slot, digest of the adapter to load into it)

NO_INTS: Ints = np.zeros(0, np.int32)
NO_INDICES: Indices = np.zeros(0, np.intp)


class FinishReason(enum.IntEnum):
    """Why a sequence ended. Clients see the lower-case names (`outputs.FINISH_NAMES`)."""

    NONE = 0  # not ended
    STOP = 1  # EOS, a stop token id or a stop string
    LENGTH = 2  # max_tokens or the end of the context
    ERROR = 3  # its logits were NaN
    ABORT = 4  # cancelled, disconnected, timed out or shut down


@message
class Rates:
    """Measured speed of the device, by which allocate chooses between swapping and recomputing without a clock."""

    copy_s: float  # to copy one block, one way
    compute_s: float  # to compute one token of a prompt

    def favour_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether copying the blocks out and back in takes no longer than recomputing their tokens."""
        return 2 * num_blocks * self.copy_s <= num_tokens * self.compute_s


@message
class Started:
    """A sequence got a slot, for the first time or again after a preemption.

    It travels with the first grant that runs the sequence, so that each stage can fill its row of columnar state.
    """

    slot: int
    sequence_id: int
    request_id: str
    token_ids: Ints  # [P + G] the prompt and the tokens generated before
    num_prompt: int  # P
    params: SamplingParams
    seed: int  # of this choice
    cache_salt: str = ""  # sequences share blocks only within one salt
    pooling: PoolingParams | None = None  # set: it ends with its prompt; its hidden states become a vector
    is_long: bool = False  # has more tokens than `ModelInfo.short_length`, so other rotary factors: shares no block
    # allocate sets the next two; they count tokens of `token_ids`
    num_cached: int = 0  # whose keys and values exist, so that they are not computed
    num_shared: int = 0  # of num_cached, in shared blocks; the rest is copied from the host or another block
    adapter: str = ""  # the digest of its adapter: sequences share blocks only within one adapter; "": the base model
    adapter_slot: int = 0  # where its adapter is on the device; 0: the base model

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt token must be computed, for its log-probability.

        False once there is an answer: all prompt log-probabilities have then been reported.
        """
        return self.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt


@message
class Drafts:
    """Speculative tokens, computed after a row's own token and kept up to the first mismatch."""

    counts: Ints  # [R] drafts of each row; 0 unless the host knows the row's last token
    token_ids: Indices  # [sum of counts] in row order

    def take(self, rows: Indices) -> Drafts:
        """The drafts of some rows (ascending); every row with drafts must be among them."""
        counts = self.counts[rows]
        assert int(counts.sum()) == len(self.token_ids), "a row with drafts is left out"
        return Drafts(counts, self.token_ids)


@message
class StepPlan:
    """The token demand of the next step, in order of service.

    A plan without rows only reports what has happened.
    """

    step: int  # granted steps are numbered without gaps: the number of a void plan is reused
    generation: int  # incremented when steps in flight are voided; grants of older generations do not run
    completed_step: int  # every step up to this one is done, so blocks quarantined for it are reusable
    slots: Indices  # [R] in the order of service
    num_wanted: Ints  # [R] tokens to compute, at least 1; drafts are among them
    reaches_end: Bools  # [R] whether computing all wanted tokens yields a new token
    token_budget: int
    victims: Indices  # slots that may be preempted, in order of preemption
    num_victims: Ints  # [R] length of the prefix of `victims` that the row may preempt
    num_reserved: Ints | None = None  # [R] tokens to allocate blocks for now; None or 0: only the granted tokens
    is_decode: bool = False  # True: each row wants exactly one token
    allows_partial: bool = True  # False: a row gets all of its wanted tokens or none
    drafts: Drafts | None = None  # a row gets all of its drafts or none
    accepted: Sequence[tuple[int, int]] = ()  # (slot, accepted drafts of its last step), whose KV is valid
    started: tuple[Started, ...] = ()
    ended: Sequence[int] = ()  # [E] slots whose sequences have ended
    preempted: Sequence[int] = ()  # slots that schedule took, for sequences of better rank or to change factors
    # slots taken back because their blocks' contents are not trusted, or, if also preempted, of no more use
    dropped: Sequence[int] = ()
    discarded: Sequence[int] = ()  # ids of sequences whose host blocks are no longer needed
    settled: Sequence[StepDone] = ()  # steps completed since the last plan
    voided: Sequence[int] = ()  # steps voided since the last plan
    adapter_loads: AdapterLoads = ()


@message
class PlanReport:
    """Allocate's answer to a plan.

    Void: nothing was granted and nothing is copied, so no step results.
    """

    step: int
    num_granted: Ints  # [R] tokens, 0 = not in the step; the plan's `num_wanted` array itself if all were granted
    num_cached: Ints  # [R] tokens of starting rows found in the prefix cache or on the host
    preempted: Sequence[int]  # slots that allocate preempted
    # available blocks: free, or cached and in no table. Of several kinds: blocks of kind 0 for one more sequence, which
    # needs blocks of the others beside them
    num_free: int
    num_quarantined: int  # blocks that will be available once the steps in flight are done
    num_host_free: int = 0  # available host blocks: free, or holding only cached prefixes
    num_host_quarantined: int = 0
    # slot -> tokens copied to the host; slots preempted here or in the plan that are swapped, not recomputed
    swapped: Mapping[int, int] = field(default_factory=dict)
    is_void: bool = False
    is_reset: bool = False  # allocate lost its state in a crash: no slot has blocks any more
    kv_room: KVRoom | None = None  # of several kinds: what each can still get, once the steps in flight are done


class Direction(enum.IntEnum):
    """Source and destination of a block copy."""

    OUT = 0  # from the device to the host
    IN = 1  # from the host to the device
    FORK = 2  # within the device: sequences that diverge inside a block each get their own copy; to a slot of states
    SAVE = 3  # of states alone, within the device: from a slot to a snapshot, after the step


STATES = -1  # the kind of a copy of recurrent states: slots and snapshots on the device, places on the host


@message
class BlockCopy:
    """Whole blocks to copy, `sources[i]` to `destinations[i]`, [C] each; or recurrent states, if the kind is `STATES`.

    The copy runs after all earlier steps and before the step of its grant; one of direction `SAVE` runs right after it,
    if it does not fail. The copies of one grant run in order.
    """

    direction: Direction
    sources: Ints
    destinations: Ints
    kind: int = 0  # of the blocks, as in `KVLayout.kinds`; ids of other kinds are other blocks


@message
class TableEntries:
    """New entries of the block tables of one kind: entry i is as in `StepGrant`.

    NOTE: The table of a window keeps logical places, token // block_size. Entries before the first block that a query
    of the step sees are stale, and may name blocks of other sequences: they are never read.
    """

    kind: int  # at least 1
    slots: Indices  # [B]
    places: Indices  # [B]
    blocks: Ints  # [B]


@message
class StepGrant:
    """One step to run.

    Block tables travel as differences: entry i sets position `table_places[i]` in the table of slot `table_slots[i]`
    to block `table_blocks[i]`. The device keeps the tables. They are those of kind 0 (see `KVLayout`); `more_tables`
    has the entries of the others.
    """

    step: int
    generation: int
    slots: Indices  # [R]
    starts: Ints  # [R] position of the first token to compute
    num_tokens: Ints  # [R] at least 1
    is_sampled: Bools  # [R] whether the row's last token is sampled; with drafts, so is the token before each draft
    table_slots: Indices  # [B]
    table_places: Indices  # [B]
    table_blocks: Ints  # [B]
    is_decode: bool = False  # as in the plan
    drafts: Drafts | None = None  # the last tokens of their rows
    started: tuple[Started, ...] = ()
    copies: tuple[BlockCopy, ...] = ()  # a grant with copies, or with loads, may have no rows
    adapter_loads: AdapterLoads = ()  # done before the step, of which no row reads these slots; one may fail
    more_tables: tuple[TableEntries, ...] = ()  # of kinds with new entries, ascending

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.is_sampled))

    @property
    def num_computed(self) -> int:
        """Tokens of all rows, drafts included."""
        return len(self.slots) if self.is_decode else int(self.num_tokens.sum())

    @property
    def num_certain(self) -> Ints:
        """[R] tokens of each row without its drafts."""
        return self.num_tokens if self.drafts is None else self.num_tokens - self.drafts.counts

    @property
    def logits_slots(self) -> Indices:
        """[L] the slot of each row of logits."""
        slots = self.slots[self.is_sampled]
        return slots if self.drafts is None else np.repeat(slots, 1 + self.drafts.counts[self.is_sampled])


@message
class StepLogits:
    """A step that the device runs.

    `logits` resolves to the device's handle on [L, V] logits: for each sampled row of the grant, in order, one row plus
    one for each of its drafts. It raises the exception of the forward pass. Read the logits before the step reaches
    sample: from then on the sampler may change them in place, and it releases them once the tokens are chosen.

    NOTE: with asynchronous scheduling the handle may stand for the chosen tokens instead. An engine with a custom stage
    in place of execute or sample, or between them, does not schedule asynchronously.
    """

    grant: StepGrant
    logits: asyncio.Future[Any]

    @property
    def step(self) -> int:
        return self.grant.step


@message
class StepDone:
    """The outcome of a step, as schedule needs it.

    Several tokens of one sequence are in adjacent rows.
    """

    step: int
    slots: Indices  # [L]
    sequence_ids: NDArray[np.int64]  # [L]
    places: Indices  # [L] which generated token this is, from 0
    token_ids: Indices  # [L]
    is_finished: Bools  # [L]
    most_tokens: int = 1  # upper bound of the tokens of one sequence
    took_us: int = 0  # since the previous step ended or this one could start; 0: not measured
    failed_loads: tuple[str, ...] = ()  # digests of adapters that the step was to load and could not


@message
class Guess:
    """Draft tokens for a sequence, which sample verifies.

    They followed an earlier match of the sequence's last tokens.
    """

    slot: int
    sequence_id: int
    num_known: int  # tokens of the sequence before the draft; the host knows all of them
    token_ids: Indices  # empty: no earlier occurrence was found
    is_sure: bool  # the match was long enough for the sequence to begin drafting


@message
class StepVoid:
    """A step without a result: the device failed, or an earlier step was voided."""

    step: int
    generation: int
    error: BaseException | None  # None: voided because of an earlier step


@message
class TopLogprobs:
    """Log-probabilities of the chosen token and of the k likeliest, in descending order."""

    chosen: float
    rank: int  # of the chosen token; 1 is the likeliest
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@message
class Pooled:
    """The complete result of a pooled sequence."""

    sequence_id: int
    vector: Floats | None  # [E] numbers of the embedding; None: the model returned NaN or infinity
    begun: Begun


@message
class PromptLogprobs:
    """Log-probabilities of C consecutive prompt tokens, and of the k likeliest at each.

    Positions recomputed after a preemption are reported again.
    """

    sequence_id: int
    start: int  # position of the first; at least 1, as the first prompt token has no log-probability
    token_ids: Ints  # [C]
    logprobs: Floats  # [C]
    ranks: Ints  # [C] 1 is the likeliest
    top_ids: Ints  # [C, k] likeliest first
    top_logprobs: Floats  # [C, k]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)

    @staticmethod
    def join(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """Joins consecutive parts of one prompt; drops the positions that a part repeats."""
        known, end = [], parts[0].start
        for part in parts:
            assert part.start <= end < part.end, f"scores of prompt tokens {part.start} to {part.end} follow {end}"
            known.append(end - part.start)
            end = part.end
        columns = (
            np.concatenate([getattr(part, name)[skip:] for part, skip in zip(parts, known, strict=True)])
            for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
        )
        return PromptLogprobs(parts[0].sequence_id, parts[0].start, *columns)


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt has been computed."""

    sequence_id: int
    num_processed: int  # tokens, cached ones included


@message
class StepTokens:
    """The sampled tokens of a step. Several tokens of one sequence are in adjacent rows."""

    step: int
    slots: Indices  # [L]
    sequence_ids: NDArray[np.int64]  # [L]
    places: Indices  # [L] which generated token this is, from 0
    token_ids: Indices  # [L]
    finishes: NDArray[np.int8]  # [L] FinishReason
    started: tuple[Started, ...] = ()
    logprobs: Mapping[int, TopLogprobs] = field(default_factory=dict)  # row -> of requests with logprobs
    pooled: Mapping[int, Pooled] = field(default_factory=dict)  # slot -> a pooled sequence's result
    prompt_logprobs: Sequence[PromptLogprobs] = ()  # of prompts of which the step computed a part
    progress: Sequence[PromptProgress] = ()  # of requests with return_progress
    began_s: Moment | None = None  # when the device could begin the step; set if a sequence started in it
    grammar_us: int = 0  # time for which sampling waited for grammar masks


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. `stop_reason` is the stop string or stop token id, if one ended it."""

    reason: FinishReason
    stop_reason: str | int | None = None
    score: float | None = None  # of a beam search's answer; higher is better
    num_preempted: int = 0  # times the sequence was preempted and resumed


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one token as clients see them, with the text of the alternatives."""

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    rank: int
    top: tuple[tuple[int, str, bytes, float], ...]  # (id, text, bytes, logprob), likeliest first
    time_us: int = field(default=0, compare=False)  # when it became text, on the engine's clock
    is_drafted: bool = field(default=False, compare=False)  # an accepted draft


@message
class Begun:
    """Facts about a sequence, sent with its first text."""

    token_ids: Ints  # [P] the prompt
    num_cached: int = 0  # prompt tokens that were not computed
    began_s: Moment | None = None  # when the device began with it; None: it was not measured


@message
class StepText:
    """The text of a step. Row i: a sequence, its new text, its new token.

    The text is "" while a character is incomplete or a possible stop string is held back.
    """

    step: int
    sequence_ids: Sequence[int]
    texts: Sequence[str]
    token_ids: Sequence[int]
    finishes: Mapping[int, Finish] = field(default_factory=dict)  # row -> how its sequence ended
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # row -> of requests with logprobs
    begun: Mapping[int, Begun] = field(default_factory=dict)  # sequence id -> facts, with its first text
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    pooled: Sequence[Pooled] = ()  # of pooled sequences, which have no row
    progress: Sequence[PromptProgress] = ()
