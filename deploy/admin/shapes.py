"""Models of the answers of the admin routes, for the OpenAPI document and for tests."""

from __future__ import annotations

from typing import Any, Literal

from ..api.schema.shapes import Count, Shape


class AdapterStatus(Shape):
    """A LoRA adapter."""

    name: str
    path: str
    state: Literal["on_disk", "on_host", "loading", "resident", "draining"]
    digest: str | None
    parent: str | None
    rank: Count
    bytes: Count
    requests: Count
    pinned: Literal["host", "device"] | None
    in_progress: Count
    running: Count
    load_s: float
    last_error: str | None


class Adapters(Shape):
    """All LoRA adapters that may be named."""

    adapters: list[AdapterStatus]


class AdapterRemoved(Shape):
    """A LoRA adapter whose name is gone, with the requests that still use it, and those that were ended."""

    name: str
    in_progress: Count
    ended: Count


class CacheReset(Shape):
    """The number of freed KV blocks."""

    freed_blocks: Count


class SideOfSplit(Shape):
    """The requests of one side of a split, since the split has its label."""

    num_requests: Count
    num_moved: Count  # drawn for this side, and sent to the other one, which alone could take them
    num_finished: Count
    num_failed: Count
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None


class TrafficOfModel(Shape):
    """What a front does by the labels of engines, as flags say it, and what became of its requests."""

    split: str | None
    shadow: str | None
    engines: dict[Literal["rest", "labelled", "shadow"], Count]  # that serve
    sides: dict[Literal["labelled", "rest"], SideOfSplit]
    copies: dict[Literal["equal", "different", "failed", "late", "shed", "uncompared"], Count]


class TrafficState(Shape):
    """The traffic of the model of a server; where there are several, only that of each, by a front of it."""

    split: str | None = None
    shadow: str | None = None
    engines: dict[Literal["rest", "labelled", "shadow"], Count] | None = None
    sides: dict[Literal["labelled", "rest"], SideOfSplit] | None = None
    copies: dict[Literal["equal", "different", "failed", "late", "shed", "uncompared"], Count] | None = None
    models: dict[str, TrafficOfModel] | None = None


class FlightFile(Shape):
    """The flight recorder's file; null if one was written seconds ago."""

    file: str | None


class ProfilerStarted(Shape):
    """A running profile: its future file, and its length."""

    file: str
    seconds: Count


class ProfileFile(Shape):
    """The file of a profile, for Chrome and Perfetto."""

    file: str
    num_bytes: Count


class FileRow(Shape):
    """A file that the server has written: its kind, size and time of its last change."""

    name: str
    kind: Literal["recording", "flight", "profile"]
    num_bytes: Count
    modified_s: float


class Files(Shape):
    """Recordings, flight files and profiles, newest first."""

    object: Literal["list"]
    data: list[FileRow]


class TraceEvents(Shape):
    """Chrome's trace-event format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: Literal["ms"]
