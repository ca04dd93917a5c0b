"""The grammar gate: tries a request's grammar in a helper process, then compiles it.

Runs before a request enters the waiting queue, on the event loop. What a grammar means is in `model/text/grammar.py`.
"""

from __future__ import annotations

import asyncio
import json

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.exit import Outbox
from ...runtime.processes.helper_pool import HelperDied, HelperNotStarted, HelperPool
from ...runtime.processes.helper_watch import HelperStuck
from ...runtime.workers.thread_start import ThreadNotStarted
from ..errors import Failed, OutOfResources, Overloaded, Refused, Unavailable, field_text
from ..structured_outputs import StructuredOutputs
from .compiled import Grammars, source_of

HELPER = "millrace.stages.grammar.trial_process"
EXPECTED = (Refused, Failed, Unavailable, ThreadNotStarted, HelperNotStarted)  # errors of a trial, which is then over

log = get_logger("millrace.stages")


class GrammarGate:
    """Admits requests once their grammar is compiled, and refuses invalid or costly grammars.

    Requests with the same grammar wait for one trial. An admitted request holds its grammar until `leave`, or until
    `request_ended`, which the exit calls.
    """

    def __init__(self, grammars: Grammars, max_waiting: int = 512) -> None:
        self.grammars = grammars
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self._held: dict[str, StructuredOutputs] = {}  # by request id
        self._trials: dict[StructuredOutputs, asyncio.Task[int]] = {}
        self._helpers: HelperPool | None = None
        self._released = asyncio.Event()

    @property
    def helper_pids(self) -> list[int]:
        """The ids of the processes in which grammars are tried."""
        return [] if self._helpers is None else self._helpers.pids

    async def admit(self, env: Env, request_id: str, structured: StructuredOutputs) -> None:
        """Waits until the request's grammar is ready.

        Raises `Refused` for an unusable grammar or a request id in use, `Overloaded` if too many requests wait,
        `Failed` if the helper process ended without an answer, `OutOfResources` if the system allows no thread or
        process for it, and `Unavailable` if it leaves the process no time.
        """
        if request_id in self._held:
            raise _in_use(request_id)
        if not self.grammars.use(structured):
            if self.num_waiting >= self.max_waiting:
                message = f"{self.num_waiting} requests wait for their grammars: try again in 2 s"
                raise Overloaded(message, queue_depth=self.num_waiting, estimated_wait_s=2.0)
            self.num_waiting += 1
            try:
                await self._bring_in(env, structured)
            except (ThreadNotStarted, HelperNotStarted) as error:
                log.error("grammar.not_tried", request_id=request_id, reason=str(error))
                raise OutOfResources("thread" if isinstance(error, ThreadNotStarted) else "process") from None
            finally:
                self.num_waiting -= 1
        if request_id in self._held:  # another request with this id was admitted in the meantime
            self._release(structured)
            raise _in_use(request_id)
        self._held[request_id] = structured

    def leave(self, request_id: str) -> None:
        """Releases the request's grammar, if it has one."""
        structured = self._held.pop(request_id, None)
        if structured is not None:
            self._release(structured)

    def request_ended(self, outbox: Outbox[object], cause: str, error: BaseException | None) -> None:
        """Releases the grammar of a request that ended, for whatever reason. Called by the exit."""
        self.leave(outbox.request_id)

    async def aclose(self) -> None:
        """Cancels the trials and ends the helper processes."""
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        if self._helpers is not None:
            await self._helpers.aclose()

    def _release(self, structured: StructuredOutputs) -> None:
        self.grammars.release(structured)
        self._released.set()

    async def _bring_in(self, env: Env, structured: StructuredOutputs) -> None:
        num_bytes = await self._try(env, structured)
        while not self.grammars.use(structured):
            template = await env.run_in_thread(self.grammars.compile, structured)
            if self.grammars.use(structured):  # another request has compiled it in the meantime
                return
            if not self.grammars.add(structured, template, num_bytes):
                self._released.clear()
                await self._released.wait()

    async def _try(self, env: Env, structured: StructuredOutputs) -> int:
        """Tries the grammar, or joins its running trial. Returns the bytes that the grammar takes."""
        trial = self._trials.get(structured)
        if trial is None:
            trial = self._trials[structured] = asyncio.ensure_future(self._run_trial(env, structured))
            trial.add_done_callback(lambda done: self._trial_ended(structured, done))
        return await asyncio.shield(trial)

    def _trial_ended(self, structured: StructuredOutputs, trial: asyncio.Task[int]) -> None:
        """Forgets a trial. Reads its error, which no request gets if all that waited for it are gone."""
        self._trials.pop(structured, None)
        error = None if trial.cancelled() else trial.exception()
        if error is not None and not isinstance(error, EXPECTED):
            log.error("grammar.trial_failed", kind=structured.kind, error=type(error).__name__, exc_info=error)

    async def _run_trial(self, env: Env, structured: StructuredOutputs) -> int:
        if self._helpers is None:
            opening = await env.run_in_thread(lambda: self.grammars.vocabulary.to_bytes())
            self._helpers = self._helpers or HelperPool(HELPER, opening)
        question = {"kind": structured.kind, "source": source_of(structured)}
        question_json = json.dumps(question | {"is_compact": structured.disable_any_whitespace}).encode()
        began_s = env.now()
        try:
            reply = json.loads(await self._helpers.ask(question_json))
        except HelperDied as gone:
            raise _helper_error(structured, gone) from None
        except HelperStuck as stuck:
            log.error("grammar.helper_stuck", kind=structured.kind, reason=str(stuck))
            message = "the process that compiles grammars did not get to this one: send the same request again"
            raise Unavailable(message, code="out_of_resources") from None
        if "error" in reply:
            raise _refused(structured, reply["error"])
        seconds = round(env.now() - began_s, 4)
        log.info(
            "grammar.tried", kind=structured.kind, seconds=seconds, bytes=reply["num_bytes"], cpu_ms=reply["cpu_ms"]
        )
        if reply["num_bytes"] > self.grammars.max_bytes:
            raise _refused(structured, f"takes {reply['num_bytes']} bytes: at most {self.grammars.max_bytes}")
        return int(reply["num_bytes"])


def _in_use(request_id: str) -> Refused:
    return Refused(f"request id {request_id!r} is in use", param="request_id")


def _helper_error(structured: StructuredOutputs, gone: HelperDied) -> Refused | Failed:
    log.warning("grammar.helper_gone", kind=structured.kind, signal=gone.signal)
    if gone.is_over_cpu:
        return _refused(structured, "takes more than 2 s to compile: simplify it", "grammar_limit")
    if gone.is_crash:
        return _refused(structured, "takes too much memory to compile: simplify it", "grammar_limit")
    return Failed("the process that compiles grammars ended: send the same request again", code="grammar_error")


def _refused(structured: StructuredOutputs, problem: str, code: str = "invalid_value") -> Refused:
    return Refused(field_text(f"structured_outputs.{structured.kind}", problem), code=code, param="structured_outputs")
