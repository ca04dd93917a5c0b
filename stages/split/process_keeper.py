"""Replaces the engine process when it dies, and finds the request that ends it.

Runs on the front process's event loop. Whatever is raised while a process is replaced is logged and counted; the
streams of clients either go on or end with an error.

A request that runs during two deaths may be their cause, and so may all that ran beside it. The next process runs
these suspects before all others, one more at a time: the one that was added last when it dies is the cause. That
request ends with an error, and the others go on. Of many suspects, those that had made tokens are added several at a
time; if the process dies then, each of these is added alone to the next one.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from ...model.errors import ModelError
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.pipeline import Health, NotServing
from ...runtime.processes.link_channels import OutboundChannel
from ..errors import ConfigError, Failed
from ..exit.outboxes import Outboxes
from ..messages import TokenRequest
from .inflight_requests import InflightRequests
from .process_client import EngineClient, EngineDied
from .trials import MOST_AT_ONCE, watch_trials

MAX_DEATHS = 5  # of engine processes within DEATHS_S; after one more, restarts are given up
DEATHS_S = 120.0
MAX_STARTS = 8  # failed ones in a row, with pauses between them: 31.5 s in all
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
TRIAL_TOKENS = 32  # of each sequence of a suspect: more than an engine process can be ahead of the front process
LONGER = 8  # times as many tokens for a suspect that has passed a trial and ran during a further death
LOOK_S = 0.02  # between two looks at a trial

log = get_logger("millrace.stages")


class ProcessKeeper:
    """Keeps an engine process alive, in one task from `start` to `stop`.

    `start_process` starts a process and returns its client. `on_death` is called with how a process ended. `engine` is
    its index, for the log.
    """

    def __init__(
        self,
        env: Env,
        table: InflightRequests,
        requests: OutboundChannel[TokenRequest],
        exit: Outboxes,
        start_process: Callable[[], Awaitable[EngineClient]],
        on_death: Callable[[str], object],
        *,
        engine: int = 0,
    ) -> None:
        self.away: Health | None = None  # why requests are refused, while there is no engine process for them
        self.num_deaths = 0
        self._engine = engine
        self._broken: str | None = None  # why the present process is about to end, if it has told
        self._env = env
        self._table = table
        self._requests = requests
        self._exit = exit
        self._start_process = start_process
        self._on_death = on_death
        self._deaths_s: deque[float] = deque(maxlen=MAX_DEATHS)  # those that no single request explains
        self._task: asyncio.Task[None] | None = None
        self._failed_start: tuple[str, str] | None = None  # why the last start failed; None: it has not

    def start(self, client: EngineClient | None) -> None:
        """Begins to wait for the death of the first process."""
        self._task = asyncio.get_running_loop().create_task(self._keep(client), name="engine process keeper")

    def note_broken(self, reason: str) -> None:
        """The process has told that it is about to end, and why. Until it has ended, requests are refused."""
        self._broken = reason
        self.away = self.away or Health("loading", stage="engine", reason=f"{reason}; another process will start")

    async def stop(self) -> None:
        """Ends its task. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _keep(self, client: EngineClient | None) -> None:
        try:
            while client is not None:
                client = await self._replace(client.pid, await client.died)
        except Exception as error:  # a bug here: no stream may wait for a process that never comes
            name = type(error).__name__
            log.error("engine_process.not_replaced", engine=self._engine, error=name, exc_info=error)
            self._give_up(f"the engine process could not be replaced: {name}; see the server's log")

    async def _replace(self, pid: int | None, how: str) -> EngineClient | None:
        """Starts another process, and resumes the live requests in it. None if that is given up."""
        began_s, how = self._note_death(pid, how)
        self._requests.hold(lambda prompt: prompt.generated is not None)  # prompts that come now wait in the table
        guilty = self._table.note_death()
        if guilty is not None:
            self._end_guilty(guilty)
        elif self._is_worn_out():
            self._give_up(f"engine processes keep ending, the last one by {how}")
            return None
        else:
            self._deaths_s.append(began_s)
        client = await self._start()
        if client is None:
            return None
        num_resumed = await self._resume(client)
        if client.died.done():
            return client
        took_s = round(self._env.now() - began_s, 3)
        log.info("engine_process.replaced", engine=self._engine, took_s=took_s, num_resumed=num_resumed)
        self.away = None
        self._exit.park_again()
        return client

    def _note_death(self, pid: int | None, how: str) -> tuple[float, str]:
        """Counts, logs and reports a death. Returns the time, and how the process ended as far as it has told."""
        self.num_deaths += 1
        if self._broken is not None:
            how, self._broken = f"{how}: {self._broken}", None
        self.away = Health("loading", stage="engine", reason=f"the engine process ended ({how}), another is starting")
        log.error("engine_process.died", engine=self._engine, pid=pid, how=how, num_live=len(self._exit.live))
        self._on_death(how)
        return self._env.now(), how

    async def _start(self) -> EngineClient | None:
        """Starts a process; tries again after a pause, whatever is raised. None after too many tries."""
        pause_s = FIRST_PAUSE_S
        for attempt in range(MAX_STARTS):
            try:
                client = await self._start_process()
            except Exception as error:  # no process, thread, file or memory for it, another model, or a bug
                reason = self._note_failed_start(error, attempt + 1)
            else:
                self._failed_start = None
                return client
            self.away = Health("loading", stage="engine", reason=f"no engine process could be started yet: {reason}")
            if attempt + 1 < MAX_STARTS:
                await self._env.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._give_up(f"no engine process could be started in {MAX_STARTS} tries: {reason}")
        return None

    def _note_failed_start(self, error: Exception, attempt: int) -> str:
        """Logs why a process did not start, once for as long as it is the same. Returns it for clients."""
        is_told = isinstance(error, (EngineDied, ConfigError, ModelError, NotServing, OSError))
        why = (type(error).__name__, str(error))
        if why != self._failed_start:
            log.error(
                "engine_process.not_started",
                engine=self._engine,
                error=why[0],
                reason=why[1],
                attempt=attempt,
                exc_info=None if is_told else error,
            )
        self._failed_start = why
        return _for_clients(error)

    def _is_worn_out(self) -> bool:
        return len(self._deaths_s) == MAX_DEATHS and self._env.now() - self._deaths_s[0] < DEATHS_S

    def _give_up(self, reason: str) -> None:
        self.away = Health("dead", stage="engine", reason=reason)
        log.error("engine_process.given_up", engine=self._engine, reason=reason, num_deaths=self.num_deaths)
        for request_id in list(self._exit.live):
            self._exit.end(request_id, "error", NotServing(self.away))

    def _end_guilty(self, request_id: str) -> None:
        log.error("engine_process.poisoned", engine=self._engine, request_id=request_id)
        text = "the engine process ended each time it ran this request, which is not tried again; see the server's log"
        self._exit.fail(request_id, Failed(text, code="engine_died"))

    # -- resuming

    async def _resume(self, client: EngineClient) -> int:
        """Sends the live requests to a new process: suspects first, each with a trial, then all others.

        Returns their number. Stops early if the process dies.
        """
        suspects, size = self._table.suspects(), 1
        while some := self._table.next_trial(size):
            await self._try(client, some)
            if client.died.done():
                return 0
            size = min(2 * size, MOST_AT_ONCE)
        self._requests.release()
        others = [request_id for request_id in self._table.request_ids() if request_id not in suspects]
        for request_id in others:
            await self._send(request_id)
        return len(suspects) + len(others)

    async def _send(self, request_id: str) -> None:
        for prompt in self._table.prompts_to_resume(request_id, self._exit.awaits):
            if self._exit.is_live(request_id):
                await self._requests.send(prompt)

    async def _try(self, client: EngineClient, suspects: Sequence[str]) -> None:
        """Sends suspects, and waits until each has ended or passed its trial, or they have ended the process."""
        num_tokens = {one: TRIAL_TOKENS * LONGER ** self._table.begin_trial(one) for one in suspects}
        for request_id in suspects:
            await self._send(request_id)
        await watch_trials(
            self._env,
            self._exit,
            self._table,
            suspects,
            lambda outbox: num_tokens[outbox.request_id] * outbox.request.num_sequences,
            client.died.done,
            look_s=LOOK_S,
        )


def _for_clients(error: Exception) -> str:
    """Why a process did not start, without the folders of this machine."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, (ConfigError, ModelError, EngineDied)):
        return re.sub(r"(/[^/\s:]+)*/", "", str(error))
    return f"{type(error).__name__}; see the server's log"
