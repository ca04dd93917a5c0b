"""Requests in flight in several engine processes, and which of them may have ended one."""

from __future__ import annotations

from collections.abc import Callable

from ..messages import TokenRequest
from ..split.inflight_requests import (
    FIRST_COPY_ID,
    SUSPICIOUS_DEATHS,
    InflightRequest,
    InflightRequests,
    RequestModel,
)
from .dispatcher import CoreLoad, work_of


class CoreWork:
    """The work of the requests in one engine process, by request, and the sum of it."""

    __slots__ = ("by_request", "num_come", "total")

    def __init__(self) -> None:
        self.by_request: dict[str, int] = {}
        self.total = self.num_come = 0

    def set(self, request_id: str, work: int) -> None:
        """A request with this work is there."""
        self.num_come += request_id not in self.by_request
        self.total += work - self.by_request.get(request_id, 0)
        self.by_request[request_id] = work

    def drop(self, request_id: str) -> None:
        """A request is there no longer, if it was."""
        self.total -= self.by_request.pop(request_id, 0)

    def clear(self) -> None:
        """Nothing is there."""
        self.by_request.clear()
        self.total = 0


class FleetRequests(InflightRequests):
    """As `InflightRequests`, with the work in each process.

    A request that ran when a process died is a suspect at once, and tried in another one: a process that serves others
    meanwhile can try it without delay for them. So at most two processes die of one request. One that had not run yet
    is a suspect after the second death: it may end processes before it runs.

    Of many suspects, those that had made tokens are tried several at a time: few processes die of a request so late.
    If one does in such a trial, each of these is tried alone, and a third process may die of the one that is guilty.

    A request stays with the model that began it, and a beam search with that of its first step, for all its prompts.
    """

    def __init__(self, num_cores: int) -> None:
        super().__init__()
        self._work = [CoreWork() for _ in range(num_cores)]  # by core
        self.on_attempt: Callable[[str], object] = str  # called with each request that is sent to a process, or again
        self.search_of: Callable[[str], str | None] = lambda request_id: None  # the live search that a step is of
        self._searches: dict[str, RequestModel] = {}  # by request id of the search
        self._blamed: dict[int, list[tuple[InflightRequest, int, int]]] = {}  # by core: what its last death added

    def sent(self, request: TokenRequest, core: int | None = 0) -> None:
        if request.first_sequence_id >= FIRST_COPY_ID:
            return
        before, is_new = self.core_of(request.request_id), request.request_id not in self._live
        super().sent(request, core)
        live = self._live.get(request.request_id)
        if live is None:
            return
        if is_new:
            if (search := self.search_of(request.request_id)) is not None:
                live.model = self._searches.setdefault(search, live.model)
            live.model.requests.append(live)
        if before is not None and before != core:
            self._work[before].drop(request.request_id)
        if core is not None:
            if before != core:
                self.on_attempt(request.request_id)
            work = self._work[core]
            of_one = request.generated is None and len(live.prompts) == 1
            work.set(request.request_id, work_of(request) if of_one else sum(map(work_of, live.prompts)))

    def forget(self, request_id: str) -> bool:
        self._searches.pop(request_id, None)
        if (live := self._live.get(request_id)) is not None:
            live.model.requests.remove(live)
            live.model.has_ended_steps = True
            if live.core is not None:
                self._work[live.core].drop(request_id)
        return super().forget(request_id)

    def load_of(self, core: int) -> CoreLoad:
        """What is in an engine process."""
        work = self._work[core]
        return CoreLoad(work.total, len(work.by_request), core)

    def is_idle(self, core: int) -> bool:
        """Whether no request is in an engine process."""
        return not self._work[core].by_request

    def num_come(self, core: int) -> int:
        """How many requests have come to an engine process so far."""
        return self._work[core].num_come

    def abandon_trial(self, request_id: str, core: int) -> None:
        """A suspect was not sent to the process that was to try it: it has passed nothing."""
        if (trial := self._on_trial.get(request_id)) is not None and trial.core == core:
            del self._on_trial[request_id]

    def adapter_of(self, request_id: str) -> str:
        """The digest of a request's adapter; "" for the base model, or if the request is not in flight."""
        live = self._live.get(request_id)
        adapter = None if live is None else live.prompts[0].adapter
        return "" if adapter is None else adapter.digest

    def note_model(self, request_id: str, model: str) -> None:
        """A request was sent to an engine with the model of this digest: its answers stay with that model."""
        if (live := self._live.get(request_id)) is not None and live.model.digest is None:
            live.model.digest = model

    def model_of(self, request_id: str) -> str | None:
        """The digest of the model that a request stays with, also of one that was not sent yet; None: any may be."""
        if (live := self._live.get(request_id)) is not None:
            return live.model.digest
        if not self._searches or (search := self.search_of(request_id)) not in self._searches:
            return None
        return self._searches[search].digest

    def orphans(self) -> tuple[list[str], list[str]]:
        """The requests in no process: (those that are suspects, the youngest first; the others, the oldest first)."""
        orphans = ((one, live) for one, live in self._live.items() if live.core is None and not live.is_doubted)
        waiting = [pair for pair in orphans if pair[0] not in self._on_trial]
        suspects = [request_id for request_id, live in waiting if live.num_deaths > live.num_deaths_passed]
        return suspects[::-1], [request_id for request_id, live in waiting if live.num_deaths <= live.num_deaths_passed]

    def next_trial(self, size: int, runs: Callable[[str], bool] = bool) -> list[str]:
        """The suspects in no process to try together next, at most `size`, of those for which `runs` is true."""
        return self._together([one for one in self.orphans()[0] if runs(one)], size)

    def note_death(self, core: int = 0) -> str | None:
        """As in `InflightRequests`. The one on trial is guilty: it ran when another process died, too.

        Those beside it ran there before, and the death says nothing of them; but of those without a token it does.
        """
        ran, tried = self._leave(core)
        tried = [request_id for request_id in tried if self.core_of(request_id) == core]  # the others were not sent yet
        there = self._orphan(core)
        has_run = {request_id for request_id, _ in ran}
        before = [(live, live.num_deaths, live.num_deaths_unrun) for live in there]
        for live in there:
            request_id = live.prompts[0].request_id
            live.had_tokens = self._has_tokens(live)
            if request_id in tried:
                live.num_deaths += 1
                live.is_tried_alone = True
            elif tried:
                live.num_deaths += request_id in has_run and not live.had_tokens
            elif request_id in has_run:
                live.num_deaths += 1
            else:
                live.num_deaths_unrun += 1
                live.num_deaths += live.num_deaths_unrun >= SUSPICIOUS_DEATHS
        added = [(live, live.num_deaths - deaths, live.num_deaths_unrun - unrun) for live, deaths, unrun in before]
        self._blamed[core] = added
        return tried[0] if len(tried) == 1 else None

    def note_return(self, core: int) -> None:
        """The process of the last death lives, and only its connection had ended: that says nothing of any request."""
        for live, deaths, unrun in self._blamed.pop(core, ()):
            live.num_deaths -= deaths
            live.num_deaths_unrun -= unrun
            live.num_deaths_passed = min(live.num_deaths_passed, live.num_deaths)
            live.is_doubted = False

    def note_successor(self, core: int) -> None:
        """Another process is in the place of the last one that died: that one does not return."""
        self._blamed.pop(core, None)

    def doubt(self, request_id: str) -> None:
        """Keeps a request from all processes, as another one may die of it, until `note_return` or its end."""
        if (live := self._live.get(request_id)) is not None:
            live.is_doubted = True

    def note_departure(self, core: int) -> None:
        """A process has gone by plan: its requests are in none now, and that says nothing of them."""
        self.note_successor(core)
        self._leave(core)
        self._orphan(core)

    def _orphan(self, core: int) -> list[InflightRequest]:
        """The requests in a process, which are in none from now on. Those of which nothing has come may go anywhere."""
        there = [self._live[request_id] for request_id in self._work[core].by_request]
        for live in there:
            live.core = None
        for live in there:
            if not self._is_bound(live.model):
                live.model.digest = None
        self._work[core].clear()
        return there

    def _is_bound(self, model: RequestModel) -> bool:
        """Whether anything of it has come, or may still come: of a search, from any of its steps."""
        if model.has_ended_steps:
            return True
        return any(live.core is not None or self._has_come_to_clients(live) for live in model.requests)

    def _has_come_to_clients(self, live: InflightRequest) -> bool:
        """Whether anything of its answers may have: tokens, a whole answer, or log-probabilities of a prompt."""
        asks_scores = any(prompt.params.prompt_logprobs is not None for prompt in live.prompts)
        is_whole = all(one in self._request_ids for prompt in live.prompts for one in self._ids(prompt))
        return asks_scores or not is_whole or self._has_tokens(live)

    @property
    def num_trials_now(self) -> int:
        """How many requests are on trial."""
        return len(self._on_trial)

    def is_trying(self, core: int) -> bool:
        """Whether a request is on trial in an engine process."""
        return any(trial.core == core for trial in self._on_trial.values())

    def assign(self, request_id: str, core: int) -> None:
        """A request of which nothing is left to compute is in this process: its end is on the way to the client."""
        if (live := self._live.get(request_id)) is not None:
            live.core = core
            if request_id not in self._work[core].by_request:
                self._work[core].set(request_id, 0)
