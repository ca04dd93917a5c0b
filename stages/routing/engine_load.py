"""What an engine reports of its work, and what a router knows of the engine by that."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import NamedTuple

from ...runtime.message import message
from ..schedule.step_timing.step_time_model import StepTimeCosts


@message
class EngineLoad:
    """The work in an engine, as it reports it from time to time."""

    seen: int  # requests of this router that the figures below count, of all that it has sent to this engine
    prompt_s: float  # seconds to compute the prompts that wait, and what is left of those begun
    num_rows: int  # sequences that run
    num_waiting: int  # sequences that wait
    context_tokens: int  # of the sequences that run
    waiting_tokens: int  # of those that wait
    capacity_tokens: int  # that the KV cache holds
    max_rows: int  # sequences that may run at once
    token_budget: int  # of a step
    costs: StepTimeCosts
    free_tokens: int = 0  # of the capacity, what no sequence uses and holds nothing that the prefix cache could find


class _SentRequest(NamedTuple):
    number: int  # of the request, among those sent to the engine
    prompt_s: float
    num_tokens: int
    num_rows: int


class Standing(NamedTuple):
    """What the scores of an engine need, and only a report or a request sent there changes."""

    first_s: float  # to compute the prompts before the next one
    before_s: float  # of a step without it
    num_rows: int  # of that step
    slots_short: float  # slots missing for one sequence more, by all slots
    missing: int  # tokens of all its sequences, less those that the KV cache holds
    running: int  # tokens of the sequences that run
    free: int  # tokens for which memory holds nothing, once the sequences that wait are there
    token_budget: int  # this and the next: as reported
    costs: StepTimeCosts


class EngineView:
    """An engine as a router sees it: the last report, and what was sent since."""

    def __init__(self, engine: int, name: str | None = None) -> None:
        """`name` is the same at all routers, whose numbers may differ; None: so are the numbers."""
        self.engine = engine  # its number
        own = engine.to_bytes(4, "little") if name is None else name.encode()
        self.hash_key = hashlib.blake2b(own, digest_size=16).digest() if len(own) > 4 else own
        self.load: EngineLoad | None = None  # None: it has not reported
        self.work = 0.0  # tokens of the requests in it, and their number; its owner counts them
        self.num_requests = 0
        self.num_sent = 0
        self.prompt_s_since = 0.0  # this and the next two: of requests sent that the report does not count
        self.tokens_since = 0
        self.rows_since = 0
        self._since: deque[_SentRequest] = deque()
        self._standing: Standing | None = None  # None: not known since the last change

    def note_sent(self, prompt_s: float, num_tokens: int, num_rows: int = 1) -> None:
        """A request was sent to the engine: seconds to compute its prompt, its tokens and its choices."""
        self.num_sent += 1
        self._since.append(_SentRequest(self.num_sent, prompt_s, num_tokens, num_rows))
        self._count(self._since[-1], 1)

    def note_load(self, load: EngineLoad) -> None:
        """The engine has reported."""
        self.load, self._standing = load, None
        while self._since and self._since[0].number <= load.seen:
            self._count(self._since.popleft(), -1)
        if not self._since:
            self.prompt_s_since = 0.0  # the sum of what was rounded

    def standing(self) -> Standing | None:
        """What its scores need; None: it has not reported."""
        if self._standing is None and (load := self.load) is not None:
            num_there = load.num_rows + load.num_waiting + self.rows_since
            num_rows = min(load.max_rows, num_there)
            context = load.context_tokens + load.waiting_tokens + self.tokens_since
            self._standing = Standing(
                load.prompt_s + self.prompt_s_since,
                load.costs.decoding_s(num_rows, context),
                num_rows,
                max(0, num_there + 1 - load.max_rows) / load.max_rows,
                context - load.capacity_tokens,
                load.context_tokens,
                load.free_tokens - load.waiting_tokens - self.tokens_since,
                load.token_budget,
                load.costs,
            )
        return self._standing

    def _count(self, sent: _SentRequest, sign: int) -> None:
        self._standing = None
        self.prompt_s_since += sign * sent.prompt_s
        self.tokens_since += sign * sent.num_tokens
        self.rows_since += sign * sent.num_rows
