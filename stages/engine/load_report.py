"""Tells how far loading a model is: a bar on a terminal, else one log line a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.startup.load_progress import VERBS, LoadPhase, LoadProgress, LoadState

if TYPE_CHECKING:
    from tqdm import tqdm

BAR_S, LOG_S = 0.2, 1.0  # seconds between two states

log = get_logger("millrace.stages")


async def report_loading(progress: LoadProgress, env: Env) -> None:
    """Tells the states of `progress` until it is cancelled. The first is told after an interval."""
    if not sys.stderr.isatty():
        while True:
            await env.sleep(LOG_S)
            log.info("model.loading", **progress.state().to_json())
    bar = _Bar()
    try:
        while True:
            await env.sleep(BAR_S)
            bar.show(progress.state())
    finally:
        bar.close()


class _Bar:
    """A bar for each phase that counts bytes, on stderr."""

    def __init__(self) -> None:
        self._phase: LoadPhase = "start"
        self._bar: tqdm[Any] | None = None

    def show(self, state: LoadState) -> None:
        if state.phase != self._phase:
            self.close()
            self._phase = state.phase
        if not state.total_bytes:
            return
        if self._bar is None:
            from tqdm import tqdm  # takes 20 ms that a start without a terminal need not

            self._bar = tqdm(
                desc=VERBS[state.phase],
                initial=state.num_bytes_before,
                unit="B",
                unit_scale=True,
                leave=False,
                file=sys.stderr,
                mininterval=0.0,
            )
        self._bar.total = state.total_bytes
        self._bar.update(state.num_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
