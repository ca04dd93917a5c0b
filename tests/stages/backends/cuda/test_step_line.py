"""Step submission: what is submitted for a step, in which order, and how its result is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout.step_state import MAX_STOPS
from millrace.stages.backends.cuda.cuda_graphs import CudaGraphs
from millrace.stages.backends.cuda.pinned_ring import PinnedMemory
from millrace.stages.backends.cuda.step_device import ATTENDED, StepMemory
from millrace.stages.backends.cuda.step_submission import StepSubmitter
from millrace.stages.backends.cuda.step_update import EndRules, diff_size
from millrace.stages.device.device import StepSkipped
from millrace.stages.messages import STATES, BlockCopy, Direction, FinishReason, StepGrant, StepTokens
from millrace.stages.testing.scripted.outcomes import Outcomes
from tests.stages.grants import grant, ints, started

ENDS = EndRules((1,), 64)
SLOTS = 4


class Recorded:
    """Streams and their work that record what is submitted: ("stream", "what", of what)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self._num_events = 0

    def stream(self, name: str) -> Any:
        return RecordedStream(name, self.log)

    def event(self) -> Any:
        self._num_events += 1
        return RecordedEvent(str(self._num_events), self.log)

    def wait(self) -> None:
        self.log.append(("host", "wait", "all"))

    def __getattr__(self, name: str) -> Any:
        if name in ("block", "host_block"):
            return lambda block, kind: np.array([f"{name} {block}"])
        return lambda *_: None


class RecordedEvent:
    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self._log = name, log

    def wait(self) -> None:
        self._log.append(("host", "wait", self.name))

    def us_since(self, earlier: Any) -> float:
        return 0.0


class RecordedStream:
    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self._log = name, log

    def launch(self, run: Callable[[], object]) -> None:
        self._log.append((self.name, "launch"))

    def copy(self, destination: Any, source: Any) -> None:
        what = f"{source[0]} -> {destination[0]}" if source.dtype.kind == "U" else f"{len(source)} numbers"
        self._log.append((self.name, "copy", what))

    def record(self, event: RecordedEvent) -> None:
        self._log.append((self.name, "record", event.name))

    def wait(self, event: RecordedEvent) -> None:
        self._log.append((self.name, "wait", event.name))


def pinned(*shape: int) -> PinnedMemory:
    memory = np.zeros(shape, np.int32)
    return PinnedMemory(memory, memory)


def line_on(device: Any, outcomes: Outcomes) -> StepSubmitter:
    size = diff_size(SLOTS, 50, 50)
    memory = StepMemory(
        np.zeros(size, np.int32),
        np.zeros((2, SLOTS), np.int32),
        [pinned(size) for _ in range(2)],
        [pinned(2, SLOTS) for _ in range(3)],
    )
    return StepSubmitter(device, memory, device, CudaGraphs(SLOTS, 64, is_eager=True), ENDS, outcomes)


def submitted(*grants: StepGrant) -> list[tuple[str, ...]]:
    """What is submitted for the last of these steps. Its events are named began, done, copied and swapped."""
    device: Any = Recorded()
    line = line_on(device, Outcomes(SLOTS, ENDS))
    for one in grants:
        device.log.clear()
        step: Any = line.forward(one)
        line.sample(one, step)
    names = {getattr(step, name).name: name for name in ("began", "done", "copied", "swapped")}
    return [tuple(names.get(word, word) for word in entry) for entry in device.log]


def of(log: list[tuple[str, ...]], stream: str) -> list[tuple[str, ...]]:
    return [entry[1:] for entry in log if entry[0] == stream]


FIRST = grant([(0, 0, 3, True)], started=[started(0)], tables=[(0, 0, 5)])
SECOND = grant([(0, 3, 1, True)], step=1)
OUT = BlockCopy(Direction.OUT, ints(7, 8), ints(0, 1))
IN = BlockCopy(Direction.IN, ints(1), ints(9))


def test_a_step_is_one_upload_its_launches_and_one_download_behind_done() -> None:
    log = submitted(FIRST, SECOND)
    compute = of(log, "compute")
    kinds = [entry[0] for entry in compute]
    assert kinds == ["record", "copy", "record", "launch", "launch", "launch", "wait", "launch", "record"]
    assert compute[0] == ("record", "began") and compute[-1] == ("record", "done")
    assert of(log, "results") == [("wait", "done"), ("copy", "2 numbers"), ("record", "copied")]
    assert of(log, "swaps") == []


def test_the_host_waits_for_nothing_but_the_buffer_it_writes() -> None:
    waits = of(submitted(FIRST, SECOND, replace(SECOND, step=2)), "host")
    assert len(waits) == 1 and waits[0][1] not in ("began", "done", "copied", "swapped", "all")


def test_blocks_go_out_after_all_earlier_steps_and_no_step_waits_for_them() -> None:
    log = submitted(FIRST, replace(SECOND, copies=(OUT,)))
    assert of(log, "swaps") == [
        ("wait", "began"),
        ("copy", "block 7 -> host_block 0"),
        ("copy", "block 8 -> host_block 1"),
        ("record", "swapped"),
    ]
    assert ("wait", "swapped") not in of(log, "compute")


def test_a_step_that_gives_a_block_away_waits_until_it_has_been_copied_out() -> None:
    given = grant([(0, 3, 2, True)], step=1, tables=[(0, 1, 8)])
    compute = of(submitted(FIRST, replace(given, copies=(OUT,))), "compute")
    assert compute.index(("wait", "swapped")) < compute.index(("launch",))


def test_blocks_come_in_beside_earlier_steps_and_the_step_that_reads_them_waits() -> None:
    log = submitted(FIRST, replace(SECOND, copies=(IN,)))
    assert of(log, "swaps") == [("copy", "host_block 1 -> block 9"), ("record", "swapped")]
    compute = of(log, "compute")
    assert compute.index(("wait", "swapped")) < compute.index(("launch",))


def test_a_fork_of_a_block_that_comes_in_is_copied_behind_it() -> None:
    fork = BlockCopy(Direction.FORK, ints(9), ints(10))
    compute = of(submitted(FIRST, replace(SECOND, copies=(IN, fork))), "compute")
    assert compute[1:3] == [("wait", "swapped"), ("launch",)]


def test_a_state_is_saved_behind_the_forward_pass_of_its_step_on_the_compute_stream() -> None:
    save = BlockCopy(Direction.SAVE, ints(0), ints(7), STATES)
    usual, log = submitted(FIRST, SECOND), submitted(FIRST, replace(SECOND, copies=(save,)))
    *compute, wait, sampling, done = of(usual, "compute")
    assert wait[0] == "wait" and sampling == ("launch",) and done == ("record", "done")
    assert of(log, "swaps") == [] and of(log, "compute") == [*compute, ("launch",), wait, sampling, done]


def test_a_state_that_comes_in_waits_for_earlier_steps_as_they_may_save_the_one_there() -> None:
    state = replace(IN, destinations=ints(2), kind=STATES)
    log = submitted(FIRST, replace(SECOND, copies=(IN, state)))
    assert of(log, "swaps") == [
        ("copy", "host_block 1 -> block 9"),
        ("wait", "began"),
        ("copy", "host_block 1 -> block 2"),
        ("record", "swapped"),
    ]
    compute = of(log, "compute")
    assert compute.index(("wait", "swapped")) < compute.index(("launch",))


def test_a_step_of_copies_alone_launches_nothing_but_its_news() -> None:
    log = submitted(FIRST, replace(grant([]), step=1, copies=(OUT,)))
    assert of(log, "compute").count(("launch",)) == 1
    assert of(log, "results")[-1] == ("record", "copied")


# -- results that cannot be applied


class Forgetful(Outcomes):
    """Outcomes that fail to apply the result of step 1."""

    def note_tokens(self, grant: StepGrant, told: Any, scores: Any = None) -> StepTokens:
        if grant.step == 1:
            raise ArithmeticError("lost count")
        return super().note_tokens(grant, told, scores)


def test_a_result_that_cannot_be_applied_fails_only_the_wait_for_its_step() -> None:
    line = line_on(Recorded(), Forgetful(SLOTS, ENDS))
    grants = [FIRST, SECOND, replace(SECOND, step=2, starts=ints(4))]
    first, lost, behind = (line.sample(one, line.forward(one)) for one in grants)
    assert first.wait().step == 0
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="lost count"):
            lost.wait()
    assert behind.wait().step == 2
    again = replace(FIRST, step=3, generation=1)
    assert line.sample(again, line.forward(again)).wait().places.tolist() == [0]


def test_no_step_is_attended_after_a_lost_result_until_its_sequences_restart() -> None:
    line = line_on(Recorded(), Forgetful(SLOTS, ENDS))
    for one in (FIRST, SECOND):
        step = line.sample(one, line.forward(one))
    with pytest.raises(StepSkipped, match="step 2 follows one whose result could not be applied"):
        line.attend(replace(SECOND, step=2, starts=ints(4)))
    with pytest.raises(ArithmeticError, match="lost count"):
        step.wait()
    again = line.attend(replace(FIRST, step=3, generation=1))
    assert again.grant is not None and again.grant.step == 3


def test_the_logits_of_a_step_are_read_after_all_results_and_its_own_forward_pass() -> None:
    device: Any = Recorded()
    line = line_on(device, Outcomes(SLOTS, ENDS))
    before: Any = line.sample(FIRST, line.forward(FIRST))
    step = line.forward(SECOND, ATTENDED)
    assert ("host", "wait", before.copied.name) not in device.log, "the forward pass waits for no result"
    device.log.clear()
    line.read(SECOND, step)
    done: Any = step.done
    assert device.log == [
        ("host", "wait", before.copied.name),
        ("compute", "record", done.name),
        ("host", "wait", done.name),
    ]


# -- outcomes


def told(*rows: tuple[int, FinishReason]) -> Any:
    return np.array([[token for token, _ in rows], [int(finish) for _, finish in rows]], np.int32).reshape(2, -1)


GOES_ON, STOP, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH


def test_tokens_get_their_sequence_and_their_place_and_rows_that_were_over_get_none() -> None:
    outcomes = Outcomes(SLOTS, ENDS)
    both = [started(0, (4,), (5, 6)), started(1)]
    first = outcomes.note_tokens(
        grant([(0, 2, 1, True), (1, 0, 3, True)], started=both), told((7, GOES_ON), (8, LENGTH))
    )
    assert (first.sequence_ids.tolist(), first.places.tolist()) == ([100, 101], [2, 0])
    assert first.token_ids.tolist() == [7, 8] and first.finishes.tolist() == [GOES_ON, LENGTH]
    second = outcomes.note_tokens(grant([(0, 3, 1, True), (1, 3, 1, True)], step=1), told((9, GOES_ON), (-1, GOES_ON)))
    assert (second.slots.tolist(), second.places.tolist(), second.token_ids.tolist()) == ([0], [3], [9])


def test_stop_ids_beyond_those_that_the_device_knows_are_found_on_the_host() -> None:
    stops = tuple(range(10, 10 + MAX_STOPS))  # with EOS one too many
    outcomes = Outcomes(SLOTS, ENDS)
    begin = grant([(0, 0, 3, True)], started=[started(0, stop_token_ids=stops, min_tokens=1, max_tokens=9)])
    early = outcomes.note_tokens(begin, told((stops[-1], GOES_ON)))
    assert early.finishes.tolist() == [GOES_ON], "min_tokens comes first"
    assert outcomes.note_tokens(SECOND, told((stops[-1], GOES_ON))).finishes.tolist() == [STOP]
    assert len(outcomes.note_tokens(SECOND, told((5, GOES_ON))).slots) == 0, (
        "the device runs on, and no token is reported"
    )
