"""Trials: requests that may have ended an engine process run in one, watched, until they are known to be harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...runtime.env.env import Env
from ..exit.outboxes import Outboxes
from ..exit.request_outbox import RequestOutbox
from .inflight_requests import InflightRequests

MOST_AT_ONCE = 64  # suspects in a trial
TRIAL_S = 30.0  # without a token; then a suspect's prompt takes long, and the others wait no longer


async def watch_trials(
    env: Env,
    exit: Outboxes,
    table: InflightRequests,
    request_ids: Iterable[str],
    num_needed: Callable[[RequestOutbox], int],
    has_died: Callable[[], bool],
    *,
    look_s: float,
) -> None:
    """Waits until each suspect has ended, has made the tokens it needs, is parked or makes none for TRIAL_S, which ends
    its trial; or until their process has died.

    The trials began in `table`; `num_needed` counts tokens of all choices, and is asked each `look_s` seconds anew.
    """
    waiting = dict.fromkeys(request_ids, (0, env.now()))  # tokens at the last look that found more, and its time
    while waiting and not has_died():
        for request_id, (last, since_s) in list(waiting.items()):
            found, outbox = table.num_trial_tokens(request_id), exit.live.get(request_id)
            is_parked = outbox is not None and any(choice.is_parked for choice in outbox.choices)
            if outbox is None or is_parked or found >= num_needed(outbox):
                del waiting[request_id]
            elif found > last:
                waiting[request_id] = (found, env.now())
            elif env.now() - since_s > TRIAL_S:
                del waiting[request_id]
            if request_id not in waiting:
                table.end_trial(request_id)
        if waiting:
            await env.sleep(look_s)
