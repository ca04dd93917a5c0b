"""The format of recordings: JSON lines with inputs and decisions of schedule and allocate.

    {"millrace_recording": 3, "began_wall_s": ..., "began_s": ..., "tokens": "hidden", "engine": {...},
     "repeats": {"least": 2, "most": 6}}
    {"t": 1.25, "schedule": {"in": [{"add": {...}}, {"done": {...}}, {"report": 7}, {"guess": {...}}],
                             "lane": [[3, "cancel"]], "plans": [{...}], "failed": [], "is_early": true,
                             "repeats": [{"sequence_id": 3, "counts": [...], "found": [...], "right": [...]}]}}
    {"t": 1.25, "allocate": {"rates": [[copy_s, compute_s]], "answers": [{"report": {...}, "grant": {...}}]}}
    {"t": 1.25, "reset_prefix_cache": 12}
    {"t": 9.00, "end": "closed"}

One line is one call of a stage's `handle`. `t` is in seconds since the recording began; `arrival_s` of a request is on
the engine's clock, which was at `began_s` then. A message is an object with the fields of `stages/messages.py`. A field
with the same value as in the last message of its kind is left out (`UnchangedFields`). Positions and places are written
minus the step's number, so that decoding rows do not change.

Token ids are masked: the numbers show which texts are equal, not their content (`token_masking.py`), unless plain ids
were requested. Of guesses and drafts only the number of tokens is written: decisions depend on nothing else. Whether a
plan waits depends on clocks; `is_early` records it, and is left out if false.

Where the engine may draft, each sequence that ends is recorded with how it repeats earlier text (`repetition.py`), or
left out if it does not. The first line has the least and most last tokens that the search used. No decision depended on
it; a simulation drafts by it.

This file encodes and decodes messages, and `recorded_engine.py` the engine of the first line. `writer.py` writes files
and `reader.py` reads them. Values read are checked.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..messages import (
    AdapterRef,
    Guess,
    Indices,
    Ints,
    PlanReport,
    StepDone,
    StepGrant,
    StepPlan,
    StepVoid,
    TokenRequest,
)
from ..params import SamplingParams
from ..pooling_params import KINDS, PoolingParams
from .field_values import Fields, InvalidValue, MessageFields, shown
from .recorded_engine import RecordedEngine

VERSION = 3  # of the format; the reader refuses any other


class UnchangedFields:
    """Leaves out fields that are equal in the last message of the same kind, and puts them back."""

    def __init__(self) -> None:
        self._last: dict[str, Fields] = {}

    def leave_out(self, kind: str, message: Fields) -> Fields:
        """The fields of `message` that changed."""
        last, self._last[kind] = self._last.get(kind, {}), message
        return {name: value for name, value in message.items() if name not in last or not _is_same(last[name], value)}

    def put_back(self, kind: str, new: Mapping[str, Any]) -> Fields:
        """All fields again."""
        message = self._last[kind] = {**self._last.get(kind, {}), **new}
        return message

    def copy(self) -> UnchangedFields:
        """A copy with the same state."""
        other = UnchangedFields()
        other._last = dict(self._last)
        return other


def plain(message: Fields) -> Fields:
    """The fields with lists instead of arrays, as they are read back."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in message.items()}


def _is_same(one: Any, other: Any) -> bool:
    """Equality, by identity first.

    Rows that go on decoding mostly have the array objects of the step before.
    """
    if one is other:
        return True
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    return bool(one == other)


# -- decisions


def plan_fields(plan: StepPlan) -> Fields:
    """The fields of a plan."""
    return {
        "step": plan.step,
        "generation": plan.generation,
        "completed_step": plan.completed_step,
        "slots": plan.slots,
        "num_wanted": plan.num_wanted,
        "reaches_end": bool(plan.reaches_end.all()),
        "token_budget": plan.token_budget,
        "victims": plan.victims,
        "num_victims": plan.num_victims,
        "num_reserved": None if plan.num_reserved is None else plan.num_reserved,
        "is_decode": plan.is_decode,
        "allows_partial": plan.allows_partial,
        "num_drafts": None if plan.drafts is None else plan.drafts.counts,
        "accepted": [list(each) for each in plan.accepted],
        "started": [
            [each.slot, each.sequence_id, len(each.token_ids), *([each.adapter_slot] if each.adapter_slot else ())]
            for each in plan.started
        ],
        "ended": list(plan.ended),
        "preempted": list(plan.preempted),
        "dropped": list(plan.dropped),
        "discarded": list(plan.discarded),
        "settled": [done.step for done in plan.settled],
        "voided": list(plan.voided),
        "adapter_loads": [list(each) for each in plan.adapter_loads],
    }


def report_fields(report: PlanReport) -> Fields:
    """The fields of a report."""
    return {
        "step": report.step,
        "num_granted": report.num_granted,
        "num_cached": report.num_cached,
        "preempted": list(report.preempted),
        "num_free": report.num_free,
        "num_quarantined": report.num_quarantined,
        "num_host_free": report.num_host_free,
        "num_host_quarantined": report.num_host_quarantined,
        "swapped": [[slot, num_tokens] for slot, num_tokens in report.swapped.items()],
        "is_void": report.is_void,
        "is_reset": report.is_reset,
    }


def grant_fields(grant: StepGrant, *, has_kinds: bool = False) -> Fields:
    """The fields of a grant. `has_kinds`: with those of kinds of memory after the first."""
    more: Fields = {}
    if has_kinds:
        more["more_tables"] = [
            [each.kind, each.slots.tolist(), each.places.tolist(), each.blocks.tolist()] for each in grant.more_tables
        ]
    return more | {
        "step": grant.step,
        "generation": grant.generation,
        "slots": grant.slots,
        "starts_less_step": (grant.starts - grant.step),
        "num_tokens": grant.num_tokens,
        "is_sampled": grant.is_sampled,
        "table_slots": grant.table_slots,
        "table_places": grant.table_places,
        "table_blocks": grant.table_blocks,
        "is_decode": grant.is_decode,
        "num_drafts": None if grant.drafts is None else grant.drafts.counts,
        "started": [[each.slot, each.sequence_id, each.num_cached, each.num_shared] for each in grant.started],
        "copies": [
            [
                int(copy.direction),
                copy.sources.tolist(),
                copy.destinations.tolist(),
                *([copy.kind] if copy.kind else ()),
            ]
            for copy in grant.copies
        ],
        "adapter_loads": [list(each) for each in grant.adapter_loads],
    }


# -- inputs of schedule


def done_fields(done: StepDone, token_ids: Ints | None) -> Fields:
    """The fields of a step's outcome.

    `token_ids` replace its own; None if there is no prefix cache.
    """
    return {
        "step": done.step,
        "slots": done.slots,
        "sequence_ids": done.sequence_ids,
        "places_less_step": (done.places - done.step),
        "finished": np.flatnonzero(done.is_finished),
        "most_tokens": done.most_tokens,
        "token_ids": None if token_ids is None else to_base64(token_ids),
        "took_us": done.took_us,
        "failed_loads": list(done.failed_loads),
    }


def guess_fields(guess: Guess) -> Fields:
    """The fields of a guess, without its tokens, which schedule does not read."""
    return {
        "slot": guess.slot,
        "sequence_id": guess.sequence_id,
        "num_known": guess.num_known,
        "num_tokens": len(guess.token_ids),
        "is_sure": guess.is_sure,
    }


def void_fields(void: StepVoid) -> Fields:
    """The fields of a void step, without the error, which schedule does not read."""
    return {"step": void.step, "generation": void.generation}


def add_fields(request: TokenRequest, token_ids: Ints | None, salt: str) -> Fields:
    """The fields of a prompt, with these instead of its token ids and its salt."""
    params = request.params
    adapter: dict[str, Any] = {} if request.adapter is None else {"adapter": request.adapter.digest}
    if request.adapter is not None and request.adapter.pinned:
        adapter["pinned_adapters"] = list(request.adapter.pinned)
    return adapter | {
        "request_id": request.request_id,
        "prompt_index": request.prompt_index,
        "first_sequence_id": request.first_sequence_id,
        "num_prompt": len(request.token_ids),
        "token_ids": None if token_ids is None else to_base64(token_ids),
        "n": params.n,
        "max_tokens": params.max_tokens,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "priority": request.priority,
        "arrival_s": request.arrival_s,
        "cache_salt": salt,
        "num_expected_cached": request.num_expected_cached,
        "pooling": None if request.pooling is None else str(request.pooling.kind),
    }


def to_base64(token_ids: Ints) -> str:
    """As int32, little-endian."""
    return base64.b64encode(token_ids.astype("<i4").tobytes()).decode()


# -- what is read back


def read_done(values: Mapping[str, Any], engine: RecordedEngine) -> StepDone:
    """A step's outcome."""
    given = MessageFields("done", values)
    step = given.whole("step")
    slots = given.wholes("slots", engine.max_num_seqs - 1)
    count = len(slots)
    sequence_ids = given.wholes("sequence_ids", 2**53)
    places = _indices(given.wholes("places_less_step", engine.max_model_len, -(2**31))) + step
    most_tokens = MessageFields("done", {"most_tokens": 1, **values}).whole("most_tokens", 1, engine.block_size)
    most_rows = max(Counter(slots).values(), default=0)
    if len(sequence_ids) != count or len(places) != count or most_rows > most_tokens:
        raise InvalidValue(
            "done: must have a slot, a sequence and a place for each row, and no slot more than most_tokens times"
        )
    if count and (int(places.min()) < 0 or int(places.max()) >= engine.max_model_len):
        raise InvalidValue(f"done: places must be from 0 to {engine.max_model_len - 1}")
    is_finished = np.zeros(count, np.bool_)
    is_finished[given.wholes("finished", count - 1)] = True
    token_ids = given.tokens("token_ids", count).astype(np.intp)
    columns = (_indices(slots), np.array(sequence_ids, np.int64), places, token_ids, is_finished)
    failed = MessageFields("done", {"failed_loads": [], **values}).texts("failed_loads", 64)
    return StepDone(step, *columns, most_tokens, given.whole("took_us", 0, 2**53), failed)


def read_guess(values: Mapping[str, Any], engine: RecordedEngine) -> Guess:
    """A guess. Its tokens are zeros: only their number was recorded."""
    given = MessageFields("guess", values)
    return Guess(
        given.whole("slot", 0, engine.max_num_seqs - 1),
        given.whole("sequence_id", 0, 2**53),
        given.whole("num_known", 1, engine.max_model_len),
        np.zeros(given.whole("num_tokens", 0, engine.most_drafts), np.intp),
        given.flag("is_sure"),
    )


def read_void(values: Mapping[str, Any]) -> StepVoid:
    """A void step."""
    given = MessageFields("void", values)
    return StepVoid(given.whole("step"), given.whole("generation"), None)


def read_add(values: Mapping[str, Any], engine: RecordedEngine) -> TokenRequest:
    """A prompt."""
    given = MessageFields("add", values)
    pooling = given.values.get("pooling")
    if pooling not in (None, "None", *KINDS):
        raise InvalidValue(f"add.pooling = {shown(pooling)}: must be null or one of {', '.join(KINDS)}")
    longest = engine.max_model_len - (pooling is None)
    params = SamplingParams(
        n=given.whole("n", 1, 128),
        max_tokens=None if given.values.get("max_tokens") is None else given.whole("max_tokens"),
        prompt_logprobs=0 if given.flag("prompt_logprobs") else None,
    )
    return TokenRequest(
        given.text("request_id"),
        given.whole("prompt_index"),
        given.tokens("token_ids", given.whole("num_prompt", 1, longest)),
        params,
        given.whole("first_sequence_id", 0, 2**53),
        given.whole("priority", -(2**63), 2**63),
        given.number("arrival_s", -1e12),
        given.text("cache_salt"),
        given.whole("num_expected_cached", -(2**31)),
        None if pooling is None else PoolingParams(kind=None if pooling == "None" else pooling),
        adapter=_read_adapter(given, engine),
    )


def _read_adapter(given: MessageFields, engine: RecordedEngine) -> AdapterRef | None:
    """The adapter of a prompt, without its name, which is not recorded."""
    if "adapter" not in given.values:
        return None
    digest = given.text("adapter", 64)
    if not digest or not engine.max_loras:
        raise InvalidValue(
            f"add.adapter = {shown(digest)}: must be a digest, in an engine with max_loras of at least 1"
        )
    pinned = given.values.get("pinned_adapters", [])
    if not isinstance(pinned, list) or not all(isinstance(each, str) and 0 < len(each) <= 64 for each in pinned):
        raise InvalidValue(f"add.pinned_adapters = {shown(pinned)}: must be a list of digests")
    return AdapterRef("", digest, tuple(pinned))


def _indices(values: Sequence[int]) -> Indices:
    return np.array(values, np.intp)
