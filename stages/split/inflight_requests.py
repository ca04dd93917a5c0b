"""Requests in flight: the front process's copy of each, to resume it after a crash.

These are the prompts and params sent, and the tokens received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..messages import Indices, Ints, StepTokens, TokenRequest

STEPS_AT_ONCE = 512  # steps recorded before the tokens of ended sequences are discarded
GROUP_FROM = 8  # suspects that are tried one at a time; of more, those that had made tokens are tried together
FIRST_COPY_ID = 1 << 40  # from here on ids are of sequences that no client waits for: they are in no table
SUSPICIOUS_DEATHS = 2  # engine deaths during a request's run from which on it may be the cause

Columns = tuple[NDArray[np.int64], Indices, Indices]  # (sequence ids, places, token ids) of steps


@dataclass(slots=True, eq=False)
class RequestModel:
    """The model that computes a request's answers. All steps of a beam search have the same one."""

    digest: str | None = None  # None: none has begun, so that any may
    has_ended_steps: bool = False  # of a search: it has used what they brought
    requests: list[InflightRequest] = field(default_factory=list)  # those that have not ended


@dataclass(slots=True, eq=False)
class InflightRequest:
    prompts: list[TokenRequest] = field(default_factory=list)
    core: int | None = 0  # index of the engine process that it was sent to; None: of none, since the last one died
    model: RequestModel = field(default_factory=RequestModel)
    num_deaths: int = 0  # of engine processes that ran it
    num_deaths_unrun: int = 0  # of those that had it and did not run it yet
    num_deaths_passed: int = 0  # `num_deaths` at its last passed trial
    num_trials: int = 0  # that it has passed
    had_tokens: bool = False  # at the last death
    is_tried_alone: bool = False  # after a process died in a trial of it and others
    is_doubted: bool = False  # it ended a process, or only a connection ended; it waits until that is known

    @property
    def is_suspect(self) -> bool:
        return self.num_deaths >= SUSPICIOUS_DEATHS and self.num_deaths > self.num_deaths_passed


@dataclass(slots=True)
class Trial:
    """A suspect runs, watched."""

    core: int
    num_tokens: int = 0  # since it began


class InflightRequests:
    """The table of requests in flight.

    `sent` and `note` take about a microsecond. Tokens are assigned to sequences only after a death. Of several engine
    processes each has an index, `core`; a request is in one at a time, with all its prompts.
    """

    def __init__(self) -> None:
        self._live: dict[str, InflightRequest] = {}
        self._request_ids: dict[int, str] = {}  # by sequence id, of live sequences
        self._admitted: set[int] = set()  # sequences that had a slot
        self._steps: list[Columns] = []
        self._answers_known: dict[int, Ints] | None = None  # those of the last death, until more is noted
        self.group_from = GROUP_FROM
        self._on_trial: dict[str, Trial] = {}  # by request

    def __len__(self) -> int:
        """Requests of which a prompt was sent, and that have not ended."""
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        """Whether any prompt of the request was sent."""
        return request_id in self._live

    def sent(self, request: TokenRequest, core: int | None = 0) -> None:
        """Records a prompt sent to an engine process. Sent again, with what it has generated, it is there from now on.

        `core` None: the request is in none now, and the prompt is to be sent with its others.
        """
        live = self._live.get(request.request_id)
        if live is None:
            if request.generated is not None:
                return  # it has ended since
            live = self._live[request.request_id] = InflightRequest()
        live.core = core
        if request.generated is not None:
            return
        live.prompts.append(request)
        ids = range(request.first_sequence_id, request.first_sequence_id + request.params.n)
        self._request_ids.update(dict.fromkeys(ids, request.request_id))

    def note(self, step: StepTokens, core: int = 0) -> None:
        """Records the tokens of a step."""
        self._steps.append((step.sequence_ids, step.places, step.token_ids))
        self._answers_known = None
        if self._on_trial:
            for owner in map(self._request_ids.get, step.sequence_ids.tolist()):
                trial = self._on_trial.get(owner or "")
                if trial is not None and trial.core == core:
                    trial.num_tokens += 1
        if np.count_nonzero(step.finishes):
            self._are_over(step.sequence_ids[step.finishes != 0].tolist())
        if step.pooled:
            self._are_over(pooled.sequence_id for pooled in step.pooled.values())
        if len(self._steps) >= STEPS_AT_ONCE:
            self._steps = [self._columns()]

    def admit(self, sequence_ids: Iterable[int]) -> None:
        """Records that these sequences were given slots."""
        self._admitted.update(one for one in sequence_ids if one in self._request_ids)

    def is_admitted(self, sequence_ids: Iterable[int]) -> bool:
        """Whether any of these has had a slot."""
        return not self._admitted.isdisjoint(sequence_ids)

    def request_id(self, sequence_id: int) -> str | None:
        """The request of a sequence; None once the sequence has ended."""
        return self._request_ids.get(sequence_id)

    def core_of(self, request_id: str) -> int | None:
        """The engine process that a request was sent to; None: none, or it is not in flight."""
        live = self._live.get(request_id)
        return None if live is None else live.core

    def forget(self, request_id: str) -> bool:
        """Drops a request that has ended. False if none of its prompts was sent."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        for prompt in live.prompts:
            self._are_over(range(prompt.first_sequence_id, prompt.first_sequence_id + prompt.params.n))
        return True

    def request_ids(self) -> list[str]:
        """The requests in flight, in the order of their arrival."""
        return list(self._live)

    def prompts_to_resume(self, request_id: str, is_unfinished: Callable[[int], bool]) -> list[TokenRequest]:
        """The prompts of a request for another engine process, each with its answers so far.

        `is_unfinished` says of a sequence whether its client still waits for it.
        """
        live = self._live.get(request_id)
        if live is None:
            return []
        answers, resumed = self._known_answers(), []
        for prompt in live.prompts:
            first = prompt.first_sequence_id
            left = [one for one in self._ids(prompt) if one in self._request_ids and is_unfinished(one)]
            generated = {one - first: answers.get(one, np.zeros(0, np.int32)) for one in left}
            if generated:
                resumed.append(replace(prompt, generated=generated))
        return resumed

    # -- deaths of the engine process

    def note_death(self, core: int = 0) -> str | None:
        """Records that an engine process died. Returns the request that ended it, if that is certain.

        It is the one on trial, if it ran, and all others that ran had passed their trials; or a request that ran alone,
        and during an earlier death too. Of several on trial each is to be tried alone.
        """
        ran, tried = self._leave(core)
        for _, live in ran:
            live.had_tokens = self._has_tokens(live)
        others = [live for request_id, live in ran if request_id not in tried]
        if len(others) < len(ran) and all(live.num_trials for live in others):  # the death says nothing of them
            if len(others) == len(ran) - 1:
                return next(request_id for request_id, _ in ran if request_id in tried)
            ran = [pair for pair in ran if pair[0] in tried]
            for _, live in ran:
                live.is_tried_alone = True
        for _, live in ran:
            live.num_deaths += 1
        if len(ran) == 1 and ran[0][1].num_deaths >= SUSPICIOUS_DEATHS:
            return ran[0][0]
        return None

    def _leave(self, core: int) -> tuple[list[tuple[str, InflightRequest]], list[str]]:
        """Nothing runs any more in an engine process that died: (the requests that ran there, those on trial)."""
        there = [(request_id, live) for request_id, live in self._live.items() if live.core == core]
        ran = [pair for pair in there if any(self.is_admitted(self._ids(prompt)) for prompt in pair[1].prompts)]
        for _, live in there:
            for prompt in live.prompts:
                self._admitted.difference_update(self._ids(prompt))
        self._answers_known = None
        tried = [request_id for request_id, trial in self._on_trial.items() if trial.core == core]
        for request_id in tried:
            del self._on_trial[request_id]
        return ran, tried

    def suspects(self) -> list[str]:
        """The requests that may have ended an engine process, the youngest first: older ones ran well before.

        They ran during two deaths at least, and have passed no trial since.
        """
        found = [request_id for request_id, live in self._live.items() if live.is_suspect]
        return found[::-1]

    def next_trial(self, size: int, runs: Callable[[str], bool] = bool) -> list[str]:
        """The suspects to try together next, at most `size`, of those for which `runs` is true."""
        return self._together([one for one in self.suspects() if runs(one)], size)

    def _together(self, suspects: list[str], size: int) -> list[str]:
        """If more than `group_from` of these had made tokens, the first `size` of them; else the first suspect.

        Processes seldom die of a request that has made tokens. If one does, more deaths are needed to find it.
        """
        late = [one for one in suspects if self._live[one].had_tokens and not self._live[one].is_tried_alone]
        return late[:size] if len(late) > self.group_from else suspects[:1]

    def _has_tokens(self, live: InflightRequest) -> bool:
        answers = self._known_answers()
        return any(one in answers for prompt in live.prompts for one in self._ids(prompt))

    def begin_trial(self, request_id: str, core: int = 0) -> int:
        """Counts this request's tokens from now on. Returns the number of its earlier trials."""
        self._on_trial[request_id] = Trial(core)
        live = self._live.get(request_id)
        return 0 if live is None else live.num_trials

    def num_trial_tokens(self, request_id: str) -> int:
        """Tokens of a request on trial since its trial began."""
        trial = self._on_trial.get(request_id)
        return 0 if trial is None else trial.num_tokens

    def end_trial(self, request_id: str) -> None:
        """A request on trial has passed it, or is over."""
        live = self._live.get(request_id)
        if self._on_trial.pop(request_id, None) is not None and live is not None:
            live.num_trials += 1
            live.is_tried_alone = False
            live.num_deaths_passed = live.num_deaths

    def _ids(self, prompt: TokenRequest) -> range:
        return range(prompt.first_sequence_id, prompt.first_sequence_id + prompt.params.n)

    def _are_over(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._request_ids.pop(sequence_id, None)
            self._admitted.discard(sequence_id)

    def _columns(self) -> Columns:
        """The recorded tokens of live sequences."""
        if not self._steps:
            return np.zeros(0, np.int64), np.zeros(0, np.intp), np.zeros(0, np.intp)
        ids, places, token_ids = (np.concatenate(columns) for columns in zip(*self._steps, strict=True))
        is_live = np.isin(ids, np.fromiter(self._request_ids, np.int64, len(self._request_ids)))
        return ids[is_live], places[is_live], token_ids[is_live]

    def _known_answers(self) -> dict[int, Ints]:
        if self._answers_known is None:
            self._answers_known = self._answers()
        return self._answers_known

    def _answers(self) -> dict[int, Ints]:
        """The answer so far of each live sequence, by sequence id."""
        ids, places, token_ids = self._columns()
        order = np.lexsort((places, ids))
        ids, places, token_ids = ids[order], places[order], token_ids[order]
        is_new = np.append(True, (ids[1:] != ids[:-1]) | (places[1:] != places[:-1]))[: len(ids)]
        ids, places, token_ids = ids[is_new], places[is_new], token_ids[is_new]
        starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])[: len(ids)]).tolist()
        ends = [*starts[1:], len(ids)]
        answers = {}
        for start, end in zip(starts, ends, strict=False):
            assert (places[start:end] == np.arange(end - start)).all(), f"sequence {ids[start]} lacks a token"
            answers[int(ids[start])] = token_ids[start:end].astype(np.int32)
        return answers
