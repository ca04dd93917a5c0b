"""Tap: counts requests and tokens of each API key, and passes answers on as they are.

    millrace serve --api-key-file keys.txt --stage tap@after=detokenize

`/metrics` then has `millrace:stage:tap:tokens_total{owner="..."}` and others. An owner is an id of the key: the first
16 hex digits of its SHA-256, as `printf KEY | sha256sum` prints them. `names` gives owners readable names:

    stage:
      - {class: tap, after: detokenize, arguments: {names: {a665a45920422f9d: search team}}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace import Stage
from millrace.runtime.stage import Context, Outlet
from millrace.stages.messages import StepText

ANONYMOUS = "none"  # the owner's label where the server has no keys


class Tap(Stage[StepText, StepText]):
    """Counts by owner. What a stage answers by itself, as a cache does, does not come here."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = dict(names or {})
        self._labels: dict[str, str] = {}  # request id -> its owner's label

    async def setup(self, context: Context) -> None:
        self._context, make = context, context.metrics
        self._requests = make.counter("requests", "Requests with an answer.", labels=("owner",))
        self._prompt_tokens = make.counter("prompt_tokens", "Tokens of their prompts.", labels=("owner",))
        self._tokens = make.counter("tokens", "Tokens of answers.", labels=("owner",))
        self._ends = make.counter("ends", "Ends of requests with an answer.", labels=("owner", "cause"))

    async def handle(self, batch: Sequence[StepText], out: Outlet[StepText]) -> None:
        for step in batch:
            for sequence_id in step.sequence_ids:
                if (label := self._label(sequence_id)) is not None:
                    self._tokens.add(owner=label)
            for sequence_id, begun in step.begun.items():
                if (label := self._label(sequence_id)) is not None:
                    self._prompt_tokens.add(len(begun.token_ids), owner=label)
            out.send(step)

    def ended(self, request_id: str, cause: str) -> None:
        label = self._labels.pop(request_id, None)
        if label is not None:
            self._ends.add(owner=label, cause=cause)

    def _label(self, sequence_id: int) -> str | None:
        """The owner's label of a sequence's request; None if that has ended, or is the engine's own."""
        request = self._context.find_request(sequence_id)
        if request is None or request.is_warm_up:
            return None
        label = self._labels.get(request.request_id)
        if label is None:
            label = self._names.get(request.owner, request.owner or ANONYMOUS)
            self._labels[request.request_id] = label
            self._requests.add(owner=label)
        return label
