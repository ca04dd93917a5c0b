"""A film of a recording, made ready for the dashboard: what each view shows of it at any moment.

As plain data, in the shapes that `snapshots.py` gives of an engine that runs, so that one page shows both. What a
recording does not tell (other stages, channels, the event loop) is left out, and the page says so. Moments are on the
engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.histogram import Histogram
from ...runtime.trace.tracer import EventKind, Records, as_dicts
from ...stages.detokenize.token_gaps import BOUNDS_US as TOKEN_GAP_US
from ...stages.recordings.film import Film, Life, block_changes
from ..metrics.latencies import FIRST_TOKEN_US, REQUEST_US
from .derived import WINDOW_S, TraceReader
from .trace_log import INCIDENTS, MAX_INCIDENTS, MAX_OLDER, MAX_STEPS, OLDER, PAUSES, StepFold

BOUNDS_US = {  # as `/metrics` has them
    "time_to_first_token": FIRST_TOKEN_US,
    "inter_token_latency": TOKEN_GAP_US,
    "request_queue_time": REQUEST_US,
    "e2e_request_latency": REQUEST_US,
}
MAX_RECENT = 60
NUM_BINS = 600  # of the curves along the bar
COUNTED = {  # figure -> the records that are counted for it
    "num_plans": EventKind.STEP_PLANNED,
    "num_grants": EventKind.STEP_GRANTED,
    "num_done": EventKind.STEP_DONE,
    "num_void": EventKind.STEP_VOID,
}


class Reel:
    """Made once, before anybody looks; nothing in it changes."""

    def __init__(self, film: Film) -> None:
        self.film = film
        records = film.records
        self.steps = [tuple(row) for row in StepFold().take(records)]
        self._step_ends_us = np.array([row[1] for row in self.steps], np.int64)
        self._incidents = records[np.isin(records["kind"], INCIDENTS) & ~np.isin(records["kind"], PAUSES)]
        self._older = np.flatnonzero(np.isin(records["kind"], OLDER))
        self._times_ns = {kind: film.of(kind)["time_ns"].astype(np.int64) for kind in COUNTED.values()}
        self._changes = block_changes(records, film.names)
        self._arrivals_s = np.sort([life.arrival_s for life in film.lives.values()])
        self._ended = sorted(
            (life for life in film.lives.values() if life.ended_s is not None), key=lambda life: life.ended_s or 0.0
        )
        self._ended_s = np.array([life.ended_s for life in self._ended])

    def introduction(self) -> dict[str, Any]:
        """What the page is told first."""
        film = self.film
        return {
            "name": film.recording.path.name,
            "path": str(film.recording.path),
            "began_s": film.began_s,
            "began_wall_s": film.recording.began_wall_s,
            "duration_s": film.duration_s,
            "num_requests": len(film.lives),
            "num_steps": len(self.steps),
            "num_calls": film.num_calls,
            "num_decisions": film.num_decisions,
            "decision_hash": film.decision_hash,
            "trouble": film.trouble,
            "engine": film.recording.engine.to_fields(),
            "curves": self.curves(),
        }

    def curves(self) -> dict[str, Any]:
        """What stands above the bar: at the end of each of so many equal parts of the time, how many sequences run and
        wait and what share of the blocks is held; and in which parts somebody was preempted."""
        film = self.film
        planned, granted = film.of(EventKind.STEP_PLANNED), film.of(EventKind.STEP_GRANTED)
        edges_ns = np.round((film.began_s + np.arange(1, NUM_BINS + 1) * film.duration_s / NUM_BINS) * 1e9)
        num_blocks = film.recording.engine.num_blocks
        preempted = film.of(EventKind.PREEMPTED)["time_ns"].astype(np.int64)
        places = np.searchsorted(edges_ns, preempted)
        return {
            "running": _at(planned["time_ns"], planned["c"], edges_ns),
            "waiting": _at(planned["time_ns"], planned["d"], edges_ns),
            "held": [
                round(1 - free / num_blocks, 4) for free in _at(granted["time_ns"], granted["d"], edges_ns, num_blocks)
            ],
            "preempted": np.unique(np.minimum(places, NUM_BINS - 1)).tolist(),
        }

    # -- what there is at a moment

    def counts(self, now_ns: int) -> dict[str, int]:
        """What schedule and allocate had been told and had decided by then."""
        found = {name: int(np.searchsorted(self._times_ns[kind], now_ns, "right")) for name, kind in COUNTED.items()}
        return found | {"num_arrived": int(np.searchsorted(self._arrivals_s, now_ns / 1e9, "right"))}

    def steps_since(self, number: int, now_ns: int) -> tuple[list[Any], int]:
        """As `TraceLog.steps_since`, of those that were over by then."""
        count = int(np.searchsorted(self._step_ends_us, now_ns // 1000, "right"))
        return self.steps[max(number, count - MAX_STEPS) : count], count

    def incidents_since(self, number: int, now_ns: int) -> tuple[list[Any], int]:
        """As `TraceLog.incidents_since`, likewise."""
        count = int(np.searchsorted(self._incidents["time_ns"], max(0, now_ns), "right"))
        chosen = self._incidents[max(number, count - MAX_INCIDENTS) : count]
        return list(as_dicts(chosen, self.film.names)), count

    def step_after(self, now_ns: int, steps: int) -> int | None:
        """The moment at which the step so many further on (back, for less than 0) was done; None if there is none."""
        count = int(np.searchsorted(self._step_ends_us, now_ns // 1000, "right"))
        place = count - 1 + steps
        return 1000 * int(self._step_ends_us[place]) if 0 <= place < len(self.steps) else None

    def window(self, now_ns: int) -> list[Records]:
        """The records of the last seconds, and those from before that say how things have been since."""
        records, end = self.film.records, self.film.place(now_ns)
        begin = self.film.place(now_ns - round(1e9 * WINDOW_S) - 1)
        older = self._older[: int(np.searchsorted(self._older, begin))][-MAX_OLDER:]
        return [records[older], records[begin:end]]

    def readers(self, now_ns: Callable[[], int]) -> list[TraceReader]:
        """What reads the trace up to now, whenever that is."""
        return [_Reader(self.film, now_ns)]

    def recent(self, now_s: float) -> dict[str, Any]:
        """The requests that had ended by then, the last ones last."""
        count = int(np.searchsorted(self._ended_s, now_s, "right"))
        return {"rows": [_ended(life) for life in self._ended[max(0, count - MAX_RECENT) : count]]}

    def latency(self, now_ns: int) -> dict[str, Any]:
        """Histograms of what was measured by then."""
        found = {}
        for name, bounds in BOUNDS_US.items():
            histogram = Histogram(bounds)
            histogram.observe_many(self.film.latencies[name].until(now_ns))
            found[name] = {"bounds_us": bounds, "counts": histogram.counts, "total_us": histogram.total}
        return found

    def configuration(self) -> dict[str, Any]:
        """The settings that decisions depend on."""
        settings = self.film.recording.engine.to_fields()
        rows = [{"group": "recorded engine", "name": name, "value": value} for name, value in settings.items()]
        return {"rows": [row | {"source": "recording", "help": HELP.get(row["name"], "")} for row in rows]}

    def changed_s(self, now_ns: int) -> NDArray[np.float64]:
        """[N] when each block came into its state or its table."""
        when_ns, firsts, counts = self._changes
        end = int(np.searchsorted(when_ns, now_ns, "right"))
        firsts, counts = firsts[:end], counts[:end]
        blocks = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        changed = np.full(self.film.recording.engine.num_blocks, self.film.began_s)
        changed[blocks] = np.repeat(when_ns[:end], counts) / 1e9  # of several, the last one stays
        return changed


HELP = {
    "num_blocks": "Blocks of the KV cache on the device.",
    "num_host_blocks": "Blocks on the host, for what is swapped out.",
    "block_size": "Tokens a block.",
    "max_model_len": "Tokens of prompt and answer together, at most.",
    "max_num_seqs": "Slots: sequences in a step, at most.",
    "max_num_batched_tokens": "Tokens of a step, at most.",
    "itl_target_ms": "Milliseconds that a step may take while answers wait, 0: any.",
    "steps_in_flight": "Steps that are planned before the first of them is done.",
    "enable_chunked_prefill": "Whether a prompt may be computed in parts.",
    "enable_prefix_caching": "Whether prompts that begin alike share blocks.",
    "max_waiting": "Prompts inside schedule, at most.",
    "scheduler": "Who comes first.",
    "priority_ageing_s": "Seconds of waiting that are worth one priority.",
    "most_drafts": "Tokens that are drafted in a step, at most; 0: nobody drafts.",
}


class _Reader:
    """Reads a film's trace as if it were written as time goes by."""

    def __init__(self, film: Film, now_ns: Callable[[], int]) -> None:
        self._film, self._now_ns = film, now_ns

    def names(self) -> list[str]:
        return self._film.names

    def read_since(self, cursor: int = 0) -> tuple[Records, int, int]:
        end = self._film.place(self._now_ns())
        return self._film.records[cursor:end], max(cursor, end), 0


def _at(times_ns: Any, values: Any, edges_ns: NDArray[np.float64], before: int = 0) -> list[int]:
    """The last value at each edge."""
    places = np.searchsorted(times_ns.astype(np.float64), edges_ns, "right")
    found: list[int] = np.concatenate([[before], values.astype(np.int64)])[places].tolist()
    return found


def _ended(life: Life) -> dict[str, Any]:
    assert life.ended_s is not None
    return {
        "id": life.request_id,
        "cause": life.cause,
        "arrival_s": round(life.arrival_s, 3),
        "ttft_s": None if life.first_token_s is None else round(life.first_token_s - life.arrival_s, 6),
        "took_s": round(life.ended_s - life.arrival_s, 6),
        "num_prompt_tokens": life.num_prompt_tokens,
        "num_generated_tokens": life.num_generated_tokens,
    }
