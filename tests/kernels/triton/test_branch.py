"""The lists of attention are made on a branch of a captured graph, and joined once; fakes stand for streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from millrace.kernels.layout.work_lists import AttentionShape
from millrace.kernels.triton import attention, attention_plan
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.attention import prologue_decode
from millrace.kernels.triton.attention_plan import plan_attention
from millrace.kernels.triton.launch import SWITCHES

pytestmark = pytest.mark.skipif(triton_launch.IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing is launched")

META = torch.device("meta")
BF16 = torch.bfloat16
WINDOWS = (None, 128)
PLANNED = ["side waits for main", "side list_kernel", "side list_kernel", "side is marked"]
ATTENDED = ["main attention_kernel"] * 2  # decode and extend


@dataclass
class Streams:
    """Two streams, and what happens on them in order. Memory may be taken on the main one alone."""

    log: list[str]
    used: str = "main"

    def stream(self, name: str) -> FakeStream:
        return FakeStream(name, self)

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before, self.used = self.used, stream.name
        yield
        self.used = before


@dataclass
class FakeStream:
    name: str
    streams: Streams

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.streams.log.append(f"{self.name} is marked")
        return f"the mark of {self.name}"

    def wait_event(self, event: str) -> None:
        self.streams.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """A device whose current stream captures."""
    found = Streams([])
    empty = torch.empty

    def run(kernel: JITFunction[Any], *args: object, **options: object) -> None:
        found.log.append(f"{found.used} {kernel.__name__}")

    def taken(*sizes: Any, **options: Any) -> torch.Tensor:
        assert found.used == "main"
        return empty(*sizes, **options)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch, "empty", taken)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.stream(found.used))
    monkeypatch.setattr(torch.cuda, "stream", found.using)
    monkeypatch.setattr(attention_plan, "_stream", lambda device: found.stream("side"))
    monkeypatch.setattr(attention_plan, "is_captured", lambda device: True)
    return found


def run_step(streams: Streams) -> None:
    """A mixed step of three layers, two of them with a window."""
    q = torch.empty(64, 8, 128, dtype=BF16, device=META)
    cache = torch.empty(100, 2, 16, 128, dtype=BF16, device=META)
    tables, lengths, starts = (torch.empty(*size, dtype=torch.int32, device=META) for size in ((40, 8), (40,), (41,)))
    plan = plan_attention(AttentionShape(8, 2, 128, BF16, BF16, WINDOWS), lengths, starts, 64, 20)
    for window in (None, 128, None):
        streams.log.append("main qkv")
        attention.paged_attention(q, cache, cache, tables, starts, lengths, 0.1, window, plan=plan)


def test_a_captured_step_makes_its_lists_beside_the_first_layer_and_joins_them_once(streams: Streams) -> None:
    run_step(streams)
    first = ["main qkv", "main waits for the mark of side", *ATTENDED]
    assert streams.log == [*PLANNED, *first, *["main qkv", *ATTENDED] * 2]


@pytest.mark.parametrize(("num_rows", "launches"), [(3, ["attention"]), (65, ["_attention_prologue", "attention"])])
def test_a_decode_step_joins_its_list_before_attention(num_rows: int, launches: list[str], streams: Streams) -> None:
    qkv = torch.empty(num_rows, 12, 128, dtype=BF16, device=META)
    cache, table = torch.empty(100, 2, 16, 128, dtype=BF16, device=META), torch.empty(99, 64, device=META)
    numbers, lengths = (torch.empty(num_rows, dtype=dtype, device=META) for dtype in (torch.int64, torch.int32))
    tables = torch.empty(num_rows, 8, dtype=torch.int32, device=META)
    plan = plan_attention(AttentionShape(8, 2, 128, BF16, BF16), lengths, None, num_rows, 20)
    for _ in range(2):
        prologue_decode(
            qkv, None, table, table, numbers, cache, cache, numbers, None, tables, lengths, 0.1, plan=plan
        )  # fmt: skip
    assert streams.log[:3] == ["side waits for main", "side list_kernel", "side is marked"]
    joined = [f"main {name}_kernel" for name in launches]
    assert streams.log[3:] == [*joined[:-1], "main waits for the mark of side", joined[-1], *joined]


@pytest.mark.parametrize("name", ["is_captured", "branches"])
def test_without_a_capture_or_branches_launches_stay_in_order(
    streams: Streams, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "branches":
        monkeypatch.setattr(SWITCHES, "branches", False)
    else:
        monkeypatch.setattr(attention_plan, "is_captured", lambda device: False)
    run_step(streams)
    assert streams.log == ["main list_kernel"] * 2 + ["main qkv", *ATTENDED] * 3


@pytest.mark.parametrize(("device", "is_capturing"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_only_the_stream_of_a_gpu_captures(device: str, is_capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    assert attention_plan.is_captured(torch.device(device)) == (device == "cuda" and is_capturing)
