"""A trial: a request that may have ended an engine process runs in one, watched, until it is known to be harmless."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.env.env import Env
from ..exit.outboxes import Outboxes
from ..exit.request_outbox import RequestOutbox
from .inflight_requests import InflightRequests

TRIAL_S = 30.0  # without a token; then a suspect's prompt takes long, and the others wait no longer


async def watch_trial(
    env: Env,
    exit: Outboxes,
    table: InflightRequests,
    request_id: str,
    num_needed: Callable[[RequestOutbox], int],
    has_died: Callable[[], bool],
    *,
    core: int = 0,
    look_s: float,
) -> None:
    """Waits until a suspect has ended, has made the tokens it needs, is parked, makes none for TRIAL_S, or its process
    has died. If that lives, the trial has been passed.

    The trial began in `table`; `num_needed` counts tokens of all choices, and is asked each `look_s` seconds anew.
    """
    last, since_s = 0, env.now()
    while exit.is_live(request_id) and not has_died():
        found = table.num_trial_tokens(core)
        outbox = exit.live[request_id]
        if found >= num_needed(outbox) or any(choice.is_parked for choice in outbox.choices):
            break
        if found > last:
            last, since_s = found, env.now()
        elif env.now() - since_s > TRIAL_S:
            break
        await env.sleep(look_s)
    if not has_died():
        table.end_trial(core)
