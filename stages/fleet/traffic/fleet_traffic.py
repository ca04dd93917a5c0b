"""What a front does by the labels of its engines: which side of a split each request goes to, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ....runtime.env.env import Env
from ....runtime.env.log import get_logger
from ...errors import Refused
from ...exit.outboxes import Outboxes, RequestOutbox
from ...messages import TokenRequest
from ...split.engine_core import EngineCore
from ...traffic.compared_answers import RESULTS, Result
from ...traffic.split_counts import Side, SplitCounts, choose_side
from ...traffic.traffic_rules import GROUPS, Group, TrafficRules
from .shadow_copies import ShadowCopies, may_be_copied

log = get_logger("millrace.stages")


class SplitChoice(NamedTuple):
    """The side of a request: what was drawn, and what it got."""

    drawn: Side
    side: Side


class FleetTraffic:
    """Follows `rules`, which may change while requests run: those that were sent stay where they are.

    `is_full` says whether a request would be refused for the queues of these engines.
    """

    def __init__(
        self, rules: TrafficRules | None = None, cores: Sequence[EngineCore] = (), env: Env | None = None
    ) -> None:
        self._cores = cores
        self.copies = None if env is None else ShadowCopies(env)
        self.rules = TrafficRules() if rules is None else rules
        self.counts = SplitCounts()
        self.is_full: Callable[[Sequence[EngineCore]], bool] = lambda cores: False
        self.on_change: Callable[[], object] = lambda: None
        self._exit: Outboxes | None = None

    def open(self, exit: Outboxes) -> None:
        """The front's stages are made: follows the requests in its exit."""
        self._exit = exit
        exit.on_start.append(self._note_first_token)
        exit.on_end.append(self._note_end)
        if self.copies is not None:
            exit.on_end.append(self.copies.note_end)

    def problem(self, rules: TrafficRules) -> str | None:
        """Why not: engines of one group would have different models, or none would serve clients any more."""
        serving = [core for core in self._cores if core.is_serving]
        if any(map(self.serves_clients, serving)) and not any(rules.serves_clients(core.labels) for core in serving):
            return (
                f"all engines that serve have {_text(rules.shadow)}, and would serve copies alone; start one without it"
            )
        firsts: dict[str, EngineCore] = {}
        for core in serving:
            first = firsts.setdefault(group := rules.group_of(core.labels), core)
            if first.model_digest != core.model_digest:
                where = "serve the same requests" if group != "shadow" else "be the same shadow"
                return (
                    f"engines {first.index} and {core.index} have different models, and would {where}; end one of them"
                )
        return None

    def num_engines(self, rules: TrafficRules) -> Mapping[Group, int]:
        """How many engines that serve would be in each group of these rules."""
        groups = Counter(rules.group_of(core.labels) for core in self._cores if core.is_serving)
        return {group: groups[group] for group in GROUPS}

    def change(self, rules: TrafficRules) -> None:
        """Follows other rules from now on. A split of another label is counted anew."""
        if rules == self.rules:
            return
        before, self.rules = self.rules, rules
        if rules.split is not None and (before.split is None or before.split.label != rules.split.label):
            self.counts.clear()
        if before.shadow is not None and (rules.shadow is None or before.shadow.label != rules.shadow.label):
            self._end_shadow()
        log.info("traffic.changed", split=_text(rules.split), shadow=_text(rules.shadow))
        self.on_change()

    def serves_clients(self, core: EngineCore) -> bool:
        """Whether an engine gets requests of clients."""
        return self.rules.shadow is None or self.rules.serves_clients(core.labels)

    def choose(
        self, prompt: TokenRequest, cores: Sequence[EngineCore]
    ) -> tuple[Sequence[EngineCore], SplitChoice | None]:
        """Those of the engines that a new request may go to, all of which have room for it."""
        if (split := self.rules.split) is None:
            return cores, None
        drawn: Side = "labelled" if split.takes(self._key_of(prompt)) else "rest"
        sides: dict[Side, list[EngineCore]] = {"labelled": [], "rest": []}
        for core in cores:
            sides["labelled" if split.selects(core.labels) else "rest"].append(core)
        side = choose_side(drawn, sides, self.is_full)
        return (cores, None) if side is None else (sides[side], SplitChoice(drawn, side))

    def copy(self, prompt: TokenRequest) -> None:
        """A new prompt of a client was sent: sends a copy to an engine of the shadow, if the prompt is in its share."""
        if (shadow := self.rules.shadow) is None or self.copies is None or not may_be_copied(prompt):
            return
        outbox = self._outbox(prompt.request_id)
        if outbox is None or outbox.request.parent_id is not None or not shadow.takes(self._key_of(prompt)):
            return
        taking = [core for core in self._cores if core.is_serving and not core.is_draining and not core.is_silent]
        try:
            self.copies.send(prompt, [core for core in taking if shadow.selects(core.labels)])
        except Exception as error:  # a bug here: it must cost no client's answer
            log.error("shadow.broken", error=type(error).__name__, exc_info=error)

    def _end_shadow(self) -> None:
        if self.copies is not None:
            self.copies.end_all()
            self.copies.results.clear()

    def _key_of(self, prompt: TokenRequest) -> bytes:
        """What a request is drawn by: its session; without one it is drawn by itself, with all steps of its search."""
        if prompt.session:
            text = f"{prompt.owner}/{prompt.session}"
        else:
            outbox = self._outbox(prompt.request_id)
            text = prompt.request_id if outbox is None else outbox.request.parent_id or prompt.request_id
        return text.encode("utf-8", "surrogatepass")

    def _outbox(self, request_id: str) -> RequestOutbox | None:
        return None if self._exit is None else self._exit.live.get(request_id)

    # -- what became of requests

    def note_sent(self, request_id: str, choice: SplitChoice) -> None:
        """A request was sent to an engine of its side. The steps of a beam search do not count."""
        outbox = self._outbox(request_id)
        if outbox is None or outbox.request.parent_id is None:
            self.counts.note_sent(request_id, choice.drawn, choice.side)

    def _note_first_token(self, request_id: str) -> None:
        times = None if (outbox := self._outbox(request_id)) is None else outbox.times
        if times is not None and times.first_token_s is not None:
            self.counts.note_first_token(request_id, max(0, int((times.first_token_s - times.arrival_s) * 1e6)))

    def _note_end(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        is_failed = error is not None and not isinstance(error, Refused)
        self.counts.note_end(outbox.request_id, is_finished=cause == "finish", is_failed=is_failed)

    def to_json(self) -> dict[str, Any]:
        """As pages show it."""
        split, shadow = self.rules.split, self.rules.shadow
        sides = {} if split is None else {side: counts.to_json() for side, counts in self.counts.sides.items()}
        copies = {} if shadow is None else self.copy_results
        engines = self.num_engines(self.rules)
        return {"split": _text(split), "shadow": _text(shadow), "engines": engines, "sides": sides, "copies": copies}

    @property
    def copy_results(self) -> Mapping[Result, int]:
        """What became of the copies, since the shadow has its label."""
        return {} if self.copies is None else {result: self.copies.results[result] for result in RESULTS}

    def log_texts(self, num_chars: int) -> None:
        """From now on a difference between an answer and its copy is logged with so many characters of both."""
        if self.copies is not None:
            self.copies.num_logged_chars = num_chars


def _text(share: object | None) -> str | None:
    return None if share is None else str(share)
