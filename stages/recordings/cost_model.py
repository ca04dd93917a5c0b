"""The cost model of steps: predicts a step's duration from its contents.

Fitted to a recording; replaces a device.

It is linear: a fixed time per step, plus a time per token, row and copied block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from ..messages import StepDone, TokenRequest
from ..schedule.step_timing.step_time_model import StepContents, least_squares
from .field_values import Fields, InvalidValue, MessageFields
from .reader import AllocateCall, Recording, RecordingError, ScheduleCall
from .recorded_engine import RecordedEngine, read_engine

VERSION = 1
LEAST_STEPS = 64  # a fit of fewer steps would be unreliable
WINDOW = 4  # steps summed in the fit, as host work for a new sequence delays the step before it


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step, by part. All are at least 0."""

    step_s: float  # of any step
    prefill_token_s: float = 0.0  # this and the next: for each of its contents, as in `StepContents`
    prefill_pair_s: float = 0.0
    decode_row_s: float = 0.0
    decode_context_s: float = 0.0
    copied_block_s: float = 0.0
    mixed_step_s: float = 0.0  # once, if the step computes any prompt tokens
    started_s: float = 0.0  # for each sequence that begins, including host work between two steps
    front_s: float = 0.0  # from a request's arrival to schedule

    def seconds(self, contents: StepContents) -> float:
        """The duration of a step with these contents."""
        return (
            self.step_s
            + self.prefill_token_s * contents.num_prefill
            + self.prefill_pair_s * contents.num_pairs
            + self.decode_row_s * contents.num_decode
            + self.decode_context_s * contents.num_context
            + self.copied_block_s * contents.num_copied
            + self.mixed_step_s * (contents.num_prefill > 0)
            + self.started_s * contents.num_started
        )


COSTS = (  # in the order of `_column`
    *("step_s", "prefill_token_s", "prefill_pair_s", "decode_row_s", "decode_context_s", "copied_block_s"),
    *("mixed_step_s", "started_s"),
)


@dataclass(frozen=True, slots=True)
class FittedCostModel:
    """A cost model, and the data of its fit."""

    model: CostModel
    engine: RecordedEngine
    num_steps: int = 0
    mean_error: float = 0.0  # mean absolute error of a step's prediction, as a share of its time
    total_error: float = 0.0  # of the sum of all predictions, as a share of the sum; signed

    def to_json(self) -> bytes:
        """What `read` reads."""
        document = {"millrace_cost_model": VERSION, "seconds": asdict(self.model), "engine": self.engine.to_fields()}
        document |= {"num_steps": self.num_steps, "mean_error": self.mean_error, "total_error": self.total_error}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def read(cls, path: Path) -> FittedCostModel:
        """Reads such a file, or fits a recording. Raises `RecordingError` for anything else."""
        try:
            document: Any = orjson.loads(path.read_bytes())
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}: must name a cost model or a recording") from None
        except orjson.JSONDecodeError:
            return fit(Recording(path))  # a recording has several lines
        if not isinstance(document, dict) or document.get("millrace_cost_model") != VERSION:
            return fit(Recording(path))
        try:
            return cls(_read_model(document.get("seconds")), read_engine(document.get("engine")))
        except InvalidValue as error:
            raise RecordingError(f"{path}: {error}") from None


def fit(recording: Recording) -> FittedCostModel:
    """Fits the model to the steps of a recording by least squares.

    Sums windows of a few steps, each weighed by its time; no coefficient is below 0.

    A step that began with the device idle counts from its grant to its outcome, any other from the outcome of the
    step before. So host overhead is included, as in serving. Raises `RecordingError` for a recording with too few
    steps.
    """
    samples, front_s = step_times(recording)
    if len(samples) < LEAST_STEPS:
        raise RecordingError(
            f"{recording.path}: {len(samples)} steps: a cost model needs at least {LEAST_STEPS}; record for longer"
        )
    model = replace(fit_steps(samples), front_s=front_s)
    seconds = np.array([took for _, took in samples])
    predicted = np.array([model.seconds(contents) for contents, _ in samples])
    mean_error = float((np.abs(predicted - seconds) / np.maximum(seconds, 1e-9)).mean())
    return FittedCostModel(
        model, recording.engine, len(samples), mean_error, float(predicted.sum() / seconds.sum() - 1)
    )


def fit_steps(samples: Sequence[tuple[StepContents, float]]) -> CostModel:
    """Fits the model to steps with known contents and durations."""
    num_windows = max(1, len(samples) // WINDOW)
    seconds = _sums(np.array([took for _, took in samples]), num_windows)  # [W]
    columns = _sums(np.array([_column(contents) for contents, _ in samples]), num_windows)  # [W, C]
    weights = 1.0 / np.sqrt(np.maximum(seconds, np.median(seconds) / 4))
    found = least_squares(columns * weights[:, None], seconds * weights)
    found *= seconds.sum() / max(float((columns @ found).sum()), 1e-12)  # so that the errors add up to 0
    return CostModel(**dict(zip(COSTS, found.tolist(), strict=True)))


def _sums(rows: NDArray[np.float64], num_windows: int) -> NDArray[np.float64]:
    """Sums of consecutive rows, in `num_windows` windows of about the same length."""
    begins = np.arange(num_windows) * len(rows) // num_windows
    sums: NDArray[np.float64] = np.add.reduceat(rows, begins, axis=0)
    return sums


def step_times(recording: Recording) -> tuple[list[tuple[StepContents, float]], float]:
    """(Contents, seconds) of each step, and the median seconds from arrival to schedule.

    Nothing is replayed, as the stages may have changed since.
    """
    samples: list[tuple[StepContents, float]] = []
    fronts: list[float] = []
    granted: dict[int, tuple[float, StepContents]] = {}
    done_s = 0.0
    for call in recording:
        if isinstance(call, AllocateCall):
            for grant in call.grants:
                if grant is not None:
                    try:
                        step, contents = _contents(grant)
                    except InvalidValue as error:
                        raise RecordingError(f"{recording.path}:{call.line}: {error}") from None
                    granted[step] = call.time_s, contents
        elif isinstance(call, ScheduleCall):
            for message in call.taken:
                if isinstance(message, TokenRequest):
                    fronts.append(call.time_s - (message.arrival_s - recording.began_s))
                elif isinstance(message, StepDone) and message.step in granted:
                    granted_s, contents = granted.pop(message.step)
                    samples.append((contents, call.time_s - max(granted_s, done_s)))
                    done_s = call.time_s
    return samples, max(0.0, float(np.median(fronts))) if fronts else 0.0


def _contents(fields: Fields) -> tuple[int, StepContents]:
    """The step of a recorded grant, and its contents."""
    given = MessageFields("grant", fields)
    step, least, most = given.whole("step"), -(2**31), 2**31 - 1
    starts = np.array(given.wholes("starts_less_step", most, least), np.int64) + step
    num_tokens = np.array(given.wholes("num_tokens", most), np.int32)
    drafts = [0] * len(num_tokens) if fields.get("num_drafts") is None else given.wholes("num_drafts", most)
    copies, started = fields.get("copies"), fields.get("started")
    if (
        not len(starts) == len(num_tokens) == len(drafts)
        or not isinstance(copies, list)
        or not isinstance(started, list)
    ):
        raise InvalidValue("grant: must have a start for each row, and lists of copies and started sequences")
    num_copied = sum(len(copy[1]) for copy in copies if _is_copy(copy))
    certain = num_tokens - np.array(drafts, np.int32)
    return step, StepContents.of(starts, certain, num_copied, len(started), sum(drafts))


def _is_copy(value: Any) -> bool:
    return isinstance(value, list) and len(value) in (3, 4) and isinstance(value[1], list)


def _column(contents: StepContents) -> list[float]:
    return [
        1.0,
        float(contents.num_prefill),
        contents.num_pairs,
        float(contents.num_decode),
        float(contents.num_context),
        float(contents.num_copied),
        float(contents.num_prefill > 0),
        float(contents.num_started),
    ]


def _read_model(values: Any) -> CostModel:
    given = MessageFields("seconds", values if isinstance(values, dict) else {})
    names: Sequence[str] = CostModel.__slots__
    return CostModel(**{name: given.number(name) for name in names})
