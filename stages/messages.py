"""What the stages say to each other. Frozen, made once, never patched on the way.

A client *request* holds one or more prompts; each prompt and choice is a *sequence*, with a dense `sequence_id` given
in the order of arrival. A running sequence has a *slot*, and columnar state is indexed by slot. Arrays of a step are
parallel: row i of each speaks of the same sequence. R rows, L of them sampled, B blocks newly given, E slots ended.

Who says what to whom:

    Request      client   -> intake -> tokenize
    TokenRequest tokenize -> schedule
    StepPlan     schedule -> allocate
    PlanReport   allocate -> schedule
    StepGrant    allocate -> execute
    StepLogits   execute  -> sample
    Rates        execute  -> allocate
    Guess        schedule -> schedule, for those who record
    StepDone, StepVoid   sample -> schedule
    StepTokens   sample   -> detokenize, with what became of pooled sequences, as Pooled
    StepText     detokenize -> exit
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..runtime.message import message
from .errors import Refused
from .params import SamplingParams
from .pooling_params import PoolingParams

Ints = NDArray[np.int32]
Indices = NDArray[np.intp]  # numpy indexes with these as they are; int32 costs 3 us more for each use by 256 rows
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

NO_INTS: Ints = np.zeros(0, np.int32)
NO_INDICES: Indices = np.zeros(0, np.intp)


class FinishReason(enum.IntEnum):
    """Why a sequence ended. The lower-case names are what clients see."""

    NONE = 0  # it goes on
    STOP = 1  # EOS, a stop token id or a stop string
    LENGTH = 2
    ERROR = 3  # its logits held no number
    ABORT = 4  # cancelled, disconnected, timed out or shut down


# -- requests


@message
class Prompt:
    """One prompt, in one of four forms; `token_ids` [P] needs no tokenizer, `pair` is two texts to be read together."""

    text: str | None = None
    token_ids: Ints | None = None
    chat: ChatPrompt | None = None
    pair: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template. `content` of a message is text or a list of text parts."""

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@message
class Request:
    """What a client asked for. `len(prompts) * params.n` sequences, ids from `first_sequence_id`: prompt p, choice j is
    `first_sequence_id + p * n + j`, and the same less `first_sequence_id` is the index its client sees."""

    request_id: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    first_sequence_id: int = -1  # given by the exit when the request enters
    priority: int = 0  # lower goes first
    arrival_s: float = 0.0  # monotonic
    cache_salt: str = ""  # cached prefixes are found by requests of the same salt only
    parent_id: str | None = None  # of a step of a beam search: the request it is made for, which came in at the door
    num_expected_cached: int = 0  # tokens of each prompt that are likely in the prefix cache; a guess costs nothing
    pooling: PoolingParams | None = None  # a vector is made of each prompt, and no text; n is 1

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.n


@message
class TokenRequest:
    """One prompt of a request, as token ids. Its `params.n` choices have ids from `first_sequence_id`."""

    request_id: str
    prompt_index: int
    token_ids: Ints  # [P], 1 <= P < max_model_len
    params: SamplingParams  # max_tokens and seed are numbers now
    first_sequence_id: int
    priority: int = 0
    arrival_s: float = 0.0
    cache_salt: str = ""
    num_expected_cached: int = 0  # as in `Request`
    pooling: PoolingParams | None = None  # its kind is said; the prompt may then fill the context
    type_ids: Ints | None = None  # [P] which text of a pair each token is of, 0 or 1; None: there is one text
    # choice -> its answer so far, made by an engine that has died; a choice that is not there is over. None: it is new
    generated: Mapping[int, Ints] | None = None


# -- steps


@message
class Rates:
    """How fast the machine is, as execute's device was measured. Allocate weighs with it whether to swap, and reads no
    clock of its own."""

    copy_s: float  # to copy one block, one way
    compute_s: float  # to compute one token of a prompt

    def favour_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether copying the blocks out and in takes no longer than computing what they hold again."""
        return 2 * num_blocks * self.copy_s <= num_tokens * self.compute_s


@message
class Started:
    """A sequence took a slot, for the first time or again after a preemption. Travels with the first grant that runs
    it, so that each stage can fill its row of columnar state."""

    slot: int
    sequence_id: int
    request_id: str
    token_ids: Ints  # [P + G] the prompt and what was generated before
    num_prompt: int  # P
    params: SamplingParams
    seed: int  # of this choice
    cache_salt: str = ""  # only sequences of the same salt share blocks
    pooling: PoolingParams | None = None  # it ends with its prompt, and a vector is made of its hidden states
    # allocate says these two, of `token_ids`:
    num_cached: int = 0  # not to be computed, as they are known
    num_shared: int = 0  # of those, in shared blocks; the others are copied, from the host or from another block

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether each token of the prompt is to be computed, for its log-probability. Once there is an answer, they
        all have been told."""
        return self.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt


@message
class Drafts:
    """Tokens that may come next, to be computed behind a row's own and kept as far as they turn out right."""

    counts: Ints  # [R] of each row; only rows that are known to their last token on the host have any
    token_ids: Indices  # [sum of counts] row by row

    def take(self, rows: Indices) -> Drafts:
        """Those of some rows, in rising order: all that have any are among them."""
        counts = self.counts[rows]
        assert int(counts.sum()) == len(self.token_ids), "a row with drafts is left out"
        return Drafts(counts, self.token_ids)


@message
class StepPlan:
    """An ordered list of wishes. A plan without rows only says what has happened."""

    step: int  # no gaps among granted steps: a void plan's number is used again
    generation: int  # goes up when steps in flight were voided; older grants are not run
    completed_step: int  # every step up to this one is done: what waited for it may be reused
    slots: Indices  # [R] in the order of service
    num_wanted: Ints  # [R] tokens to compute, at least 1; drafts are among them
    reaches_end: Bools  # [R] whether all wanted tokens lead to a new one
    token_budget: int
    victims: Indices  # slots that may lose their blocks, first to go first
    num_victims: Ints  # [R] how many of them, from the front, the row may take from
    num_reserved: Ints | None = None  # [R] tokens to hold blocks for, at once; None and 0 = only for what is granted
    is_decode: bool = False  # each row wants one token
    allows_partial: bool = True  # False: a wish is granted whole or not at all
    drafts: Drafts | None = None  # granted all or none of them
    accepted: Sequence[tuple[int, int]] = ()  # (slot, drafts of its last step that turned out right): computed for good
    started: tuple[Started, ...] = ()
    ended: Sequence[int] = ()  # [E] slots whose sequences are over
    preempted: Sequence[int] = ()  # slots that schedule took from their sequences, for better ones
    dropped: Sequence[int] = ()  # slots that it took back because what their blocks hold is not to be trusted
    discarded: Sequence[int] = ()  # ids of sequences whose blocks on the host are not wanted any more
    settled: Sequence[StepDone] = ()  # steps that are done since the last plan
    voided: Sequence[int] = ()  # steps that are over since then and did not happen


@message
class PlanReport:
    """What became of a plan. Void: nothing was granted and there is nothing to copy, so no step goes on."""

    step: int
    num_granted: Ints  # [R] tokens, 0 = left out; the plan's own `num_wanted` if all was granted
    num_cached: Ints  # [R] tokens of rows that begin, found in the prefix cache or on the host, not computed
    preempted: Sequence[int]  # slots that lost their blocks
    num_free: int  # blocks that can be had: free, or cached and in no table
    num_quarantined: int
    num_host_free: int = 0  # on the host: free, or holding cached prefixes only
    num_host_quarantined: int = 0
    # slot -> tokens copied to the host, for those preempted here or in the plan that need not be computed again
    swapped: Mapping[int, int] = field(default_factory=dict)
    is_void: bool = False
    is_reset: bool = False  # allocate lost its books: no slot has blocks any more


class Direction(enum.IntEnum):
    """Where blocks are copied."""

    OUT = 0  # from the device to the host
    IN = 1  # from the host to the device
    FORK = 2  # on the device: sequences that part within a block go on in blocks of their own


@message
class BlockCopy:
    """Whole blocks to copy: `destinations[i]` becomes what `sources[i]` is, [C] each. When all earlier steps have run,
    and before this one does; copies of one grant in their order."""

    direction: Direction
    sources: Ints
    destinations: Ints


@message
class StepGrant:
    """What to run. Block tables travel as what is new in them: entry i says that block `table_places[i]` of slot
    `table_slots[i]` is `table_blocks[i]`; the execute stage keeps the tables."""

    step: int
    generation: int
    slots: Indices  # [R]
    starts: Ints  # [R] position of the first token to compute
    num_tokens: Ints  # [R] at least 1
    is_sampled: Bools  # [R] whether the last of them yields a new token; with drafts, so does each before it
    table_slots: Indices  # [B]
    table_places: Indices  # [B]
    table_blocks: Ints  # [B]
    is_decode: bool = False  # as the plan says
    drafts: Drafts | None = None  # the last of a row's tokens
    started: tuple[Started, ...] = ()
    copies: tuple[BlockCopy, ...] = ()  # a grant that has some may have no rows

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.is_sampled))

    @property
    def num_computed(self) -> int:
        """Tokens of all rows."""
        return len(self.slots) if self.is_decode else int(self.num_tokens.sum())

    @property
    def num_certain(self) -> Ints:
        """[R] tokens that are no drafts."""
        return self.num_tokens if self.drafts is None else self.num_tokens - self.drafts.counts

    @property
    def logits_slots(self) -> Indices:
        """[L] whose the rows of logits are."""
        slots = self.slots[self.is_sampled]
        return slots if self.drafts is None else np.repeat(slots, 1 + self.drafts.counts[self.is_sampled])


@message
class StepLogits:
    """A step on its way through the device. `logits` resolves to the device's handle on [L, V] logits, one row for each
    sampled row of the grant, in order, and one more for each of its drafts behind it; it raises what the forward pass
    raised. Ask for them before the step goes on to sample: from then on the sampler may change them, and once it has
    chosen tokens nothing keeps them but who holds them. Where steps are scheduled asynchronously the handle may be of
    what was chosen instead; an engine with a stage of yours in the place of execute or sample, or between them, does
    not do that."""

    grant: StepGrant
    logits: asyncio.Future[Any]

    @property
    def step(self) -> int:
        return self.grant.step


@message
class StepDone:
    """A step's outcome, for the books of schedule. The tokens of one sequence, if there are several, follow each
    other."""

    step: int
    slots: Indices  # [L]
    sequence_ids: NDArray[np.int64]  # [L]
    places: Indices  # [L] which generated token this is, from 0
    token_ids: Indices  # [L]
    is_finished: Bools  # [L]
    most_tokens: int = 1  # of one sequence: no more than so many
    took_us: int = 0  # since the step before was done, or the device could begin with this one; 0: not measured


@message
class Guess:
    """What may come next in an answer, as its last tokens stood before in it or its prompt. Not a promise: the device
    looks at each token."""

    slot: int
    sequence_id: int
    num_known: int  # tokens of the sequence, all told by the device, behind which these would come
    token_ids: Indices  # none: nothing of the kind was found
    is_sure: bool  # as many tokens stood there before as make it worth to try


@message
class StepVoid:
    """A step that did not happen: the device failed, or an earlier step of its generation was void."""

    step: int
    generation: int
    error: BaseException | None  # None: it fell with an earlier one


@message
class TopLogprobs:
    """Log-probabilities of one token: the chosen one's, and the k likeliest in falling order."""

    chosen: float
    rank: int  # of the chosen token, 1 is the likeliest
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@message
class Pooled:
    """The one result of a pooled sequence, whole, on its way to its outbox."""

    sequence_id: int
    vector: Floats | None  # [E]; None: the model gave something that is no number
    begun: Begun


@message
class PromptLogprobs:
    """Log-probabilities of C tokens of a prompt, each given those before it, and the k likeliest in its place. What is
    computed twice, after a preemption, comes twice."""

    sequence_id: int
    start: int  # position of the first; at least 1, as nothing comes before the first token of a prompt
    token_ids: Ints  # [C]
    logprobs: Floats  # [C]
    ranks: Ints  # [C] 1 is the likeliest
    top_ids: Ints  # [C, k] likeliest first
    top_logprobs: Floats  # [C, k]

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + len(self.token_ids)

    @staticmethod
    def join(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """Parts of one prompt in order, less what each repeats of those before it."""
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
    """How much of a prompt is computed."""

    sequence_id: int
    num_processed: int  # tokens, those found in the cache included


@message
class StepTokens:
    """The tokens of a step, for whoever turns them into text. Those of one sequence, if there are several, follow each
    other."""

    step: int
    slots: Indices  # [L]
    sequence_ids: NDArray[np.int64]  # [L]
    places: Indices  # [L] which generated token this is, from 0
    token_ids: Indices  # [L]
    finishes: NDArray[np.int8]  # [L] FinishReason
    started: tuple[Started, ...] = ()
    logprobs: Mapping[int, TopLogprobs] = field(default_factory=dict)  # row -> what was asked for
    pooled: Mapping[int, Pooled] = field(default_factory=dict)  # slot -> what became of a sequence that has no row here
    prompt_logprobs: Sequence[PromptLogprobs] = ()  # of prompts that the step computed a part of
    progress: Sequence[PromptProgress] = ()  # of those who want to be told
    began_s: float = 0.0  # when the device could begin with the step, if somebody started in it
    grammar_us: int = 0  # that choosing waited for grammars' masks


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. `stop_reason` is the stop string or stop token id that ended it."""

    reason: FinishReason
    stop_reason: str | int | None = None
    score: float | None = None  # among the answers of a beam search; higher is better
    num_preempted: int = 0  # how often it lost its slot and came back


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probabilities as clients see them: its own text, and that of the alternatives."""

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    rank: int
    top: tuple[tuple[int, str, bytes, float], ...]  # (id, text, bytes, logprob), likeliest first


@message
class Begun:
    """What there is to say of a sequence when it is first seen."""

    token_ids: Ints  # [P] of its prompt
    num_cached: int = 0  # of them, not computed
    began_s: float = 0.0  # when the device began with it, monotonic


@message
class StepText:
    """The text of a step. Row i: sequence, its new text (often "": held back or half a character), its new token."""

    step: int
    sequence_ids: Sequence[int]
    texts: Sequence[str]
    token_ids: Sequence[int]
    finishes: Mapping[int, Finish] = field(default_factory=dict)  # row -> how it ended
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # row -> if asked for
    begun: Mapping[int, Begun] = field(default_factory=dict)  # sequence id -> its beginning, when first seen
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    pooled: Sequence[Pooled] = ()  # of sequences that have no row
    progress: Sequence[PromptProgress] = ()


class CallLog(Protocol):
    """Hears of the calls of schedule and allocate, in order. Called on the loop, so it is quick; it changes nothing of
    what it is given, and keeps only messages, which nobody else changes either."""

    def schedule(
        self,
        batch: Sequence[Any],
        causes: Mapping[int, str],
        plans: Sequence[StepPlan],
        failed: Sequence[int],
        is_early: bool,
    ) -> None:
        """Schedule took this batch, and these causes from the control lane; planned so, or not at all as it was too
        early, and gave these sequences up."""

    def allocate(
        self, batch: Sequence[StepPlan | Rates], answers: Sequence[tuple[StepGrant | None, PlanReport]]
    ) -> None:
        """Allocate took this batch and answered its plans so."""

    def reset_prefix_cache(self, num_freed: int) -> None:
        """Somebody reset the prefix cache, which freed so many blocks."""

    def crash(self, stage: str) -> None:
        """A stage crashed in the middle of a call: from here on nothing can be repeated."""


Task = Literal["generate", "embed", "score"]  # score: a number for a pair of texts, from a cross-encoder


_WHERE: dict[Task, str] = {
    "generate": "it generates text: ask /v1/chat/completions or /v1/completions",
    "embed": "it embeds texts: ask /v1/embeddings, /score or /rerank",
    "score": "it scores pairs of texts: ask /score or /rerank",
}


_NOT: dict[Task, str] = {
    "generate": "this model does not generate text",
    "embed": "this model has no embeddings",
    "score": "this model does not read pairs of texts",
}


def task_of(request: Request) -> Task:
    """What a request asks for."""
    if request.pooling is None:
        return "generate"
    return "score" if any(prompt.pair is not None for prompt in request.prompts) else "embed"


def check_task(task: Task, tasks: Collection[Task]) -> None:
    """Raises `Refused` for what is none of the model's `tasks`, and says what they are."""
    if task not in tasks:
        able = "; ".join(_WHERE[name] for name in _WHERE if name in tasks)
        raise Refused(f"{_NOT[task]}; {able}", code="unsupported_task", param="model")
