"""The router of a fleet: from prompts and reports of engine processes to the process that gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..allocate.prefix_cache import PrefixCache
from ..intake.admission import EngineQueues
from ..messages import TokenRequest
from ..routing.engine_load import EngineLoad
from ..routing.policies import POLICIES
from ..routing.reports import KEY_BYTES, KeyChange, unpacked
from ..routing.router import RoutedRequest, Router
from .choice_log import ChoiceLog, EngineChoice
from .dispatcher import CoreLoad, choose

MOST_UNHEARD = 4  # copies that a process may have before it has told of its load


class FleetRouter:
    """Chooses among the engine processes that may take a request, by the rule of this name.

    `prefix_key` is the one that the processes have, so that blocks have the same keys in all of them and here.
    """

    def __init__(self, policy: str, prefix_key: bytes, clock: Callable[[], float]) -> None:
        self.prefix_key = prefix_key
        self._policy, self._clock = policy, clock
        self._router: Router | None = None
        self._keys: PrefixCache | None = None
        self.log = ChoiceLog()
        self._early: list[tuple[int, KeyChange]] = []  # what came before `open`

    def open(self, block_size: int, *, has_prefixes: bool) -> None:
        """The engines are known: the size of their blocks, and whether they have a prefix cache."""
        policy = POLICIES[self._policy]()
        self._router = Router(policy, block_size)
        self._keys = PrefixCache(block_size, self.prefix_key) if has_prefixes and policy.asks_prefixes else None
        early, self._early = self._early, []
        for core, change in early:
            self.note_report(core, change)

    def routed(self, prompt: TokenRequest) -> RoutedRequest:
        """What the rule asks of a prompt."""
        keys: Sequence[bytes] = ()
        if self._keys is not None and prompt.pooling is None:
            adapter = "" if prompt.adapter is None else prompt.adapter.digest
            whole = self._keys.keys_of(prompt.token_ids, prompt.cache_salt, adapter=adapter)
            keys = [key[:KEY_BYTES] for key in whole]
        params, session = prompt.params, f"{prompt.owner}/{prompt.session}" if prompt.session else ""
        return RoutedRequest(
            len(prompt.token_ids), keys, params.max_tokens, params.n, session.encode("utf-8", "surrogatepass")
        )

    def choose(self, routed: RoutedRequest, loads: Sequence[CoreLoad]) -> int | None:
        """The index of one of the processes with these loads; None if there is none."""
        if self._router is None or len(loads) < 2:
            return choose(loads)
        for load in loads:
            view = self._router.view(load.core)
            view.work, view.num_requests = load.work, load.num_requests
        return self._router.choose(routed, [load.core for load in loads], self._clock())

    def note_choice(self, request_id: str, core: int, routed: RoutedRequest, loads: Sequence[CoreLoad]) -> None:
        """The last choice was this one, and the prompt was sent."""
        router, has_choice = self._router, len(loads) > 1
        scores = router.last_scores if has_choice and router is not None else {}
        cached = router.last_cached if has_choice and router is not None else {}
        self.log.note(EngineChoice(request_id, core, self._clock(), routed.num_prompt, loads, scores, cached))

    def note_sent(self, core: int, routed: RoutedRequest) -> None:
        """A prompt was sent to a process."""
        if self._router is not None:
            self._router.note_sent(core, routed, self._clock())

    def num_expected(self, core: int) -> int:
        """Tokens of prompts that were expected in the cache of the process they went to, so far."""
        return 0 if self._router is None else self._router.num_expected[core]

    def note_report(self, core: int, report: EngineLoad | KeyChange) -> None:
        """A process has reported. Raises ValueError for what is no report."""
        if self._router is None:
            if isinstance(report, KeyChange):
                self._early.append((core, report))
        elif isinstance(report, EngineLoad):
            self._router.note_load(core, report)
        else:
            self._router.note_keys(core, unpacked(report.added), unpacked(report.removed))

    def queues(self, cores: Sequence[int], num_more: int, max_waiting: int) -> EngineQueues | None:
        """The queues of these processes, for admission; None while they are not known.

        `num_more` requests are on their way to them, and each may have `max_waiting` in its queue.
        """
        found = None if self._router is None or not cores else self._router.queues(cores, num_more)
        if found is None:
            return None
        num_waiting, wait_s, fewest = found
        return EngineQueues(len(cores), num_waiting, wait_s, fewest < max_waiting)

    def note_copy(self, core: int, prompt: TokenRequest) -> None:
        """A copy of a prompt was sent to a process. Its blocks are not looked up."""
        self.note_sent(core, RoutedRequest(len(prompt.token_ids), (), prompt.params.max_tokens, prompt.params.n))

    def has_free_slot(self, core: int, num_copies: int) -> bool:
        """Whether a process runs what is sent there at once, as far as it has told; it has so many copies now."""
        if self._router is None:
            return False
        view = self._router.view(core)
        if (load := view.load) is None:
            return num_copies < MOST_UNHEARD
        return load.num_rows + load.num_waiting + view.rows_since < load.max_rows

    def warm_prefixes(self, cores: Sequence[int]) -> list[dict[str, Any]]:
        """Which process is warm for which of the last prompts' prefixes, in tokens, as pages show it."""
        if self._router is None or self._keys is None:
            return []
        size = self._keys.block_size
        return [
            {
                "id": node.key.hex()[:8],
                "parent": None if node.parent is None else node.parent.hex()[:8],
                "num_tokens": node.num_blocks * size,
                "num_own_tokens": (node.num_blocks - node.first_block) * size,
                "num_prompts": node.num_prompts,
                "warm": [{"index": core, "num_tokens": warm[core]} for core in cores],
            }
            for node, warm in self._router.warm_prefixes(cores)
        ]

    def note_answer(self, num_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        if self._router is not None:
            self._router.note_answer(num_tokens)

    def name(self, core: int, name: str) -> None:
        """A process has this address, by which other fronts know it. Call it before it gets requests."""
        if self._router is not None:
            self._router.views.pop(core, None)
            self._router.names[core] = name

    def drop(self, core: int) -> None:
        """A process is lost; its successor begins anew."""
        self._early = [(one, change) for one, change in self._early if one != core]
        if self._router is not None:
            self._router.drop(core)

    def held_by(self, core: int) -> set[bytes]:
        """The keys of the blocks that a process has told of."""
        return set() if self._router is None else self._router.held_by(core)
