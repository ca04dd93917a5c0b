"""Copies of clients' requests in engines of another version: answers are compared with the real ones, and dropped.

A copy goes to an engine that serves copies alone, with the lowest priority there. No stage knows of it: its tokens are
taken out where the steps of all engines are joined. So no client waits, fails or is counted for one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ....runtime.env.env import Alarm, Env
from ....runtime.env.log import get_logger
from ...exit.outboxes import RequestOutbox
from ...messages import StepTokens, TokenRequest
from ...split.engine_core import EngineCore
from ...split.inflight_requests import FIRST_COPY_ID
from ...split.protocol import ControlCauses, RequestsEnded
from ...traffic.compared_answers import ComparedChoice, Result, verdict_of

MAX_COPIES = 64  # in flight
LATE_S = 30.0  # after the end of the real answer, for that of its copy
LEAST_PRIORITY = 2**31 - 1
MAX_TEXT_TOKENS = 64  # of each answer, that a difference is logged with

log = get_logger("millrace.stages")


@dataclass(slots=True, eq=False)
class ShadowCopy:
    """A prompt that was copied."""

    prompt: TokenRequest  # of the copy
    request_id: str  # of the client's request
    first_sequence_id: int  # of the client's prompt
    first_choice: int  # index of its first one at the client
    core: EngineCore
    choices: Sequence[ComparedChoice]
    is_greedy: bool
    is_over: bool = False  # the client's answer
    alarms: list[Alarm] = field(default_factory=list)


class ShadowCopies:
    """Sends and follows copies. `has_room` says whether an engine with so many copies would run one more at once.

    `decode` makes text of tokens, of at most `num_logged_chars` characters, for log lines about differences.
    """

    def __init__(self, env: Env) -> None:
        self._env = env
        self.has_room: Callable[[EngineCore, int], bool] = lambda core, num_copies: True
        self.note_sent: Callable[[EngineCore, TokenRequest], object] = lambda core, prompt: None
        self.decode: Callable[[Sequence[int]], str] = lambda token_ids: ""
        self.num_logged_chars = 0
        self.results: Counter[Result] = Counter()
        self._numbers, self._ids = itertools.count(), itertools.count(FIRST_COPY_ID)
        self._copies: dict[str, ShadowCopy] = {}  # by the copy's id
        self._of_client: dict[str, list[ShadowCopy]] = {}  # by the client's request
        self._ours: dict[int, ComparedChoice] = {}  # by sequence of the client
        self._copied: dict[int, ComparedChoice] = {}  # by sequence of the copy
        self._touched: set[int] = set()  # places of engines that have got copies: their steps may have rows of these

    def __len__(self) -> int:
        """Copies in flight."""
        return len(self._copies)

    # -- sending

    def send(self, prompt: TokenRequest, cores: Sequence[EngineCore]) -> None:
        """A client's prompt was sent to its engine: sends a copy to one of these, at the next turn of the loop."""
        num_each = Counter(copy.core.index for copy in self._copies.values())
        free = [core for core in cores if self.has_room(core, num_each[core.index])]
        if not free or len(self._copies) >= MAX_COPIES:
            self.results["shed"] += 1
            return
        core = min(free, key=lambda one: (num_each[one.index], one.index))
        params = replace(prompt.params, logprobs=None, prompt_logprobs=None)
        ids = [next(self._ids) for _ in range(params.n)]
        made = replace(
            prompt,
            request_id=f"shadow-{next(self._numbers)}",
            prompt_index=0,
            params=params,
            first_sequence_id=ids[0],
            priority=LEAST_PRIORITY,
            session="",
            owner="",
            metadata={},
        )
        choices = [ComparedChoice() for _ in ids]
        first, place = prompt.first_sequence_id, prompt.prompt_index * params.n
        copy = ShadowCopy(made, prompt.request_id, first, place, core, choices, params.temperature == 0.0)
        self._copies[made.request_id] = copy
        self._of_client.setdefault(prompt.request_id, []).append(copy)
        self._copied.update(zip(ids, choices, strict=True))
        self._ours.update(zip(range(first, first + params.n), choices, strict=True))
        self.note_sent(core, made)  # now: the next one is to see that it comes
        asyncio.get_running_loop().call_soon(self._put, copy)

    def _put(self, copy: ShadowCopy) -> None:
        if copy.prompt.request_id not in self._copies:
            return
        self._touched.add(copy.core.index)
        if not copy.core.is_serving or not copy.core.requests.try_send(copy.prompt):
            self._settle(copy, "shed")

    # -- tokens

    @property
    def is_watching(self) -> bool:
        """Whether steps may have rows of copies, or of answers that were copied."""
        return bool(self._ours or self._touched)

    def take(self, core: int, step: StepTokens) -> StepTokens | None:
        """The step of an engine without the rows of copies; None if none is left. Follows the answers compared."""
        has_copies = core in self._touched
        try:
            if self._ours:
                self._follow(step, has_copies=has_copies)
        except Exception as error:  # a bug here: it must cost no client's answer
            log.error("shadow.broken", error=type(error).__name__, exc_info=error)
            self.end_all()
        return without_copies(step) if has_copies else step

    def _follow(self, step: StepTokens, *, has_copies: bool) -> None:
        """Adds the tokens of answers that are compared; judges copies whose real answers are over."""
        has_news = False
        for row, number in enumerate(step.sequence_ids.tolist()):
            if (choice := self._ours.get(number)) is not None:
                choice.ours.add(int(step.places[row]), int(step.token_ids[row]), int(step.finishes[row]))
            elif has_copies and (choice := self._copied.get(number)) is not None:
                choice.copied.add(int(step.places[row]), int(step.token_ids[row]), int(step.finishes[row]))
                has_news |= choice.num_tokens is not None
        if has_news:
            for copy in [copy for copy in self._copies.values() if copy.is_over]:
                self._judge(copy)

    # -- ends

    def note_end(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        """A request of a client has ended."""
        for copy in self._of_client.get(outbox.request_id, [])[:]:
            copy.is_over = True
            for choice, buffer in zip(copy.choices, outbox.choices[copy.first_choice :], strict=False):
                choice.num_tokens = buffer.num_generated
            if cause != "finish" or error is not None or not copy.is_greedy:
                self._settle(copy, "uncompared")
            elif not self._judge(copy):
                copy.alarms.append(self._env.call_at(self._env.now() + LATE_S, partial(self._end_late, copy)))

    def note_failed(self, request_id: str, reason: str) -> bool:
        """An engine, or the link, has failed a request; returns whether it is a copy."""
        if not request_id.startswith("shadow-") or (copy := self._copies.get(request_id)) is None:
            return False
        log.warning("shadow.failed", request_id=copy.request_id, engine=copy.core.index, reason=reason)
        self._settle(copy, "failed")
        return True

    def note_lost(self, core: EngineCore) -> None:
        """An engine is gone, with its copies: by plan, or not."""
        for copy in [copy for copy in self._copies.values() if copy.core is core]:
            self._settle(copy, "shed" if core.is_parting else "failed")

    def end_all(self) -> None:
        """Ends all copies: their engines serve copies no longer."""
        for copy in list(self._copies.values()):
            self._settle(copy, "shed")

    def _judge(self, copy: ShadowCopy) -> bool:
        """Whether the copy's answer is known to be equal or different; then the copy is over."""
        if (verdict := verdict_of(copy.choices)) is None:
            return False
        if verdict == "different":
            self._log_difference(copy)
        self._settle(copy, verdict)
        return True

    def _end_late(self, copy: ShadowCopy) -> None:
        if self._copies.get(copy.prompt.request_id) is copy:
            self._settle(copy, "late")

    def _settle(self, copy: ShadowCopy, result: Result) -> None:
        """The copy is over. An engine that still computes it stops."""
        self.results[result] += 1
        request_id = copy.prompt.request_id
        del self._copies[request_id]
        left = self._of_client[copy.request_id]
        left.remove(copy)
        if not left:
            del self._of_client[copy.request_id]
        for number, copied in enumerate(_ids(copy.prompt), copy.first_sequence_id):
            self._ours.pop(number, None)
            self._copied.pop(copied, None)
        for alarm in copy.alarms:
            alarm.cancel()
        pairs = zip(_ids(copy.prompt), copy.choices, strict=True)
        if running := [number for number, choice in pairs if not choice.copied.finish]:
            copy.core.post(ControlCauses(dict.fromkeys(running, "cancel")))
        copy.core.post(RequestsEnded([request_id]))

    def _log_difference(self, copy: ShadowCopy) -> None:
        index, choice = next((i, one) for i, one in enumerate(copy.choices) if one.verdict() == "different")
        ours, copied, due = choice.ours, choice.copied, choice.num_tokens or 0
        place = choice.first_difference()
        place = min(len(copied.token_ids), due) if place is None else place
        texts: dict[str, str] = {}
        if self.num_logged_chars:
            for name, one in (("text", ours), ("copied_text", copied)):
                texts[name] = self.decode(one.token_ids[place : place + MAX_TEXT_TOKENS])[: self.num_logged_chars]
        log.info(
            "shadow.different",
            request_id=copy.request_id,
            choice=copy.first_choice + index,
            engine=copy.core.index,
            place=place,
            num_tokens=due,
            num_copied_tokens=len(copied.token_ids),
            finish=ours.finish,
            copied_finish=copied.finish,
            **texts,
        )


def may_be_copied(prompt: TokenRequest) -> bool:
    """Whether a prompt generates an answer that can be compared."""
    return prompt.pooling is None and not prompt.is_warm_up and bool(prompt.params.max_tokens)


def without_copies(step: StepTokens) -> StepTokens | None:
    """A step without the rows of copies; None if nothing is left."""
    is_kept = step.sequence_ids < FIRST_COPY_ID
    rows = is_kept.nonzero()[0]
    told = (step.started, step.pooled.values(), step.prompt_logprobs, step.progress)
    rest = [[one for one in some if one.sequence_id < FIRST_COPY_ID] for some in told]
    num_told = sum(map(len, told))
    if not len(rows) and not any(rest):
        return None
    if len(rows) == len(is_kept) and sum(map(len, rest)) == num_told:
        return step
    places = {row: place for place, row in enumerate(rows.tolist())} if step.logprobs else {}
    return replace_rows(step, rows, places)


def replace_rows(step: StepTokens, rows: np.ndarray[Any, Any], places: dict[int, int]) -> StepTokens:
    """These rows of a step, and what it tells of sequences that are no copies."""
    return replace(
        step,
        slots=step.slots[rows],
        sequence_ids=step.sequence_ids[rows],
        places=step.places[rows],
        token_ids=step.token_ids[rows],
        finishes=step.finishes[rows],
        started=tuple(one for one in step.started if one.sequence_id < FIRST_COPY_ID),
        logprobs={places[row]: value for row, value in step.logprobs.items() if row in places},
        pooled={slot: one for slot, one in step.pooled.items() if one.sequence_id < FIRST_COPY_ID},
        prompt_logprobs=[one for one in step.prompt_logprobs if one.sequence_id < FIRST_COPY_ID],
        progress=[one for one in step.progress if one.sequence_id < FIRST_COPY_ID],
    )


def _ids(prompt: TokenRequest) -> range:
    return range(prompt.first_sequence_id, prompt.first_sequence_id + prompt.params.n)
