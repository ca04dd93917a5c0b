"""The two sides of a split: which one a request goes to, and what became of the requests of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ...runtime.histogram import LatencyHistogram, quantile

FIRST_TOKEN_MS = (
    *(1, 5, 10, 20, 40, 80, 160, 320, 640, 1_000, 2_500, 5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 640_000),
)
FIRST_TOKEN_US = tuple(1000 * ms for ms in FIRST_TOKEN_MS)

Side = Literal["labelled", "rest"]  # the engines with the label, and the others
SIDES: Sequence[Side] = ("labelled", "rest")
OTHER: Mapping[Side, Side] = {"labelled": "rest", "rest": "labelled"}

T = TypeVar("T")


def choose_side(drawn: Side, sides: Mapping[Side, Sequence[T]], is_full: Callable[[Sequence[T]], bool]) -> Side | None:
    """The side that gets a request: the drawn one, or the other one if only that can take it now.

    `sides` has the engines of each that take requests, and `is_full` says whether a request would be refused for their
    queues. No request waits or fails for a split: None only if there are no engines at all.
    """
    other = OTHER[drawn]
    if not sides[drawn]:
        return other if sides[other] else None
    if sides[other] and is_full(sides[drawn]) and not is_full(sides[other]):
        return other
    return drawn


@dataclass(slots=True)
class SideCounts:
    """The requests of one side. One that goes on elsewhere stays with the side that it was sent to first."""

    num_requests: int = 0  # sent to its engines
    num_moved: int = 0  # drawn for it, and sent to the other side, which alone could take them
    num_finished: int = 0
    num_failed: int = 0  # ended by an error that is not the client's
    first_token_us: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(FIRST_TOKEN_US))

    def to_json(self) -> dict[str, Any]:
        """As pages show it."""
        found = {name: getattr(self, name) for name in ("num_requests", "num_moved", "num_finished", "num_failed")}
        at = {share: quantile(self.first_token_us.sketch, share) for share in (0.5, 0.99)}
        times = {f"ttft_p{share * 100:g}_ms": None if us is None else round(us / 1e3, 3) for share, us in at.items()}
        return found | times


class SplitCounts:
    """What became of the requests of both sides, since the split has this label."""

    def __init__(self) -> None:
        self.sides: Mapping[Side, SideCounts] = {side: SideCounts() for side in SIDES}
        self._live: dict[str, Side] = {}  # by request

    def clear(self) -> None:
        """The split has another label: counts anew."""
        self.__init__()  # type: ignore[misc]

    def note_sent(self, request_id: str, drawn: Side, side: Side) -> None:
        """A request was sent to an engine of a side."""
        self.sides[side].num_requests += 1
        self.sides[drawn].num_moved += drawn != side
        self._live[request_id] = side

    def note_first_token(self, request_id: str, waited_us: int) -> None:
        """A request has its first token."""
        if (side := self._live.get(request_id)) is not None:
            self.sides[side].first_token_us.observe(waited_us)

    def note_end(self, request_id: str, *, is_finished: bool, is_failed: bool) -> None:
        """A request has ended; neither: its client ended it."""
        if (side := self._live.pop(request_id, None)) is not None:
            self.sides[side].num_finished += is_finished
            self.sides[side].num_failed += is_failed

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)
