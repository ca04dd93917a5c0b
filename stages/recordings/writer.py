"""Writes a recording while an engine runs. The format is in `format.py`.

The stages hand over their messages as they are. Messages are immutable, so a call costs the event loop a tuple in a
list. A thread encodes and writes, ten times a second.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.workers.worker import Worker
from ..messages import Guess, Ints, PlanReport, Rates, StepDone, StepGrant, StepPlan, StepVoid, TokenRequest
from .field_values import Fields
from .format import (
    VERSION,
    UnchangedFields,
    add_fields,
    done_fields,
    grant_fields,
    guess_fields,
    plan_fields,
    report_fields,
    void_fields,
)
from .recorded_engine import RecordedEngine
from .repetition import AnswerHistory
from .token_masking import TokenMasking

FLUSH_S = 0.1  # between two writes
MAX_WAITING_BYTES = 64 * 2**20  # estimated size of unwritten calls; beyond it the disk is too slow, and recording stops
CALL_BYTES = 16_384  # estimated size of a call's messages: 256 rows of some columns

log = get_logger("millrace.stages")

Answer = tuple[StepGrant | None, PlanReport]


class RecordingWriter:
    """One recording. `open` it before the stages run and close it after them.

    In between it never waits and never raises: if writing fails, the recording ends with the reason, and the engine
    goes on.

    It never overwrites a file: if `path` exists, it uses the first free one of `path`.1, `path`.2, ...

    With a `lookup`, the least and most last tokens by which drafts are found, it records how answers repeat earlier
    text.
    """

    def __init__(
        self,
        path: Path,
        engine: RecordedEngine,
        *,
        with_token_ids: bool = False,
        lookup: tuple[int, int] | None = None,
    ) -> None:
        self.path = path
        self.is_open = False
        self.num_calls = 0  # recorded
        self._engine = engine
        self._with_token_ids = with_token_ids
        self._lookup = lookup
        self._encoder: _Encoder | None = None
        self._calls: list[tuple[Any, ...]] = []  # not handed to the thread yet
        self._waiting_bytes = 0  # estimated size of those and of what the thread has
        self._file: BinaryIO | None = None
        self._worker: Worker | None = None
        self._env: Env | None = None
        self._job: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._end = "closed"

    # -- life

    def open(self, env: Env) -> None:
        """Makes the file and writes the first line. Raises OSError if that fails."""
        self._env, self._worker = env, env.worker("recorder")
        self._worker.start()  # now, as later it could only lose the recording
        self.path, self._file = _create(self.path)
        masking = None if self._with_token_ids else TokenMasking(env.secret("recorder.veil", 32))
        answers = None if self._lookup is None else AnswerHistory(*self._lookup)
        self._encoder = _Encoder(
            env.now(),
            masking,
            has_cache=self._engine.enable_prefix_caching,
            answers=answers,
            has_kinds=self._engine.has_kinds,
        )
        header = {
            "millrace_recording": VERSION,
            "began_wall_s": env.wall_time(),
            "began_s": env.now(),
            "tokens": "hidden" if masking is not None else "plain",
            "engine": self._engine.to_fields(),
            "repeats": None if self._lookup is None else dict(zip(("least", "most"), self._lookup, strict=True)),
        }
        self._file.write(orjson.dumps(header) + b"\n")
        self._file.flush()
        self.is_open = True
        log.info("recording.started", path=str(self.path))

    async def aclose(self) -> None:
        """Writes what is left and closes the file. May be called again."""
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._job is not None:
            await asyncio.wait([self._job])
        if self._worker is None or self._file is None:
            return
        assert self._env is not None
        worker, self._worker = self._worker, None
        file, self._file = self._file, None
        end = [*self._calls, (self._env.now(), "end", self._end)]
        try:
            await worker.submit(self._write, file, end)
        except OSError as error:
            log.error("recording.stopped", path=str(self.path), reason=str(error))
        await worker.aclose()
        with suppress(OSError):  # closing flushes what could not be written before
            file.close()
        log.info("recording.closed", path=str(self.path), num_calls=self.num_calls)

    # -- the `CallLog`

    def schedule(
        self,
        batch: Sequence[Any],
        causes: Mapping[int, str],
        plans: Sequence[StepPlan],
        failed: Sequence[int],
        is_early: bool,
    ) -> None:
        num_bytes = CALL_BYTES
        for message in batch:
            if type(message) is TokenRequest:
                num_bytes += message.token_ids.nbytes
        self._put(num_bytes, "schedule", tuple(batch), causes, plans, failed, is_early)

    def allocate(self, batch: Sequence[Any], answers: Sequence[Answer]) -> None:
        self._put(CALL_BYTES, "allocate", tuple(batch), answers)

    def reset_prefix_cache(self, num_freed: int) -> None:
        self._put(CALL_BYTES, "reset_prefix_cache", num_freed)

    def crash(self, stage: str) -> None:
        """Ends the recording."""
        self._stop(f"stage {stage} crashed")

    def _put(self, num_bytes: int, *call: Any) -> None:
        if not self.is_open:
            return
        assert self._env is not None
        if self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            return self._stop(f"the file cannot be written fast enough: {self._waiting_bytes >> 20} MiB wait for it")
        self._calls.append((self._env.now(), *call))
        self._waiting_bytes += num_bytes
        self.num_calls += 1
        if self._timer is None and self._job is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _stop(self, reason: str) -> None:
        if self.is_open:
            self.is_open, self._end = False, reason
            log.error("recording.stopped", path=str(self.path), reason=reason)

    # -- writing

    def _flush(self) -> None:
        self._timer = None
        if self._worker is None or self._file is None or not self._calls:
            return
        calls, self._calls = self._calls, []
        num_bytes, self._waiting_bytes = self._waiting_bytes, 0
        self._job = self._worker.submit(self._write, self._file, calls)
        self._waiting_bytes = num_bytes
        self._job.add_done_callback(lambda job: self._written(job, num_bytes))

    def _written(self, job: asyncio.Future[None], num_bytes: int) -> None:
        self._job = None
        self._waiting_bytes -= num_bytes
        if not job.cancelled() and (error := job.exception()) is not None:
            self._calls.clear()
            return self._stop(str(error))
        if self._calls and self.is_open:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _write(self, file: BinaryIO, calls: Sequence[tuple[Any, ...]]) -> None:
        """Encodes and writes. Runs on the thread."""
        assert self._encoder is not None
        file.write(b"".join([_dumps(self._encoder.line(*call)) for call in calls]))
        file.flush()


def _dumps(line: Fields) -> bytes:
    return orjson.dumps(line, np.ndarray.tolist, orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


class _Encoder:
    """Encodes calls as lines. Belongs to the thread."""

    def __init__(
        self,
        began_s: float,
        masking: TokenMasking | None,
        *,
        has_cache: bool,
        answers: AnswerHistory | None = None,
        has_kinds: bool = False,
    ) -> None:
        self._began_s = began_s
        self._masking = masking
        self._answers = answers
        self._has_cache = has_cache
        self._has_kinds = has_kinds
        self._unchanged = UnchangedFields()

    def line(self, at_s: float, kind: str, *args: Any) -> Fields:
        match kind:
            case "schedule":
                made: Any = self._schedule(*args)
            case "allocate":
                made = self._allocate(*args)
            case _:
                (made,) = args
        return {"t": round(at_s - self._began_s, 6), kind: made}

    def _schedule(
        self,
        batch: Sequence[Any],
        causes: Mapping[int, str],
        plans: Sequence[StepPlan],
        failed: Sequence[int],
        is_early: bool,
    ) -> Fields:
        taken = [self._taken(message) for message in batch]
        over = [sequence_id for sequence_id, cause in causes.items() if cause not in ("park", "unpark")]
        over += failed
        if self._masking is not None:
            for sequence_id in over:
                self._masking.end(sequence_id)
        made = {
            "in": taken,
            "lane": [[sequence_id, cause] for sequence_id, cause in causes.items()],
            "plans": [self._unchanged.leave_out("plan", plan_fields(plan)) for plan in plans],
            "failed": list(failed),
            "is_early": is_early,
            "repeats": [] if self._answers is None else self._answers.take(batch, over),
        }
        return {name: value for name, value in made.items() if value}

    def _taken(self, message: Any) -> Fields:
        match message:
            case TokenRequest():
                return {"add": self._add(message)}
            case StepDone():
                done = done_fields(message, self._answered(message) if self._has_cache else None)
                return {"done": self._unchanged.leave_out("done", done)}
            case StepVoid():
                return {"void": void_fields(message)}
            case PlanReport():
                return {"report": message.step}
            case Guess():
                return {"guess": guess_fields(message)}
            case _:
                raise TypeError(f"schedule was given a {type(message).__name__}, which the recording format lacks")

    def _add(self, request: TokenRequest) -> Fields:
        token_ids: Ints | None = request.token_ids
        salt = request.cache_salt
        if not self._has_cache:
            token_ids = None
        elif self._masking is not None:
            ids = range(request.first_sequence_id, request.first_sequence_id + request.params.n)
            token_ids, salt = self._masking.begin(ids, request.token_ids), self._masking.name(salt)
        return add_fields(request, token_ids, salt)

    def _answered(self, done: StepDone) -> Ints:
        if self._masking is None:
            return done.token_ids.astype("int32")
        ids = done.sequence_ids.tolist()
        token_ids = self._masking.go_on(ids, done.token_ids) if done.most_tokens == 1 else self._go_on_by_runs(done)
        for row in done.is_finished.nonzero()[0].tolist():
            self._masking.end(ids[row])
        return token_ids

    def _go_on_by_runs(self, done: StepDone) -> Ints:
        """Masks steps with several tokens per answer: each token continues from the one before it."""
        assert self._masking is not None
        nth = np.zeros(len(done.slots), np.intp)  # index of the token among its sequence's in this step
        for row in range(1, len(nth)):
            nth[row] = nth[row - 1] + 1 if done.slots[row] == done.slots[row - 1] else 0
        token_ids = np.zeros(len(nth), np.int32)
        for each in range(int(nth.max(initial=-1)) + 1):
            rows = np.flatnonzero(nth == each)
            token_ids[rows] = self._masking.go_on(done.sequence_ids[rows].tolist(), done.token_ids[rows])
        return token_ids

    def _allocate(self, batch: Sequence[Any], answers: Sequence[Answer]) -> Fields:
        rates = [[message.copy_s, message.compute_s] for message in batch if isinstance(message, Rates)]
        made = {"rates": rates, "answers": [self._answer(*answer) for answer in answers]}
        return {name: value for name, value in made.items() if value}

    def _answer(self, grant: StepGrant | None, report: PlanReport) -> Fields:
        answer: Fields = {"report": self._unchanged.leave_out("report", report_fields(report))}
        if grant is not None:
            answer["grant"] = self._unchanged.leave_out("grant", grant_fields(grant, has_kinds=self._has_kinds))
        return answer


def _create(path: Path) -> tuple[Path, BinaryIO]:
    """A new file, readable by its owner only.

    It is `path`, or the first of `path`.1, `path`.2, ... that does not exist.
    """
    number = 0
    while True:
        chosen = path if not number else path.with_name(f"{path.name}.{number}")
        try:
            descriptor = os.open(chosen, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            number += 1
            continue
        return chosen, os.fdopen(descriptor, "wb")
