"""The device computes the same inputs from a diff as the host from the grant, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout import step_state
from millrace.kernels.layout.sampling_rows import AT
from millrace.kernels.layout.step_state import StepBuffers
from millrace.stages.backends.cuda.step_update import EndRules, diff_size, write
from millrace.stages.execute.model_runner import ModelRunner
from millrace.stages.messages import FinishReason, Ints, StepGrant
from millrace.stages.sample.slot_params import SlotParams
from tests.stages.grants import grant, ints, started
from tests.stages.step_walk import EOS, VOCAB_SIZE, DraftedWalk, Walk, with_drafts

PADDING = 5  # rows and tokens beyond those of a step
ENDS = EndRules((EOS,), 40, short_length=100)
TABLES = ("state", "tokens", "tables")  # of a `SlotState`


class Side:
    """The device's side: its tables, and a step's inputs."""

    def __init__(
        self, walk: Walk | DraftedWalk, capacity: int | None = None, *, has_rope_offsets: bool = False
    ) -> None:
        self.walk = walk
        self.capacity = capacity or diff_size(walk.num_slots, 100, 1000)
        self.diff: Ints = np.full(self.capacity, 77, np.int32)
        sizes = (walk.num_slots, walk.max_model_len, walk.block_size)
        self.slots = step_state.make_slots(full, *sizes, has_rope_offsets=has_rope_offsets, num_kinds=walk.num_kinds)
        self.num_parts = 0

    def inputs(self, of: StepGrant) -> StepBuffers:
        """Sends the grant, and makes its inputs with some padding."""
        for size, _ in write(of, ENDS, self._buffers(), self.walk.num_slots):
            assert size <= self.capacity
            step_state.apply_updates(self.diff, self.slots)
            self.num_parts += 1
        num_rows, num_tokens = max(len(of.slots), len(of.logits_slots)) + PADDING, of.num_computed + PADDING
        buffers = step_state.make_buffers(full, num_rows, num_tokens, self.slots.tables.shape[1], self.walk.num_kinds)
        step_state.make_inputs(self.diff, self.slots, buffers, self.walk.block_size)
        return buffers

    def note_tokens(self, of: StepGrant, buffers: StepBuffers, chosen: list[int]) -> Ints:
        told = np.full((2, len(buffers.lengths)), 77, np.int32)
        ids = np.full(len(buffers.lengths), 44, np.int64)
        ids[: len(chosen)] = chosen
        step_state.note_tokens(told, ids, buffers, self.slots)
        assert (told[0, len(chosen) :] == -1).all() and not told[1, len(chosen) :].any()
        return told[:, : len(chosen)]

    def _buffers(self) -> Iterator[Ints]:
        while True:
            self.diff[:] = 77
            yield self.diff


def full(shape: tuple[int, ...], dtype: str) -> Any:
    return np.full(shape, 77, dtype)


class NoDecoder:
    block_size = 4

    def __init__(self, num_kinds: int = 1) -> None:
        self.blocks_of_kinds = (1000,) * num_kinds


@pytest.mark.parametrize("seed", range(20))
def test_the_inputs_of_a_step_are_those_that_the_runner_makes(seed: int) -> None:
    dice = Random(seed)
    walk = Walk(dice, has_stops=False, num_kinds=1 + seed % 3)
    short_length = ENDS.short_length * (seed % 2)  # rows of the rotary tables before those of long sequences
    side, last_tokens = Side(walk, has_rope_offsets=short_length > 0), np.zeros(walk.num_slots, np.int64)
    runner: Any = ModelRunner(
        NoDecoder(),  # type: ignore[arg-type]
        NoDecoder(walk.num_kinds),  # type: ignore[arg-type]
        last_tokens,
        side.slots.tables.shape[1],
        short_length=short_length,
    )
    rows: set[int] = set()
    for of in walk.steps(30):
        runner.apply_updates(of)
        right, found = runner.inputs(of), side.inputs(of)
        num_rows, num_tokens, num_logits = len(of.slots), of.num_computed, of.num_sampled
        for name in ("input_ids", "positions", "slot_mapping"):
            assert (getattr(found, name)[:num_tokens] == getattr(right, name)).all(), name
        rows.update((right.positions // 100).tolist())
        assert (found.query_starts[: num_rows + 1] == right.query_starts).all()
        assert (found.lengths[:num_rows] == right.lengths).all()
        assert (found.logits_rows[:num_logits] == right.logits_rows).all()
        assert (found.sampled_slots[:num_logits] == of.slots[of.is_sampled]).all()
        for row, length in enumerate(right.lengths.tolist()):
            used = -(-length // walk.block_size)
            assert (found.block_tables[row, :used] == right.block_tables[row, :used]).all()
            assert (found.block_tables[row, used:] == 77).all(), "entries past the length were written"
            for kind in range(1, walk.num_kinds):
                ours, theirs = found.more_tables[kind - 1, row], right.more_kinds[kind - 1].block_tables[row]
                assert (ours[:used] == theirs[:used]).all() and (ours[used:] == 77).all()
        for kind in range(1, walk.num_kinds):
            mapping = found.more_mappings[kind - 1]
            assert (mapping[:num_tokens] == right.more_kinds[kind - 1].slot_mapping).all()
            assert (mapping[:num_tokens] - found.slot_mapping[:num_tokens] == 4000 * kind).all()
            assert (mapping[num_tokens:] == -1).all()
        assert not found.lengths[num_rows:].any() and (found.query_starts[num_rows:] == num_tokens).all()
        assert (found.slot_mapping[num_tokens:] == -1).all() and (found.sampled_slots[num_logits:] == -1).all()
        assert not found.input_ids[num_tokens:].any() and not found.logits_rows[num_logits:].any()

        chosen = [dice.randrange(2, VOCAB_SIZE) for _ in range(num_logits)]
        side.note_tokens(of, found, chosen)
        last_tokens[of.slots[of.is_sampled]] = chosen
        walk.chose(of, chosen)
    assert rows == ({0, 1} if short_length else {0})


def test_the_inputs_of_a_step_with_drafts_are_those_that_the_runner_makes() -> None:
    walk = Walk(Random(0), num_slots=6)
    side, last_tokens = Side(walk), np.zeros(walk.num_slots, np.int64)
    runner: Any = ModelRunner(NoDecoder(), NoDecoder(), last_tokens, side.slots.tables.shape[1])  # type: ignore[arg-type]
    first, drafted = with_drafts(6)
    assert drafted.drafts is not None and drafted.drafts.counts.tolist() == [0, 1, 0, 3, 0, 0]
    for of in (first, drafted):
        runner.apply_updates(of)
        right, found = runner.inputs(of), side.inputs(of)
        num_tokens, num_logits = of.num_computed, len(of.logits_slots)
        for name in ("input_ids", "positions", "slot_mapping"):
            assert getattr(found, name)[:num_tokens].tolist() == getattr(right, name).tolist(), name
        assert found.lengths[: len(of.slots)].tolist() == right.lengths.tolist()
        assert found.logits_rows[:num_logits].tolist() == right.logits_rows.tolist()
        assert found.sampled_slots[:num_logits].tolist() == of.logits_slots.tolist()
        assert (found.sampled_slots[num_logits:] == -1).all()
        if of is first:
            side.note_tokens(of, found, [7] * num_logits)
            last_tokens[:] = 7


@pytest.mark.parametrize("seed", range(20))
def test_sequences_end_on_the_device_where_the_sampling_table_ends_them(seed: int) -> None:
    dice = Random(seed)
    walk = Walk(dice)
    side, table = Side(walk), SlotParams(walk.num_slots, VOCAB_SIZE, walk.max_model_len, [EOS])
    for of in walk.steps(40):
        for one in of.started:
            table.start(one)
        found, slots = side.inputs(of), of.slots[of.is_sampled]
        chosen = [_draw(dice, table, slot) for slot in slots.tolist()]
        told = side.note_tokens(of, found, chosen)
        broken = np.array(chosen, np.intp) < 0
        ids = np.maximum(np.array(chosen, np.intp), 0)
        right = table.note_tokens(slots, table.num_generated[slots], ids, broken)
        assert told[1].tolist() == right.tolist()
        walk.chose(of, [EOS if reason else token for token, reason in zip(chosen, right.tolist(), strict=True)])


def _draw(dice: Random, table: SlotParams, slot: int) -> int:
    """Any token, EOS or a stop id often; below min_tokens none of those, as the sampler forbids them."""
    token = dice.choice([EOS, dice.randrange(2, VOCAB_SIZE), max(2, int(table._end_ids[slot].max())), -1])
    is_early = table.num_generated[slot] < table.min_tokens[slot]
    return 2 if is_early and token in table._end_ids[slot].tolist() and token >= 0 else token


def test_a_row_that_has_finished_keeps_its_place_and_touches_nothing() -> None:
    side = Side(Walk(Random(0)))
    begin = [started(0, max_tokens=1), started(1, max_tokens=9)]
    first = grant([(0, 0, 3, True), (1, 0, 3, True)], started=begin, tables=[(0, 0, 5), (1, 0, 6)])
    told = side.note_tokens(first, side.inputs(first), [7, 8])
    assert told[1].tolist() == [FinishReason.LENGTH, FinishReason.NONE]

    second = grant([(0, 3, 1, True), (1, 3, 1, True)], step=1)
    inputs = side.inputs(second)
    assert inputs.lengths[:2].tolist() == [0, 4] and inputs.slot_mapping[:2].tolist() == [-1, 6 * 4 + 3]
    assert inputs.sampled_slots[:2].tolist() == [-1, 1] and inputs.logits_rows[:2].tolist() == [0, 1]
    before = side.slots.state[0].copy()
    told = side.note_tokens(second, inputs, [9, 9])
    assert told.tolist() == [[-1, 9], [FinishReason.NONE, FinishReason.NONE]]
    assert (side.slots.state[0] == before).all() and side.slots.tokens[0, :4].tolist() == [1, 2, 3, 7]


def test_a_slot_that_is_given_away_begins_anew() -> None:
    side = Side(Walk(Random(0)))
    for step in range(2):
        of = grant([(0, 0, 3, True)], step=step, started=[started(0, max_tokens=1)], tables=[(0, 0, 5 + step)])
        inputs = side.inputs(of)
        assert inputs.lengths[0] == 3 and inputs.slot_mapping[:3].tolist() == [4 * (5 + step) + i for i in range(3)]
        assert side.note_tokens(of, inputs, [7]).tolist() == [[7], [FinishReason.LENGTH]]


@pytest.mark.parametrize("room", [0, 1, 7, 40])
def test_a_diff_that_does_not_fit_its_buffer_goes_in_parts(room: int) -> None:
    walk = Walk(Random(3), num_slots=6, has_stops=False)
    whole, parts = Side(walk), Side(walk, capacity=diff_size(6, 2, room))
    for of in walk.steps(20, only_decode=0.2):
        one, many = whole.inputs(of), parts.inputs(of)
        for name in StepBuffers.__slots__:
            assert (getattr(one, name) == getattr(many, name)).all(), name
        for name in TABLES:
            assert (getattr(whole.slots, name) == getattr(parts.slots, name)).all(), name
        chosen = [3] * of.num_sampled
        for side, inputs in ((whole, one), (parts, many)):
            side.note_tokens(of, inputs, chosen)
        walk.chose(of, chosen)
    assert parts.num_parts > whole.num_parts


def test_a_steady_step_of_256_rows_sends_four_kilobytes() -> None:
    rows = [(slot, 100 + slot, 1, True) for slot in range(256)]
    buffer = np.zeros(diff_size(256, 256, 2048), np.int32)
    ((size, is_last),) = write(grant(rows), ENDS, iter([buffer]))
    assert is_last and 4 * size == 4 * (step_state.HEADER + 4 * 256 + 1) == 4164


def test_what_a_sequence_asked_for_stands_in_its_row_bit_by_bit() -> None:
    one = started(2, (4, 5), (6,), seed=0xFEDC_BA98_7654_3210, temperature=0.7, top_k=9, top_p=0.25, max_tokens=8)
    side = Side(Walk(Random(0)))
    side.inputs(grant([(2, 0, 3, True)], started=[one], tables=[(2, 0, 1)]))
    row = side.slots.state[2]
    seed = row[[step_state.SEED_LOW, step_state.SEED_HIGH]].copy().view(np.uint64)
    assert seed[0] == 0xFEDC_BA98_7654_3210
    draw = row[step_state.DRAW :]
    floats = draw[[AT["temperature"], AT["top_p"], AT["min_p"]]].copy().view(np.float32)
    assert floats.tolist() == [np.float32(0.7), 0.25, 0.0]
    assert draw[AT["top_k"]] == 9 and row[step_state.LIMIT] == 10 and row[step_state.TOKENS] == 3
    assert side.slots.tokens[2, :3].tolist() == ints(4, 5, 6).tolist()
