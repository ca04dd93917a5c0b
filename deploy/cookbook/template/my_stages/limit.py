"""Limit: refuses prompts that are too long for an owner, and counts the tokens in progress."""

from __future__ import annotations

from collections.abc import Sequence

from millrace import Stage
from millrace.runtime.stage import Context, Outlet
from millrace.stages.errors import Refused
from millrace.stages.messages import TokenRequest


class Limit(Stage[TokenRequest, TokenRequest]):  # takes and makes TokenRequest, so it fits after=tokenize
    """Lets an owner have at most `most` prompt tokens in progress."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"most = {most}: must be at least 1 token")
        self.most = most
        self._in_progress: dict[str, tuple[str, int]] = {}  # request id -> owner and prompt tokens

    async def setup(self, context: Context) -> None:
        self._refused = context.metrics.counter("refused", "Requests that were refused.", labels=("owner",))

    async def handle(self, batch: Sequence[TokenRequest], out: Outlet[TokenRequest]) -> None:
        for request in batch:
            num_tokens = len(request.token_ids)
            held = sum(count for owner, count in self._in_progress.values() if owner == request.owner)
            if held + num_tokens > self.most:
                self._refused.add(owner=request.owner)
                message = f"{num_tokens} prompt tokens with {held} in progress: must be at most {self.most} together"
                out.fail(request, Refused(message, param="prompt"))
                continue
            _, before = self._in_progress.get(request.request_id, ("", 0))  # a request may have several prompts
            self._in_progress[request.request_id] = (request.owner, before + num_tokens)
            out.send(request)

    def ended(self, request_id: str, cause: str) -> None:
        self._in_progress.pop(request_id, None)  # called once for each request, whatever ended it
