"""What happens to a batch whose stage crashed: its requests fail, or the stage recovers, restarts or gives up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .channel import ChannelOverrun
from .env.log import get_logger
from .fault_injection import Faults
from .outlet import CollectingOutlet, Deliverer
from .stage import Context, Crash, Stage
from .trace.tracer import EventKind

MAX_RESTARTS = 5  # within RESTART_WINDOW_S; one more and the stage is broken
RESTART_WINDOW_S = 10.0

log = get_logger("millrace.runtime")


class FatalError(Exception):
    """An error after which no stage can go on, whatever requests it has.

    A stage that raises it ends the pipeline, whatever its `Crash` says. The text becomes the reason in `Health`, which
    clients see.
    """


class StageCrashed(Exception):
    """A stage failed on a request through a bug of ours, not through the request's content."""

    def __init__(self, stage: str, code: str, cause: BaseException) -> None:
        super().__init__(f"stage {stage} failed on this request ({type(cause).__name__})")
        self.stage = stage
        self.code = code
        self.__cause__ = cause


class CrashedRunner(Deliverer, Protocol):
    """What the recovery needs of the stage's runner."""

    stage: Stage[Any, Any]
    faults: Faults | None

    @property
    def num_current_items(self) -> int: ...

    def is_crash(self, error: BaseException) -> bool: ...

    def is_wanted(self, item: Any) -> bool: ...


class CrashRecovery:
    """Does with a crashed stage and its batch what the stage's `Crash` says, and counts the restarts.

    Calls `give_up` with the error of a stage that cannot go on.
    """

    def __init__(
        self,
        runner: CrashedRunner,
        context: Context,
        on_crash: Callable[[str, BaseException, Sequence[Any]], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self.num_restarts = 0
        self._runner = runner
        self._context = context
        self._on_crash = on_crash
        self._give_up = give_up
        self._recent_restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._has_given_up = False

    async def recover(self, batch: list[Any], out: CollectingOutlet, error: BaseException) -> None:
        """Ends or repairs what `handle(batch, out)` left when it raised `error`."""
        runner, stage = self._runner, self._runner.stage
        if isinstance(error, FatalError) and self._has_given_up:
            return  # as for each of its concurrent items: one report is enough
        self._on_crash(runner.name, error, batch)
        if isinstance(error, FatalError):
            self._give_up_once(error)
            return
        if stage.on_crash is Crash.FAIL and not isinstance(error, ChannelOverrun):
            out.discard()
            for item in batch:
                self._fail(item, error)
            return
        if isinstance(error, ChannelOverrun) or stage.on_crash is Crash.ESCALATE or not self._may_restart():
            self._give_up_once(error)
            return
        tracer = self._context.tracer
        error_name = tracer.source(type(error).__name__)
        tracer.emit(EventKind.STAGE_RESTART, self._context.source, 0, self.num_restarts, error_name)
        if stage.on_crash is Crash.RECOVER:
            await self._let_recover(batch, out, error)
        else:
            await self._isolate(batch, out, error)

    def _may_restart(self) -> bool:
        now = self._context.env.now()
        worn_out = len(self._recent_restarts) == MAX_RESTARTS and now - self._recent_restarts[0] < RESTART_WINDOW_S
        self._recent_restarts.append(now)
        self.num_restarts += 1
        return not worn_out

    async def _let_recover(self, batch: list[Any], out: CollectingOutlet, error: BaseException) -> None:
        try:
            await self._runner.stage.recover(batch, error, out)
        except BaseException as second:
            if not self._runner.is_crash(second):
                raise
            self._give_up_once(second)

    def _give_up_once(self, error: BaseException) -> None:
        self._has_given_up = True
        self._give_up(error)

    async def _isolate(self, batch: list[Any], out: CollectingOutlet, error: BaseException) -> None:
        """Restarts the stage and retries each item alone once.

        Items that left the stage cannot be taken back, so a batch that had flushed fails without a retry. A stage with
        other concurrent items is not restarted: they still use its state.
        """
        out.discard()
        if self._runner.num_current_items <= 1:
            await self._runner.stage.teardown()
            await self._runner.stage.setup(self._context)
        for item in batch:
            if out.has_flushed:
                self._fail(item, error)
            elif self._runner.is_wanted(item):
                await self._retry_alone(item, out)

    async def _retry_alone(self, item: Any, out: CollectingOutlet) -> None:
        alone = CollectingOutlet(self._runner)
        try:
            if self._runner.faults is not None:
                await self._runner.faults.strike()
            await self._runner.stage.handle([item], alone)
        except FatalError as error:
            self._give_up_once(error)
        except BaseException as error:
            if not self._runner.is_crash(error):
                raise
            log.error("request.poisoned_stage", stage=self._runner.name, error=type(error).__name__, exc_info=error)
            self._fail(item, error)
        else:
            await alone.flush()
            out.blocked_s += alone.blocked_s

    def _fail(self, item: Any, error: BaseException) -> None:
        stage = self._runner.stage
        self._runner.fail(item, StageCrashed(self._runner.name, stage.error_code, error))
