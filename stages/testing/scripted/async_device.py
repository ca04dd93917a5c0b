"""The asynchronous scripted device: the script of `device.py` on simulated streams.

Steps go through the real `StepSubmitter`. `ScriptedModel` computes a step when it is called. This one is launched,
copied to and waited for as a GPU is, on streams that run as late and in as unusual an order as events allow. It keeps
token ids where a GPU keeps keys and values. It reads each history back by the inputs that the `StepSubmitter` made, and
chooses tokens by what it read. So a missing wait, or a block that is reused too early, changes an answer or is
reported as a violation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....kernels.layout import step_state
from ....kernels.layout.step_state import StepBuffers
from ....runtime.device_streams.simulated import SimStreams
from ....runtime.env.env import Env
from ...backends.cuda.async_device import AsyncDevice
from ...backends.cuda.cuda_graphs import CudaGraphs, most_rows
from ...backends.cuda.guide_uploads import NUM_GUIDES
from ...backends.cuda.pinned_ring import PinnedMemory
from ...backends.cuda.step_device import ATTENDED, SPARE_STEPS, StepMemory
from ...backends.cuda.step_submission import StepSubmitter, SubmittedStep
from ...backends.cuda.step_update import EndRules, diff_size, num_logits
from ...messages import Ints, StepGrant, StepTokens
from ...outputs import GraphBatch
from ...sample.draft_acceptance import DraftRuns
from .byte_tokenizer import EOS
from .device import LONG, ScriptedModel
from .outcomes import Outcomes
from .script import Hashes, Script, hash_rows

# One value of each is drawn at random.
NUM_DIFFS = (1, 2, 3)  # pinned buffers to upload diffs from
OTHER_KINDS = (0.0, 0.0, 0.2)  # share of steps with a kind of sampling that no graph has
ATTENDED_SHARES = (0.0, 0.0, 0.0, 0.2)  # share of attended steps, see `step_submission.py`
GUIDED_SHARES = (0.0, 0.0, 0.3)  # share of steps with a guide, see `guide_uploads.py`
DIFF_ITEMS = (0, 8, 100)  # known tokens and new blocks that fit one diff; more are sent in several parts

PLAIN, OTHER, GUIDED, FREE = 0, 1, 2, 3  # kinds of sampling; OTHER has no graph, FREE a guide that needs no tokens


class AsyncScriptedModel(ScriptedModel):
    """A scripted runner and sampler that submit steps to `line`.

    Supports scripts without `answer`, and requests without pooling or prompt scores. At most `num_steps` steps are in
    flight, of at most `max_step_tokens` tokens, or `num_verified_tokens` with drafts.

    Random choices come from the env's random streams: "streams" for delays and the use of graphs, "attended" for
    attended steps, "guides" for guided ones, and "kinds" for steps sampled without a graph.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        script: Script,
        env: Env,
        num_host_blocks: int = 0,
        *,
        num_steps: int,
        max_step_tokens: int,
        num_verified_tokens: int = 0,
        num_lanes: int = 1,
    ) -> None:
        super().__init__(num_blocks, block_size, num_slots, max_model_len, script, env, 0.0, num_host_blocks, num_lanes)
        assert script.answer is None, "an asynchronous script has no answer"
        dice = env.random("streams")
        self._dice = env.random("attended")
        self._attended_share = self._dice.choice(ATTENDED_SHARES)
        self._kind_dice = env.random("kinds")
        self._other_share = self._kind_dice.choice(OTHER_KINDS)
        self._guide_dice = env.random("guides")
        self._guided_share = self._guide_dice.choice(GUIDED_SHARES)
        self.num_guided = 0  # steps
        is_eager = dice.random() < 0.3
        self.streams = SimStreams(dice, laziness=dice.choice((0.0, 0.5, 0.9)))
        has_guides = self._guided_share > 0
        kinds = (PLAIN, GUIDED, FREE) if has_guides else (PLAIN,)
        graphs = CudaGraphs(num_slots, max_step_tokens, num_verified_tokens, is_eager=is_eager, kinds=kinds)
        num_rows = most_rows(num_slots, num_verified_tokens)
        size = max(max_step_tokens, *(batch.num_tokens for batch in graphs.batches), 0)
        num_items = dice.choice(DIFF_ITEMS)
        capacity = diff_size(num_slots, num_entries=2 + num_items, num_tokens=num_items)
        memory = StepMemory(
            np.zeros(capacity, np.int32),
            np.zeros((2, num_rows), np.int32),
            [_pinned(capacity) for _ in range(dice.choice(NUM_DIFFS))],
            [_pinned(2, num_rows) for _ in range(num_steps + SPARE_STEPS)],
            guide=np.zeros(num_rows, np.int32) if has_guides else None,
            guides=[_pinned(num_rows) for _ in range(NUM_GUIDES if has_guides else 0)],
        )
        ends = EndRules((EOS,), max_model_len, LONG if script.short_length else 0)
        self.work = ScriptedDeviceWork(self, memory, self._cache, self._host, max_model_len, num_slots, num_rows, size)
        self.outcomes = ScriptedOutcomes(num_slots, ends, self.is_fault)
        self.line = StepSubmitter(self.streams, memory, self.work, graphs, ends, self.outcomes)
        if not is_eager:
            self.line.capture(env.now)

    def forward(self, grant: StepGrant) -> Any:
        """Submits the forward pass.

        Faults strike after that: their error must be reported when the step ends.
        """
        self._check_stream(grant)
        is_attended = len(grant.slots) > 0 and self._dice.random() < self._attended_share
        kind = OTHER if self._kind_dice.random() < self._other_share else PLAIN
        if len(grant.slots) and self._guide_dice.random() < self._guided_share:
            kind = FREE if self._guide_dice.random() < 0.4 else GUIDED
        if is_attended and self._dice.random() < 0.5:
            step = self._attend(grant)
        else:
            step = self.line.forward(grant, ATTENDED if is_attended else kind)
        for copy in grant.copies:
            if self.is_fault("device.copy"):
                raise MemoryError(f"the scripted device stopped after copies {copy.direction.name}")
        if self.is_fault("device.out_of_memory"):
            raise MemoryError("the scripted device is out of memory")
        self.num_steps += 1
        self.max_batched_tokens = max(self.max_batched_tokens, grant.num_computed)
        return step

    def sample(self, grant: StepGrant, logits: Any) -> Any:
        """Submits the sampling of a step."""
        self._check_stream(grant)
        if logits.kind == GUIDED:
            self.line.await_results(grant)
        if logits.kind != ATTENDED:
            guide = partial(self._write_guide, grant, logits.kind) if logits.kind in (GUIDED, FREE) else None
            self.num_guided += guide is not None
            return self.line.sample(grant, logits, guide)
        if logits.logits is None:
            self.line.read(grant, logits)
        self.work.sample(logits.logits or logits.batch, 0)
        result = self.work.result[:, : num_logits(grant)].copy()
        return self.line.attended(logits, self.line.outcomes.note_tokens(grant, result))

    def _write_guide(self, grant: StepGrant, kind: int, guide: Ints) -> int:
        """Writes a number for each row of logits, which the device compares with its tables: see `guide_of`."""
        slots, runs = grant.logits_slots, DraftRuns.of(grant)
        counts = self.outcomes.num_generated.copy()
        for started in grant.started:
            counts[started.slot] = len(started.token_ids) - started.num_prompt
        guide[: len(slots)] = guide_of(slots, counts[slots] + (0 if runs is None else runs.offsets), kind)
        return len(slots)

    def _check_stream(self, grant: StepGrant) -> None:
        """Checks that the calling thread uses the compute stream.

        A real model writes tables and computes attended steps on the current stream of the thread.
        """
        if self.streams.used != "compute":
            self.violations.append(f"step {grant.step} comes from a thread that uses stream {self.streams.used}")

    def _attend(self, grant: StepGrant) -> SubmittedStep:
        """Computes the forward pass of an attended step at once, as a plain runner does.

        This reveals work that is still in progress.
        """
        step = self.line.attend(grant)
        num_rows = max(len(grant.slots), num_logits(grant))
        batch = GraphBatch(num_rows, grant.num_computed, bool((grant.num_tokens == 1).all()))
        self.work.make_inputs(batch)
        self.work.forward(batch)
        step.logits = batch
        return step

    def logprobs_of(self, grant: StepGrant, tokens: StepTokens) -> StepTokens:
        """The step's tokens, with invented log-probabilities for rows that request them."""
        for started in grant.started:
            self._params[started.slot] = started.params
            self._has_extras[started.slot] = started.params.logprobs is not None
        return replace(tokens, logprobs=self._logprobs(tokens.slots, tokens.token_ids))


class ScriptedOutcomes(Outcomes):
    """As `Outcomes`, with the fault point `device.note_tokens`: applying a step's result may fail."""

    def __init__(self, num_slots: int, ends: EndRules, is_fault: Callable[[str], bool]) -> None:
        super().__init__(num_slots, ends)
        self._is_fault = is_fault

    def note_tokens(self, grant: StepGrant, result: Ints, scores: Ints | None = None) -> StepTokens:
        if self._is_fault("device.settle"):
            raise ArithmeticError(f"the host could not apply the result of step {grant.step}")
        return super().note_tokens(grant, result, scores)


class ScriptedDeviceWork:
    """The `DeviceWork` of the scripted device. `model` has the script, and collects violations."""

    def __init__(
        self,
        model: AsyncScriptedModel,
        memory: StepMemory,
        cache: Ints,
        host: Ints,
        max_model_len: int,
        num_slots: int,
        num_rows: int,
        max_step_tokens: int,
    ) -> None:
        self._model, self._memory, self._cache, self._host = model, memory, cache, host  # [N, B], [H, B] token ids
        self._block_size = cache.shape[1]
        self._has_long = model.script.short_length > 0
        sizes = (num_slots, max_model_len, self._block_size)
        self.slots = step_state.make_slots(np.zeros, *sizes, has_rope_offsets=self._has_long)
        self._inputs = step_state.make_buffers(np.zeros, num_rows, max_step_tokens, self.slots.tables.shape[1])
        self._read: Hashes = np.zeros(num_rows, np.uint64)  # hash read by each row of logits, in place of them
        self._wanted: Hashes = np.zeros(num_rows, np.uint64)  # the expected hash
        self._factors = model._factors

    @property
    def result(self) -> Ints:
        """[2, P] the result of the last step, on the device."""
        result: Ints = self._memory.result
        return result

    def apply_updates(self) -> None:
        step_state.apply_updates(self._memory.diff, self.slots)

    def make_inputs(self, batch: GraphBatch) -> None:
        step_state.make_inputs(self._memory.diff, self.slots, self._part(batch), self._block_size)

    def forward(self, batch: GraphBatch) -> None:
        """Writes tokens to the places in the inputs, and reads the histories of sampled rows."""
        inputs = self._part(batch)
        written = (inputs.slot_mapping >= 0).nonzero()[0]
        places = inputs.slot_mapping[written]
        if len(np.unique(places)) != len(places):
            self._complain(f"writes two tokens to one place: {sorted(places.tolist())}")
        self._check_goes_on(np.searchsorted(inputs.query_starts, written, side="right") - 1)
        keys = inputs.input_ids[written]
        if self._has_long:
            keys = keys + inputs.positions[written] // LONG * LONG
        self._cache[places // self._block_size, places % self._block_size] = keys
        sampled = (inputs.sampled_slots >= 0).nonzero()[0]
        self._read[sampled] = self._histories(inputs, sampled)
        slots, counts = inputs.sampled_slots[sampled], self._counts(inputs, sampled)
        self._wanted[sampled] = hash_rows(self.slots.tokens[slots], counts, self._factors)

    def sample(self, batch: GraphBatch, kind: int) -> None:
        """Chooses tokens by the hashes read, and checks that the histories have not changed since."""
        inputs = self._part(batch)
        rows = (inputs.sampled_slots >= 0).nonzero()[0]
        slots = inputs.sampled_slots[rows]
        for found, when in ((self._read[rows], "read"), (self._histories(inputs, rows), "left")):
            wrong = slots[found != self._wanted[rows]]
            if len(wrong):
                self._complain(f"{when} another history of slots {wrong.tolist()} than their tokens are")
        if kind in (GUIDED, FREE):
            self._check_guide(inputs, rows, kind)
        chosen = np.full(batch.num_rows, EOS, np.int64)  # arbitrary for rows that are not sampled
        chosen[rows] = self._choose(self.slots.state[slots], self._counts(inputs, rows), self._read[rows])
        if len(rows) and self._model.is_fault("device.nan_row"):
            chosen[rows[0]] = -1
        step_state.note_tokens(self._memory.result[:, : batch.num_rows], chosen, inputs, self.slots)

    def _counts(self, inputs: StepBuffers, rows: NDArray[np.intp]) -> Ints:
        """[n] tokens of each row's sequence up to this row: those that are known, and drafts."""
        slots, is_start = inputs.sampled_slots[rows], np.append(True, inputs.runs[:-1] <= 1)
        at = np.arange(len(is_start))
        offsets = at - np.maximum.accumulate(np.where(is_start, at, 0))
        counts: Ints = self.slots.state[slots, step_state.TOKENS] + offsets[rows]
        return counts

    def _check_guide(self, inputs: StepBuffers, rows: NDArray[np.intp], kind: int) -> None:
        """Checks that the guide was written for these rows, and knows all tokens of their answers."""
        slots, guide = inputs.sampled_slots[rows], self._memory.guide[rows]
        counts = self._counts(inputs, rows) - self.slots.state[slots, step_state.PROMPT]
        wrong = slots[guide != guide_of(slots, counts, kind)]
        if len(wrong):
            self._complain(f"reads a guide for slots {wrong.tolist()} that is none of theirs, or too old")

    def fork(self, sources: Ints, destinations: Ints, kind: int) -> None:
        self._cache[destinations] = self._cache[sources]
        self._model.num_forked += len(sources)

    def block(self, block: int, kind: int) -> Any:
        return self._cache[block]

    def host_block(self, block: int, kind: int) -> Any:
        self._model.num_copied += 1
        return self._host[block]

    def _part(self, batch: GraphBatch) -> StepBuffers:
        return self._inputs.of(batch.num_rows, batch.num_tokens)

    def _choose(self, state: Ints, count: Ints, contexts: Hashes) -> NDArray[np.intp]:
        seeds = np.ascontiguousarray(state[:, [step_state.SEED_LOW, step_state.SEED_HIGH]]).view(np.uint64)[:, 0]
        seeds = np.where(state[:, step_state.TEMPERATURE] == 0, np.uint64(0), seeds)
        may_end = (state[:, step_state.STOPS :] == EOS).any(1) & (count >= state[:, step_state.LEAST])
        places = (count - state[:, step_state.PROMPT]).astype(np.intp)
        return self._model.script.next_tokens(contexts, seeds, places, may_end).astype(np.intp)

    def _histories(self, inputs: StepBuffers, sampled: NDArray[np.intp]) -> Hashes:
        """[n] hashes of the cache's contents for the rows of these logits."""
        if not len(sampled):
            return np.zeros(0, np.uint64)
        rows = np.searchsorted(inputs.query_starts, inputs.logits_rows[sampled], side="right") - 1
        lengths = inputs.next_positions[sampled]
        width = -(-int(lengths.max()) // self._block_size)
        history = self._cache[inputs.block_tables[rows, :width]].reshape(len(rows), -1)
        if self._has_long:
            history = history - inputs.positions[inputs.logits_rows[sampled], None] // LONG * LONG
        return hash_rows(history, lengths, self._factors)

    def _check_goes_on(self, rows: NDArray[np.intp]) -> None:
        """Checks that none of these rows, which write keys and values, has finished."""
        diff = self._memory.diff
        at = diff[step_state.ROWS_AT]
        slots = diff[at : at + diff[step_state.NUM_ROWS]][np.unique(rows)]
        over = slots[self.slots.state[slots, step_state.FINISHED] != step_state.GOES_ON]
        if len(over):
            self._complain(f"writes keys and values of slots {over.tolist()}, which have finished")

    def _complain(self, what: str) -> None:
        self._model.violations.append(f"a launched step {what}")


class AsyncScriptedDevice(AsyncDevice):
    """As `ScriptedDevice`, but asynchronous."""

    def __init__(self, model: AsyncScriptedModel) -> None:
        super().__init__(model.line)
        self.model = model

    def forward(self, grant: StepGrant, forward: Callable[[StepGrant], Any]) -> asyncio.Future[Any]:
        self.model.announce(grant)
        return super().forward(grant, forward)

    def _finish(self, grant: StepGrant, submitted: asyncio.Future[SubmittedStep]) -> StepTokens:
        try:
            return self.model.logprobs_of(grant, super()._finish(grant, submitted))
        finally:
            self.model.complete(grant)


def _pinned(*shape: int) -> PinnedMemory:
    memory = np.zeros(shape, np.int32)
    return PinnedMemory(memory, memory)


def guide_of(slots: NDArray[Any], counts: NDArray[Any], kind: int) -> NDArray[Any]:
    """[n] the guides of rows whose answers have these numbers of tokens."""
    guides: NDArray[Any] = slots if kind == FREE else (counts + 1) * 4096 + slots
    return guides
