"""Which graph runs which step: sizes, padding, the order of capture, and steps that none fits."""

from __future__ import annotations

from itertools import count, pairwise
from random import Random
from typing import Any

import pytest

from millrace.runtime.device_streams.simulated import SimStreams
from millrace.runtime.env.log import captured_logs
from millrace.stages.backends.cuda.build import form_batches
from millrace.stages.backends.cuda.cuda_graphs import DECODE_ROWS, MIXED_TOKENS, CudaGraphs, batches_of, most_rows
from millrace.stages.errors import ConfigError
from millrace.stages.outputs import GraphBatch


class Recorder:
    """What was launched, in order."""

    def __init__(self) -> None:
        self.device = SimStreams(Random(0))
        self.stream = self.device.stream("compute")
        self.launched: list[tuple[str, GraphBatch]] = []
        self.captured: list[GraphBatch] = []

    def capture(self, graphs: CudaGraphs) -> None:
        ticks = count()
        self.report = graphs.capture(self.stream, self.forward, self.sample, lambda: float(next(ticks)), lambda: 77)

    def forward(self, batch: GraphBatch) -> None:
        self.captured.append(batch)
        self.stream.launch(lambda: self.launched.append(("forward", batch)))

    def sample(self, batch: GraphBatch, kind: int) -> None:
        self.stream.launch(lambda: self.launched.append(("sample", batch)))


class Tight(Recorder):
    """A device with memory for so many tokens of captured steps in all, as long as their graphs live."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.graphs: CudaGraphs | None = None

    def forward(self, batch: GraphBatch) -> None:
        assert self.graphs is not None
        if batch.num_tokens + sum(size.num_tokens for size in self.graphs._captured) > self.num_tokens:
            raise RuntimeError("CUDA error: operation failed due to a previous error") from MemoryError("out of memory")
        super().forward(batch)


def captured(max_num_seqs: int = 256, max_num_tokens: int = 2048, **options: Any) -> tuple[CudaGraphs, Recorder]:
    graphs, recorder = CudaGraphs(max_num_seqs, max_num_tokens, **options), Recorder()
    recorder.capture(graphs)
    return graphs, recorder


@pytest.mark.parametrize(
    ("rows", "padded"),
    [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (33, 48), (97, 128), (225, 256), (256, 256), (257, 320), (900, 1000)],
)
def test_a_decode_step_runs_in_the_smallest_graph_that_holds_it(rows: int, padded: int) -> None:
    graphs, _ = captured(max_num_seqs=1000)
    batch, found = graphs.choose(rows, rows, True)
    assert batch == GraphBatch(padded, padded, True) and found is not None
    assert (graphs.num_replayed, graphs.num_eager) == (1, 0)


@pytest.mark.parametrize(("tokens", "padded"), [(2, 64), (64, 64), (65, 128), (700, 768), (1024, 1024)])
def test_a_mixed_step_is_padded_to_tokens_with_room_for_few_rows_or_for_all(tokens: int, padded: int) -> None:
    graphs, _ = captured()
    for rows, room in ((2, 16), (16, 16), (17, 256)):
        batch, found = graphs.choose(rows, tokens, False)
        assert batch == GraphBatch(room, padded, False) and found is not None


@pytest.mark.parametrize(
    ("rows", "tokens", "padded"), [(2, 3, (8, 8)), (8, 8, (8, 8)), (9, 9, (16, 16)), (3, 17, (4, 64)), (5, 17, None)]
)
def test_a_step_with_drafts_runs_in_a_graph_with_room_for_its_logits(
    rows: int, tokens: int, padded: tuple[int, int] | None
) -> None:
    graphs, _ = captured(max_num_seqs=4, max_num_tokens=64, num_verified=9)
    batch, found = graphs.choose(rows, tokens, False)
    assert (batch, found is None) == (GraphBatch(*(padded or (rows, tokens)), False), padded is None)
    assert most_rows(4, 9) == 16 and most_rows(4, 0) == 4 and most_rows(300, 65) == 300


def test_a_step_that_no_graph_holds_runs_eagerly_in_its_own_size() -> None:
    graphs, _ = captured()
    assert graphs.choose(3, 2049, False) == (GraphBatch(3, 2049, False), None)
    assert (graphs.num_replayed, graphs.num_eager) == (0, 1)


def test_with_enforce_eager_nothing_is_captured_and_nothing_padded() -> None:
    graphs, recorder = captured(is_eager=True)
    assert recorder.captured == [] and recorder.report.batches == ()
    assert graphs.choose(3, 3, True) == (GraphBatch(3, 3, True), None)


def test_before_the_capture_every_step_runs_eagerly() -> None:
    assert CudaGraphs(8, 64).choose(3, 3, True) == (GraphBatch(3, 3, True), None)


def test_the_largest_is_captured_first_and_the_report_says_what_and_how_long() -> None:
    _, recorder = captured()
    tokens = [batch.num_tokens for batch in recorder.captured]
    assert tokens == sorted(tokens, reverse=True) and len(tokens) == 15 + 2 * len(MIXED_TOKENS)
    event = recorder.report.to_event()
    assert event["decode_rows"] == [rows for rows in DECODE_ROWS if rows <= 256] and event["mixed_tokens"] == list(
        MIXED_TOKENS
    )
    assert event["seconds"] == 1.0, "by a clock that ticks when it is read"


@pytest.mark.parametrize(
    ("num_tokens", "kept", "dropped"),
    [(1000, [256, 128, 64, 8, 4, 2, 1], []), (220, [128, 64, 8, 4, 2, 1], [256]), (30, [8, 4, 2, 1], [256, 128, 64])],
)
def test_the_largest_sizes_are_dropped_until_the_others_fit(
    num_tokens: int, kept: list[int], dropped: list[int]
) -> None:
    graphs, recorder = CudaGraphs(8, 300), Tight(num_tokens)
    recorder.graphs = graphs
    with captured_logs() as logs:
        recorder.capture(graphs)
    assert [batch.num_tokens for batch in recorder.report.batches] == kept
    assert [(line["event"], line["num_tokens"], line["free_bytes"]) for line in logs] == [
        ("graphs.dropped", size, 77) for size in dropped
    ]
    assert all(line["lower"] == "gpu_memory_utilization" for line in logs)
    assert graphs.choose(2, 250, False)[1] is None if dropped else graphs.choose(2, 250, False)[1] is not None


def test_without_memory_for_the_smallest_graph_the_error_says_what_to_lower() -> None:
    graphs, recorder = CudaGraphs(8, 300), Tight(0)
    recorder.graphs = graphs
    with (
        captured_logs(),
        pytest.raises(ConfigError, match=r"77 B are free .* 1 row\(s\); lower gpu_memory_utilization"),
    ):
        recorder.capture(graphs)


def test_an_error_of_another_kind_ends_the_capture() -> None:
    recorder = Recorder()
    recorder.forward = lambda batch: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        recorder.capture(CudaGraphs(8, 64))


def test_sizes_end_at_what_an_engine_is_set_to() -> None:
    graphs = CudaGraphs(20, 300)
    assert sorted(b.num_rows for b in graphs.batches if b.is_decode) == [1, 2, 4, 8, 16, 20]
    mixed = sorted((b.num_tokens, b.num_rows) for b in graphs.batches if not b.is_decode)
    assert mixed == [(64, 16), (64, 20), (128, 16), (128, 20), (256, 16), (256, 20)]


def test_more_sequences_than_the_largest_graph_has_rows_decode_eagerly() -> None:
    graphs, _ = captured(max_num_seqs=2000)
    assert graphs.choose(1024, 1024, True)[1] is not None
    assert graphs.choose(1025, 1025, True) == (GraphBatch(1025, 1025, True), None)


def test_what_is_replayed_is_what_was_captured_for_that_size_and_nothing_ran_before() -> None:
    graphs, recorder = captured(8, 64)
    recorder.device.wait()
    assert recorder.launched == []
    batch, found = graphs.choose(3, 3, True)
    assert found is not None
    recorder.stream.replay(found.forward)
    recorder.stream.replay(found.samples[0])
    recorder.device.wait()
    assert (
        recorder.launched
        == [("forward", batch), ("sample", batch)]
        == [
            ("forward", GraphBatch(4, 4, True)),
            ("sample", GraphBatch(4, 4, True)),
        ]
    )


@pytest.mark.parametrize(
    ("num_slots", "form_rows", "more"),
    [
        (256, [1, 4, 16, 32, 64], []),  # each form is in some graph
        (256, [1, 3, 6, 7, 64], [(7, 7, True)]),  # graphs are of 4 and of 8 rows
        (5, [1, 4, 16, 32], [(5, 32, False)]),  # 5 rows take the form to 16; so many tokens that to 32
        (5, [], []),
    ],
)
def test_every_form_of_products_is_launched_before_the_first_step(
    num_slots: int, form_rows: list[int], more: list[tuple[int, int, bool]]
) -> None:
    decode, _ = batches_of(num_slots, 2048)
    assert form_batches(form_rows, num_slots, 2048, decode) == [GraphBatch(*each) for each in more]
    launched = [batch.num_tokens for batch in decode] + [tokens for _, tokens, _ in more]
    for before, most in pairwise([0, *form_rows]):
        assert any(before < tokens <= most for tokens in launched)


def test_no_form_is_launched_with_more_tokens_than_a_step_may_have() -> None:
    decode, _ = batches_of(5, 20)
    assert form_batches([4, 16, 32, 64], 5, 20, decode) == [GraphBatch(5, 20, False)]
