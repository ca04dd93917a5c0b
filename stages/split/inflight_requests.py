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
MAX_DEATHS = 2  # engine deaths during a request's run after which it is given up: it may be the cause

Columns = tuple[NDArray[np.int64], Indices, Indices]  # (sequence ids, places, token ids) of steps


@dataclass(slots=True, eq=False)
class _Live:
    prompts: list[TokenRequest] = field(default_factory=list)
    num_deaths: int = 0


class LiveTable:
    """The table of requests in flight.

    `sent` and `note` take about a microsecond. Tokens are assigned to sequences only after a death.
    """

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._request_ids: dict[int, str] = {}  # by sequence id, of live sequences
        self._admitted: set[int] = set()  # sequences that had a slot
        self._steps: list[Columns] = []
        self.last_step = -1

    def __contains__(self, request_id: str) -> bool:
        """Whether any prompt of the request was sent."""
        return request_id in self._live

    def sent(self, request: TokenRequest) -> None:
        """Records a prompt sent to the engine process.

        Sending it again, to another one, changes nothing.
        """
        if request.generated is not None:
            return
        self._live.setdefault(request.request_id, _Live()).prompts.append(request)
        ids = range(request.first_sequence_id, request.first_sequence_id + request.params.n)
        self._request_ids.update(dict.fromkeys(ids, request.request_id))

    def note(self, step: StepTokens) -> None:
        """Records the tokens of a step."""
        self.last_step = max(self.last_step, step.step)
        self._steps.append((step.sequence_ids, step.places, step.token_ids))
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

    def forget(self, request_id: str) -> bool:
        """Drops a request that has ended. False if none of its prompts was sent."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        for prompt in live.prompts:
            self._are_over(range(prompt.first_sequence_id, prompt.first_sequence_id + prompt.params.n))
        return True

    def after_death(self, is_unfinished: Callable[[int], bool]) -> tuple[list[TokenRequest], list[str]]:
        """After a death of the engine process: (prompts to resume, ids of requests to give up).

        `is_unfinished` says of a sequence whether its client still waits for it.
        """
        answers = self._answers()
        resumed, given_up = [], []
        for request_id, live in self._live.items():
            live.num_deaths += any(self.is_admitted(self._ids(prompt)) for prompt in live.prompts)
            if live.num_deaths >= MAX_DEATHS:
                given_up.append(request_id)
                continue
            for prompt in live.prompts:
                first = prompt.first_sequence_id
                left = [one for one in self._ids(prompt) if one in self._request_ids and is_unfinished(one)]
                generated = {one - first: answers.get(one, np.zeros(0, np.int32)) for one in left}
                if generated:
                    resumed.append(replace(prompt, generated=generated))
        self._admitted.clear()
        return resumed, given_up

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
