"""Times of recent requests, to explain those that the trace no longer covers.

The engine notes these times for every request; the times of the last `MAX_ENDED` ended ones are kept. So a request that
ended minutes ago, or runs for longer than the trace, still gets a short explanation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..api.service import MAX_ENDED

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ...stages.exit.outboxes import Outboxes, RequestOutbox

SENTENCES = {
    "queue": "{ms} ms in the queue",
    "prompt": "{ms} ms from there to the first token",
    "decoding": "{ms} ms for the other tokens, {num_generated} in total",
    "other stages": "{ms} ms after the last token",
}


@dataclass(frozen=True, slots=True)
class RequestMoments:
    """The times of one request, in seconds on the engine's clock; None: it has not got there."""

    request_id: str
    arrival_s: float
    began_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    end_s: float  # the current time while it runs
    cause: str | None  # why it ended; None while it runs
    num_sequences: int
    num_prompt: int
    num_generated: int
    num_preempted: int

    @classmethod
    def of(cls, outbox: RequestOutbox, end_s: float, cause: str | None = None) -> RequestMoments:
        """The times of a request now, or at its end with `cause`."""
        times, finishes = outbox.times, (choice.finish for choice in outbox.choices)
        return cls(
            outbox.request_id,
            times.arrival_s,
            times.began_s,
            times.first_token_s,
            times.last_token_s if cause is not None else None,
            end_s,
            cause,
            outbox.request.num_sequences,
            outbox.num_prompt_tokens,
            outbox.num_generated_tokens,
            sum(finish.num_preempted for finish in finishes if finish is not None),
        )

    def explain(self, reach_s: float) -> dict[str, Any]:
        """A summary in the format of `insight.explain`. `reach_s`: seconds that the trace covers."""
        parts = self._parts()
        total_s = max(0.0, self.end_s - self.arrival_s)
        causes: list[dict[str, Any]] = [
            {
                "name": name,
                "ms": _ms(end_s - begin_s),
                "share": round((end_s - begin_s) / total_s, 4) if total_s else 0.0,
                "sentence": SENTENCES[name].format(ms=_shown(end_s - begin_s), num_generated=self.num_generated),
            }
            for name, _, begin_s, end_s in parts
            if end_s > begin_s
        ]
        bars = [_bar(kind, begin_s - self.arrival_s, end_s - begin_s) for _, kind, begin_s, end_s in parts]
        took = "took" if self.cause is not None else "has been running for"
        what = "; ".join(cause["sentence"] for cause in causes) or "no details are available"
        why = f"The causes of waiting are not available, as the trace covers only the last {reach_s:,.0f} s"
        return {
            "id": self.request_id,
            "detail": "summary",
            "finished": self.cause is not None,
            "finish_cause": self.cause,
            "total_ms": _ms(total_s),
            "sentence": f"The request {took} {_shown(total_s)} ms: {what}. {why}.",
            "causes": sorted(causes, key=lambda cause: -cause["ms"]),
            "stages": _stages(bars),
            "preempted_ms": 0.0,
            "client_ms": 0.0,
            "preemptions": self.num_preempted,
            "num_sequences": self.num_sequences,
            "steps": {
                "num_steps": 0,
                "first_step": None,
                "last_step": None,
                "num_prompt_steps": 0,
                "num_prompt_tokens": self.num_prompt,
                "num_decode_rows": max(0, self.num_generated - self.num_sequences),
            },
            "bars": [bar for bar in bars if bar["ms"]],
            "num_bars": sum(bar["ms"] > 0 for bar in bars),
        }

    def _parts(self) -> list[tuple[str, str, float, float]]:
        """(cause, kind of bar, begin, end) of consecutive parts, from arrival to end."""
        moments = [self.arrival_s]
        for moment_s in (self.began_s, self.first_token_s, self.last_token_s):
            moments.append(min(max(moments[-1], self.end_s if moment_s is None else moment_s), self.end_s))
        names = (("queue", "wait"), ("prompt", "service"), ("decoding", "service"), ("other stages", "wait"))
        ends = [*moments[1:], max(self.end_s, moments[-1])]
        return [(*pair, begin_s, end_s) for pair, begin_s, end_s in zip(names, moments, ends, strict=True)]


class RequestHistory:
    """The times of the last `MAX_ENDED` ended requests, by answer id."""

    def __init__(self) -> None:
        self._ended: dict[str, RequestMoments] = {}
        self._exit: Outboxes | None = None
        self._now: Callable[[], float] = float  # the engine's clock; usable after the engine's last request

    def watch(self, engine: Engine) -> None:
        """Starts to collect the times of the engine's requests."""
        self._exit, self._now = engine.exit, engine.pipeline.env.now
        self._exit.on_end.append(self._request_ended)

    def find(self, request_id: str) -> RequestMoments | None:
        """The times of a running or recently ended request; None if unknown."""
        assert self._exit is not None
        outbox = self._exit.live.get(request_id)
        if outbox is not None:
            return RequestMoments.of(outbox, self._now())
        return self._ended.get(request_id)

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if outbox.request.parent_id is None:
            self._ended.pop(outbox.request_id, None)
            self._ended[outbox.request_id] = RequestMoments.of(outbox, self._now(), cause)
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]


def _bar(kind: str, begin_s: float, took_s: float) -> dict[str, Any]:
    stage = "execute" if kind == "service" else "schedule" if not begin_s else "exit"
    return {"kind": kind, "stage": stage, "begin_ms": _ms(begin_s), "ms": _ms(took_s), "step": None}


def _stages(bars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    totals: dict[str, dict[str, Any]] = {}
    for bar in bars:
        row = totals.setdefault(
            bar["stage"], {"stage": bar["stage"], "service_ms": 0.0, "wait_ms": 0.0, "blocked_ms": 0.0}
        )
        row[f"{bar['kind']}_ms"] = round(row[f"{bar['kind']}_ms"] + bar["ms"], 3)
    return list(totals.values())


def _ms(seconds: float) -> float:
    return round(1e3 * max(0.0, seconds), 3)


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.1f}"
