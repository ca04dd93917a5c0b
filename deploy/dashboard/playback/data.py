"""A loaded recording prepared for the dashboard: the data of each view at any time.

The data has the format of `snapshots.py`, which describes a running engine, so one page shows both. A recording has no
data of other stages, channels and the event loop; the page says so. Times are on the engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....runtime.histogram import LatencyHistogram
from ....runtime.trace.tracer import EventKind, Records, as_dicts
from ....stages.detokenize.token_gaps import BOUNDS_US as TOKEN_GAP_US
from ....stages.recordings.film import Film, RecordedRequest, block_changes
from ...metrics.latencies import FIRST_TOKEN_US, REQUEST_US
from ...metrics.latency_log import INTERVAL_S, MAX_ROWS, LatencyLog, Row
from ..derived import WINDOW_S, ReadsTrace
from ..snapshots import histogram_tree
from ..trace_log import INCIDENTS, MAX_INCIDENTS, MAX_OLDER, MAX_STEPS, OLDER, PAUSES, StepFold

BOUNDS_US = {  # as in `/metrics`
    "time_to_first_token": FIRST_TOKEN_US,
    "inter_token_latency": TOKEN_GAP_US,
    "request_queue_time": REQUEST_US,
    "e2e_request_latency": REQUEST_US,
}
MAX_RECENT = 60
NUM_BINS = 600  # points of the curves above the time bar
COUNTED = {  # figure -> the kind of records that it counts
    "num_plans": EventKind.STEP_PLANNED,
    "num_grants": EventKind.STEP_GRANTED,
    "num_done": EventKind.STEP_DONE,
    "num_void": EventKind.STEP_VOID,
}


class PlaybackData:
    """The prepared recording. Immutable, shared by all viewers."""

    def __init__(self, film: Film) -> None:
        self.film = film
        records = film.records
        self.steps = [tuple(row) for row in StepFold().take(records)]
        self._step_ends_us = np.array([row[1] for row in self.steps], np.int64)
        self._incidents = records[np.isin(records["kind"], INCIDENTS) & ~np.isin(records["kind"], PAUSES)]
        self._older = np.flatnonzero(np.isin(records["kind"], OLDER))
        self._times_ns = {kind: film.of(kind)["time_ns"].astype(np.int64) for kind in COUNTED.values()}
        self._changes = block_changes(records, film.names)
        self._arrivals_s = np.sort([recorded.arrival_s for recorded in film.recorded.values()])
        self._ended = sorted(
            (recorded for recorded in film.recorded.values() if recorded.ended_s is not None),
            key=lambda recorded: recorded.ended_s or 0.0,
        )
        self._ended_s = np.array([recorded.ended_s for recorded in self._ended])
        self._quantiles = _quantiles(film)
        self._quantiles_s = np.array([row[0] for row in self._quantiles])

    def introduction(self) -> dict[str, Any]:
        """Metadata of the recording, for the first message."""
        film = self.film
        return {
            "name": film.recording.path.name,
            "path": str(film.recording.path),
            "began_s": film.began_s,
            "began_wall_s": film.recording.began_wall_s,
            "duration_s": film.duration_s,
            "num_requests": len(film.recorded),
            "num_steps": len(self.steps),
            "num_calls": film.num_calls,
            "num_decisions": film.num_decisions,
            "decision_hash": film.decision_hash,
            "trouble": film.trouble,
            "engine": film.recording.engine.to_fields(),
            "curves": self.curves(),
        }

    def curves(self) -> dict[str, Any]:
        """The curves above the time bar, with `NUM_BINS` equal bins.

        At the end of each bin: running sequences, waiting sequences and the share of held blocks; and the bins with
        preemptions.
        """
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

    # -- data up to a time

    def counts(self, now_ns: int) -> dict[str, int]:
        """Counts of plans, grants, steps and arrivals up to `now_ns`."""
        found = {name: int(np.searchsorted(self._times_ns[kind], now_ns, "right")) for name, kind in COUNTED.items()}
        return found | {"num_arrived": int(np.searchsorted(self._arrivals_s, now_ns / 1e9, "right"))}

    def steps_since(self, number: int, now_ns: int) -> tuple[list[Any], int]:
        """As `TraceLog.steps_since`, for the steps that ended by `now_ns`."""
        count = int(np.searchsorted(self._step_ends_us, now_ns // 1000, "right"))
        return self.steps[max(number, count - MAX_STEPS) : count], count

    def incidents_since(self, number: int, now_ns: int) -> tuple[list[Any], int]:
        """As `TraceLog.incidents_since`, for the incidents by `now_ns`."""
        count = int(np.searchsorted(self._incidents["time_ns"], max(0, now_ns), "right"))
        chosen = self._incidents[max(number, count - MAX_INCIDENTS) : count]
        return list(as_dicts(chosen, self.film.names)), count

    def step_after(self, now_ns: int, steps: int) -> int | None:
        """The end of the step that is `steps` after the last one, before it if negative; None if there is none."""
        count = int(np.searchsorted(self._step_ends_us, now_ns // 1000, "right"))
        place = count - 1 + steps
        return 1000 * int(self._step_ends_us[place]) if 0 <= place < len(self.steps) else None

    def window(self, now_ns: int) -> list[Records]:
        """The records of the last `WINDOW_S` seconds, and older ones that describe a state that still holds."""
        records, end = self.film.records, self.film.place(now_ns)
        begin = self.film.place(now_ns - round(1e9 * WINDOW_S) - 1)
        older = self._older[: int(np.searchsorted(self._older, begin))][-MAX_OLDER:]
        return [records[older], records[begin:end]]

    def readers(self, now_ns: Callable[[], int]) -> list[ReadsTrace]:
        """Readers of the trace up to `now_ns()`, which is called at each read."""
        return [_PlaybackReader(self.film, now_ns)]

    def recent(self, now_s: float) -> dict[str, Any]:
        """The last requests that ended by `now_s`, newest last."""
        count = int(np.searchsorted(self._ended_s, now_s, "right"))
        return {"rows": [_ended(recorded) for recorded in self._ended[max(0, count - MAX_RECENT) : count]]}

    def latency(self, now_ns: int) -> dict[str, Any]:
        """Histograms of the latencies measured by `now_ns`."""
        found = {}
        for name, bounds in BOUNDS_US.items():
            histogram = LatencyHistogram(bounds)
            histogram.observe_many(self.film.latencies[name].until(now_ns))
            found[name] = histogram_tree(histogram)
        return found

    def quantiles_since(self, number: int, now_ns: int) -> tuple[list[Any], int]:
        """As `LatencyLog.rows_since`, for the intervals that ended by `now_ns`."""
        count = int(np.searchsorted(self._quantiles_s, now_ns / 1e9, "right"))
        return self._quantiles[max(number, count - MAX_ROWS) : count], count

    def configuration(self) -> dict[str, Any]:
        """The settings that decisions depend on."""
        settings = self.film.recording.engine.to_fields()
        rows = [{"group": "recorded engine", "name": name, "value": value} for name, value in settings.items()]
        return {"rows": [row | {"source": "recording", "help": HELP.get(row["name"], "")} for row in rows]}

    def changed_s(self, now_ns: int) -> NDArray[np.float64]:
        """[N] seconds at which each block last changed its state or its table.

        With several kinds of memory the trace has no blocks of cells, so that it is the beginning for all.
        """
        layout = self.film.recording.engine.kv_layout
        if layout is not None:
            return np.full(layout.num_slabs * max(layout.blocks_per_slab), self.film.began_s)
        when_ns, firsts, counts = self._changes
        end = int(np.searchsorted(when_ns, now_ns, "right"))
        firsts, counts = firsts[:end], counts[:end]
        blocks = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        changed = np.full(self.film.recording.engine.num_blocks, self.film.began_s)
        changed[blocks] = np.repeat(when_ns[:end], counts) / 1e9  # the last change of a block wins
        return changed


HELP = {
    "num_blocks": "KV blocks on the device.",
    "num_host_blocks": "KV blocks in host memory, for swapped sequences.",
    "block_size": "Tokens per block.",
    "max_model_len": "Maximum tokens of prompt and answer together.",
    "max_num_seqs": "Slots: maximum sequences in a step.",
    "max_num_batched_tokens": "Maximum tokens per step.",
    "itl_target_ms": "Target time of a step in milliseconds while answers wait; 0: none.",
    "steps_in_flight": "Maximum steps in flight.",
    "enable_chunked_prefill": "Whether long prompts are split over several steps.",
    "enable_prefix_caching": "Whether prompts with the same prefix share blocks.",
    "max_waiting": "Maximum prompts in schedule.",
    "scheduler": "Scheduling policy.",
    "priority_ageing_s": "Seconds of waiting that raise a request by one priority.",
    "most_drafts": "Maximum draft tokens per step; 0: no drafts.",
}


class _PlaybackReader:
    """Reads a recording's trace up to the current position, as if it were being written."""

    def __init__(self, film: Film, now_ns: Callable[[], int]) -> None:
        self._film, self._now_ns = film, now_ns

    def names(self) -> list[str]:
        return self._film.names

    def read_since(self, cursor: int = 0) -> tuple[Records, int, int]:
        end = self._film.place(self._now_ns())
        return self._film.records[cursor:end], max(cursor, end), 0


def _quantiles(film: Film) -> list[Row]:
    """The rows that a `LatencyLog` would have made of the recorded run."""
    histograms = {name: LatencyHistogram(bounds) for name, bounds in BOUNDS_US.items()}
    time_s, rows = film.began_s, list[Row]()
    kept = LatencyLog(histograms, lambda: time_s)
    places = dict.fromkeys(BOUNDS_US, 0)
    while time_s < film.began_s + film.duration_s:
        time_s += INTERVAL_S
        for name, histogram in histograms.items():
            until = film.latencies[name].until(round(time_s * 1e9))
            histogram.observe_many(until[places[name] :])
            places[name] = len(until)
        kept.tick()
        rows += kept.rows_since(len(rows))[0]
    return rows


def _at(times_ns: Any, values: Any, edges_ns: NDArray[np.float64], before: int = 0) -> list[int]:
    """The last of `values` at each edge; `before` the first one."""
    places = np.searchsorted(times_ns.astype(np.float64), edges_ns, "right")
    found: list[int] = np.concatenate([[before], values.astype(np.int64)])[places].tolist()
    return found


def _ended(recorded: RecordedRequest) -> dict[str, Any]:
    assert recorded.ended_s is not None
    return {
        "id": recorded.request_id,
        "cause": recorded.cause,
        "arrival_s": round(recorded.arrival_s, 3),
        "ttft_s": None if recorded.first_token_s is None else round(recorded.first_token_s - recorded.arrival_s, 6),
        "took_s": round(recorded.ended_s - recorded.arrival_s, 6),
        "num_prompt_tokens": recorded.num_prompt_tokens,
        "num_generated_tokens": recorded.num_generated_tokens,
    }
