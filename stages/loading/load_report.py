"""Tells how far loading a model is: a bar on a terminal, else one log line a second."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.startup.load_progress import VERBS, LoadPhase, LoadProgress, LoadState

if TYPE_CHECKING:
    from tqdm import tqdm

BAR_S, LOG_S = 0.2, 1.0  # seconds between two states

T = TypeVar("T")

log = get_logger("millrace.stages")


async def load_and_report(load: Callable[[], Awaitable[T]], progress: LoadProgress, env: Env) -> T:
    """What `load` returns; tells its progress meanwhile, unless `env` is a simulation."""
    if not env.is_live:
        return await load()
    reporting = asyncio.ensure_future(report_loading(progress, env))
    try:
        return await load()
    finally:
        reporting.cancel()
        await asyncio.wait([reporting])


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
    """A bar for each phase that counts bytes, and seconds for each other, on stderr."""

    def __init__(self) -> None:
        self._phase: LoadPhase = "start"
        self._is_text = False  # the bar shows seconds only
        self._bar: tqdm[Any] | None = None

    def show(self, state: LoadState) -> None:
        if state.phase != self._phase:
            self.close()
            self._phase = state.phase
        if not state.total_bytes:
            self._show_seconds(state)
            return
        if self._bar is None or self._is_text:
            self.close()
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
            self._is_text = False
        self._bar.total = state.total_bytes
        self._bar.update(state.num_bytes - self._bar.n)

    def _show_seconds(self, state: LoadState) -> None:
        """A phase whose bytes are not known, once it takes a second: what it does, and for how long."""
        if state.seconds < LOG_S:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(bar_format="{desc}", leave=False, file=sys.stderr)
            self._is_text = True
        self._bar.set_description_str(f"{VERBS[state.phase]}, {state.seconds:.0f} s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
