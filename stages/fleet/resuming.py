"""Resumes the requests of an engine process that died in the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from ...runtime.env.awake_time import AwakeTimer
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ..config import EngineConfig
from ..errors import Failed
from ..exit.outboxes import Outboxes
from ..split.engine_core import EngineCore
from ..split.trials import MOST_AT_ONCE, watch_trials
from .core_set import CoreSet, can_run
from .fleet_requests import FleetRequests

ALONE_S = 30.0  # that a request waits for an engine with its model, while there are others
LOOK_S = 0.005  # between two looks at a trial
LEFT_ALONE = (
    "no engine that takes requests has had the model that began it for {:g} s, and no other model goes on with it; "
    "send it again"
)
SPARE_STEPS = 2  # that an engine process may be ahead of what it has sent, besides those in flight

log = get_logger("millrace.stages")


class Resuming:
    """Resumes requests in other engine processes, in tasks from `start` to `stop`.

    Those that ran when their process died are suspects: they may have ended it. Each process tries one of them at a
    time, or of many several (`FleetRequests.next_trial`), beside the requests that it serves: a trial is over when the
    suspect has more tokens than the dead process can have been ahead. When the process dies in a trial of one, that is
    the cause (`FleetRequests.note_death`). The other requests are resumed at once.
    """

    def __init__(self, env: Env, config: EngineConfig, table: FleetRequests, cores: CoreSet, exit: Outboxes) -> None:
        self._env = env
        self._table, self._cores, self._exit = table, cores, exit
        drafts = config.num_speculative_tokens if config.speculation != "off" else 0
        self._num_tokens = (config.steps_in_flight + SPARE_STEPS) * (1 + drafts)  # of each sequence, in a trial
        self._wakeup = asyncio.Event()
        self._alone: dict[str | None, AwakeTimer] = {}  # by the digest of a model
        self._hopeless: set[str | None] = set()  # of these, those that have been alone for too long
        self._task: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None  # for a process that takes what is left
        self._trials: dict[int, asyncio.Task[None]] = {}  # by core

    def start(self) -> None:
        """Begins to resume what `wake` says."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="requests to resume")

    def wake(self) -> None:
        """A process died, or takes requests again."""
        self._wakeup.set()

    @property
    def is_trying(self) -> bool:
        """Whether a suspect is on trial."""
        return any(not task.done() for task in self._trials.values())

    async def stop(self) -> None:
        """Ends its tasks. Idempotent."""
        tasks = [task for task in (self._task, self._waiting, *self._trials.values()) if task is not None]
        self._task, self._waiting, self._trials = None, None, {}
        for timer in self._alone.values():
            timer.cancel()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            self._end_hopeless()
            await self._resume_others()
            for core in self._cores.serving():
                task = self._trials.get(core.index)
                if (task is None or task.done()) and self._next_trial(core, 1):
                    name = f"trials in engine {core.index}"
                    self._trials[core.index] = asyncio.get_running_loop().create_task(self._try_all(core), name=name)

    def _end_hopeless(self) -> None:
        """Ends requests whose model no process has had for `ALONE_S`, while others were served by another model."""
        waiting = [one for some in self._table.orphans() for one in some]
        models = {model for one in waiting if self._cores.is_hopeless(model := self._table.model_of(one))}
        self._hopeless &= models
        for model in self._alone.keys() - models:
            self._alone.pop(model).cancel()
        for model in models - self._alone.keys():
            self._alone[model] = AwakeTimer(ALONE_S, self._note_hopeless, model)
        for request_id in waiting:
            if self._table.model_of(request_id) in self._hopeless:
                self._exit.fail(request_id, Failed(LEFT_ALONE.format(ALONE_S), code="engine_died"))

    def _note_hopeless(self, model: str | None) -> None:
        self._hopeless.add(model)
        self.wake()

    async def _resume_others(self) -> None:
        """Sends the requests that are no suspects to the processes with the least work, those that find one."""
        while others := self._table.orphans()[1]:
            for request_id in others:
                core = self._cores.choose(self._table.adapter_of(request_id), self._table.model_of(request_id))
                if core is not None:
                    await self._resume(request_id, self._send(request_id, core))
                    break
            else:
                if self._cores.serving() and (self._waiting is None or self._waiting.done()):
                    waking = self._wake_after(self._cores.next_change)
                    self._waiting = asyncio.get_running_loop().create_task(waking, name="room to resume")
                return

    async def _wake_after(self, change: asyncio.Event) -> None:
        await change.wait()
        self.wake()

    async def _resume(self, request_id: str, resuming: Awaitable[object]) -> None:
        """Awaits `resuming`. A request that it raises for ends, and no other one waits for it."""
        try:
            await resuming
        except Exception as error:  # a bug here: the stream may not wait for ever
            log.error("engine_process.not_resumed", error=type(error).__name__, exc_info=error)
            message = "the engine process ended, and the request could not be resumed; see the server's log"
            self._exit.fail(request_id, Failed(message, code="engine_died"))
            self._table.forget(request_id)
        self._exit.park_again()

    async def _send(self, request_id: str, core: EngineCore) -> bool:
        """Sends all prompts of a request to a process. False if that ends meanwhile."""
        while not self._cores.has_room(core):
            if not core.is_serving or core.is_draining:
                return False
            await self._cores.wait()
        if not self._cores.fits(request_id, core):  # another step of its search was sent meanwhile
            return False
        # read only now: until the first is sent, prompts of the request join it in the table
        prompts = self._table.prompts_to_resume(request_id, self._exit.awaits)
        if not prompts:
            self._table.assign(request_id, core.index)
        for prompt in prompts:
            while not self._cores.send(prompt, core):
                if not core.is_serving or not self._cores.fits(request_id, core):
                    return False
                await self._cores.wait()
                if not self._exit.is_live(request_id):
                    return True
        return True

    # -- trials

    async def _try_all(self, core: EngineCore) -> None:
        """Tries suspects in one process until there are none, or it ends or drains: each time twice as many at once."""
        size = 1
        while core.is_serving and not core.is_draining and (suspects := self._next_trial(core, size)):
            await self._try(core, suspects)
            size = min(2 * size, MOST_AT_ONCE)

    def _next_trial(self, core: EngineCore, size: int) -> list[str]:
        """The next suspects to try in a process, at most `size`, whose adapters and model it has."""
        table = self._table
        return table.next_trial(size, lambda one: can_run(core, table.adapter_of(one), table.model_of(one)))

    async def _try(self, core: EngineCore, suspects: Sequence[str]) -> None:
        """Resumes suspects, and waits until each has ended or passed its trial, or they have ended the process."""
        client = core.client
        for request_id in suspects:
            self._table.begin_trial(request_id, core.index)
        sent = []
        for request_id in suspects:
            await self._resume(request_id, self._send(request_id, core))
            if self._table.core_of(request_id) == core.index:
                sent.append(request_id)
            else:  # the process drains, and another one tries it
                self._table.abandon_trial(request_id, core.index)
                self.wake()
        await watch_trials(
            self._env,
            self._exit,
            self._table,
            sent,
            lambda outbox: self._num_tokens * sum(self._exit.awaits(one.sequence_id) for one in outbox.choices),
            lambda: not core.is_serving or core.client is not client,
            look_s=LOOK_S,
        )
