"""`Router`: chooses the engine of each request, by what the engines have told and what was sent to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .engine_load import EngineLoad, EngineView
from .policies import LeastWork, RoutingPolicy
from .prefix_index import PrefixIndex
from .queue_wait import num_waiting, shortest
from .recent_prefixes import PrefixNode, RecentPrefixes
from .score import RequestFacts, prompt_s

EXPECTED_S = 30.0  # for how long the blocks of a prompt are expected at the engine it was sent to
FIRST_ANSWER = 256.0  # tokens expected of an answer before any has ended
MOST_ANSWERS = 100  # that the mean length of answers is of, about


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router asks of a request."""

    num_prompt: int  # tokens
    keys: Sequence[bytes] = ()  # of the full blocks of its prompt; (): nothing is looked up
    max_answer: int | None = None  # tokens; None: unknown
    num_choices: int = 1
    sticky_key: bytes = b""  # as in `RequestFacts`


class Router:
    """Chooses by `policy` among engines, which are numbered. Those that have not reported yet get the least work."""

    def __init__(self, policy: RoutingPolicy, block_size: int) -> None:
        self.views: dict[int, EngineView] = {}
        self.names: dict[int, str] = {}  # of engines that other routers know by other numbers
        self._policy = policy
        self._unheard = LeastWork()
        self._block_size = block_size
        self._index = PrefixIndex()
        self._recent = RecentPrefixes()
        self.num_expected: Counter[int] = Counter()  # tokens, by engine: those of prompts that it should have cached
        self._answer = FIRST_ANSWER  # mean tokens of answers
        self.last_scores: Mapping[int, float] = {}  # of the last choice, in seconds by engine; {}: it had no scores
        self.last_cached: Mapping[int, int] = {}  # tokens of its prompt by engine, where that was asked
        self._num_answers = 0  # up to `MOST_ANSWERS`

    def view(self, engine: int) -> EngineView:
        """What is known of an engine."""
        view = self.views.get(engine)
        if view is None:
            view = self.views[engine] = EngineView(engine, self.names.get(engine))
        return view

    def choose(self, request: RoutedRequest, engines: Iterable[int], now_s: float) -> int:
        """One of the engines, at least one. Call `note_sent` when the request is sent there."""
        views = [self.views.get(engine) or self.view(engine) for engine in engines]
        self.last_scores, self.last_cached = {}, {}
        if len(views) == 1:
            return views[0].engine
        facts = RequestFacts(request.num_prompt, self._expected(request), request.num_choices, request.sticky_key)
        if None in [view.load for view in views]:
            return self._unheard.choose(facts, views, {})
        runs = self._index.runs(request.keys, [view.engine for view in views], now_s)
        cached = {engine: run * self._block_size for engine, run in runs.items()}
        chosen = self._policy.choose(facts, views, cached)
        self.last_scores, self.last_cached = self._policy.scores, cached
        return chosen

    def note_sent(self, engine: int, request: RoutedRequest, now_s: float) -> None:
        """A request was sent to an engine, chosen here or not."""
        view, seconds, found = self.view(engine), 0.0, 0
        if request.keys:
            found = self._index.runs(request.keys, (engine,), now_s)[engine] * self._block_size
            self.num_expected[engine] += found
        if view.load is not None:
            seconds = prompt_s(view.load.costs, request.num_prompt, found, view.load.token_budget)
        if request.keys:
            self._index.expect(engine, request.keys, now_s, now_s + EXPECTED_S)
            self._recent.note(request.keys)
        view.note_sent(seconds, request.num_prompt, request.num_choices)

    def note_load(self, engine: int, load: EngineLoad) -> None:
        """An engine has reported its work."""
        self.view(engine).note_load(load)

    def note_keys(self, engine: int, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """An engine's cache has gained and lost the blocks of these keys."""
        self._index.add(engine, added)
        self._index.remove(engine, removed)

    def queues(self, engines: Iterable[int], num_more: int) -> tuple[int, float, float] | None:
        """The shortest queue of the engines, at least one: (requests in it, seconds of it, requests in the shortest).

        `num_more` requests are on their way to some engine. The first two are of the queue that takes least time, the
        third of that with the fewest requests. An engine that has not reported has just come, and reports once it has
        requests: it has no queue while it has slots for all that were sent there. None while no engine has reported.
        """
        views = [self.view(engine) for engine in engines]
        heard = [view for view in views if view.load is not None]
        if not heard:
            return None
        share = num_more / len(views)
        num_slots = min(view.load.max_rows for view in heard if view.load is not None)
        if any(view.load is None and view.rows_since + share < num_slots for view in views):
            return 0, 0.0, 0.0
        best, least_s = shortest(heard, self._answer, share)
        fewest = min(num_waiting(view, share) for view in heard)
        return int(num_waiting(best, share)), least_s, fewest

    def note_answer(self, num_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        self._num_answers = min(self._num_answers + 1, MOST_ANSWERS)
        self._answer += (num_tokens - self._answer) / self._num_answers

    def drop(self, engine: int) -> None:
        """An engine is lost, with all that it had cached; one that takes its place begins anew."""
        self._index.drop(engine)
        self.views.pop(engine, None)

    def warm_prefixes(self, engines: Iterable[int]) -> list[tuple[PrefixNode, dict[int, int]]]:
        """The prefixes of the last prompts, and of each, how many tokens each engine says that it has cached."""
        every = list(engines)
        found = []
        for node in self._recent.nodes():
            runs = self._index.runs(node.keys, every, float("inf"))  # without what is only expected
            found.append((node, {engine: run * self._block_size for engine, run in runs.items()}))
        return found

    def held_by(self, engine: int) -> set[bytes]:
        """The keys of the blocks that an engine has told of."""
        return self._index.held_by(engine)

    def _expected(self, request: RoutedRequest) -> float:
        return self._answer if request.max_answer is None else min(self._answer, request.max_answer)
