"""One simulated run of the whole pipeline: its clients, and what must be true of it.

A seed draws everything (`setups.py`), and the order of what is ready. The device is scripted, so the right answer to
every request is known (`right_answers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from millrace.runtime.env.log import captured_logs
from millrace.runtime.pipeline import Busy, NotServing
from millrace.runtime.simulation.run import SimEnv, SimResult, run
from millrace.runtime.wakeups import WakeupBatch
from millrace.runtime.workers.thread_start import ThreadNotStarted
from millrace.stages.errors import Failed, Overloaded, RequestError, TimedOut, Unavailable
from millrace.stages.messages import Direction, Prompt
from millrace.stages.outputs import ChoiceDelta
from millrace.stages.schedule.sequence import MAX_PREEMPTIONS, State
from millrace.stages.testing.scripted.async_device import AsyncScriptedModel
from millrace.stages.testing.scripted.engine import ScriptedPipeline, scripted_pipeline
from millrace.stages.testing.scripted.script import Script
from tests.simulation.right_answers import right_answer
from tests.simulation.setups import CLOCK_FAULT, Client, Setup, draw_setup

QUIET_S = 200.0  # virtual, after the last client: then all work has ended


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class History:
    """What one client received."""

    client: Client
    token_ids: list[list[int]]
    texts: list[str]
    finishes: list[tuple[str, str | int | None] | None]
    outcome: str = "waiting"  # refused, finished, left, or the name of its error

    def take(self, delta: ChoiceDelta) -> None:
        i = delta.index
        if self.finishes[i] is not None:
            raise Broken(f"I1: choice {i} of {self.client.request.request_id} got {delta} after its finish")
        self.token_ids[i] += delta.token_ids
        self.texts[i] += delta.text
        if delta.finish_reason is not None:
            self.finishes[i] = (delta.finish_reason, delta.stop_reason)


@dataclass
class Report:
    """The result of a run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)  # "sometimes" states that it passed
    num_steps: int = 0
    health: str = ""


class World:
    """A pipeline in a simulated env, with its clients, and a check after every plan."""

    def __init__(self, setup: Setup, env: SimEnv) -> None:
        self.setup = setup
        self.env = env
        self.script = Script(
            key=setup.seed,
            eos_probability=setup.eos_probability,
            period=setup.period,
            short_length=setup.short_length,
        )
        self.parts = self._build()
        self.report = Report()
        self.ends: Counter[str] = Counter()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_void_plans = 0
        self.others_left = len([client for client in setup.clients if not client.stalls])
        self.others_gone = asyncio.Event()
        if not self.others_left:
            self.others_gone.set()

    def _build(self) -> ScriptedPipeline:
        parts = scripted_pipeline(self.setup.config, self.script, self.env, is_async=self.setup.is_async)
        capacities = iter(self.setup.capacities)
        edges = parts.pipeline.edges
        edges[:] = [replace(e, capacity=next(capacities)) if e.when_full == "wait" else e for e in edges]
        parts.pipeline.entry_capacity = next(capacities)
        parts.schedule.max_waiting = self.setup.max_waiting
        if self.setup.woken_at_once is not None:
            parts.pipeline.wakeups = WakeupBatch(self.setup.woken_at_once)
        cache = parts.allocate.allocator.cache
        if cache is not None:
            cache.min_tokens_to_wait_for = cache.min_tokens_to_fork = 1
            if self.setup.digest_bits < 256:
                cache.digest = self._weak_digest
        parts.exit.on_end.append(lambda box, cause, error: self._on_end(box.request_id, cause))
        serve = parts.allocate.allocator.serve

        def serve_and_check(plan: Any) -> Any:
            grant, report = serve(plan)
            self._check_step(plan, grant, report)
            return grant, report

        add = parts.schedule.scheduler.add

        def add_and_cut(request: Any) -> None:
            add(request)
            self._cut_clients_off()

        parts.allocate.allocator.serve = serve_and_check  # type: ignore[method-assign]
        parts.schedule.scheduler.add = add_and_cut  # type: ignore[method-assign]
        return parts

    def _weak_digest(self, before: bytes, tokens: bytes) -> bytes:
        return bytes([sha256(before + tokens).digest()[0] % 2**self.setup.digest_bits])

    def _on_end(self, request_id: str, cause: str) -> None:
        self.ends[request_id] += 1
        self.report.states["stalled out"] += cause == "stalled_reader"
        self.env.note("end", request_id, cause)

    # -- the checks of every step

    def _check_step(self, plan: Any, grant: Any, report: Any) -> None:
        """I2-I4, I9 and I13. A failure is kept for later: raised here, it would look like a crash of the stage."""
        self.env.note("step", plan.step, plan.slots.tolist(), report.num_granted.tolist(), list(report.preempted))
        try:
            self.parts.check()
            self._check_progress(plan, grant)
        except AssertionError as error:
            self.fail(Broken(f"step {plan.step}: {error}"))
        states = self.report.states
        states["preempted"] += len(report.preempted)
        self._note_swaps(plan, grant, report)
        states["made long"] += bool(set(plan.preempted) & set(plan.dropped))
        states["parked"] += self.parts.schedule.scheduler.num_parked > 0
        sequences = self.parts.schedule.scheduler.sequences.values()
        states["parked on the host"] += any(s.state is State.PARKED and s.num_swapped for s in sequences)
        states["void plan"] += grant is None
        states["quarantined"] += report.num_quarantined > 0
        states["found"] += bool(report.num_cached.any())
        states["shared"] += self.parts.allocate.allocator.pool.num_shared > 0
        copies = () if grant is None else grant.copies
        states["forked"] += any(copy.direction is Direction.FORK for copy in copies)
        states["evicted"] += self.parts.allocate.allocator.pool.num_evicted > 0
        if grant is not None:
            states["chunk"] += int((~grant.is_sampled).any())
            states["mixed step"] += bool((grant.num_certain > 1).any() and (grant.num_certain == 1).any())
            states["drafted"] += grant.drafts is not None
        states["drafts accepted"] += bool(plan.accepted)
        states["drafts left out"] += plan.drafts is not None and grant is not None and grant.drafts is None

    def _note_swaps(self, plan: Any, grant: Any, report: Any) -> None:
        host, states = self.parts.allocate.allocator.host, self.report.states
        if host is None:
            return
        states["swapped out"] += len(report.swapped)
        states["swap given up"] += len(plan.discarded)
        states["swap full"] += host.num_full > 0
        copies = () if grant is None else grant.copies
        states["swapped in"] += sum(copy.direction is Direction.IN for copy in copies)
        cache = self.parts.allocate.allocator.cache
        states["found on the host"] += cache is not None and cache.num_host_hits > 0
        states["copies alone"] += bool(copies) and not len(grant.slots)

    def _cut_clients_off(self) -> None:
        """A proxy in front goes down: many requests are cancelled in one turn of the loop, wherever they are."""
        if self.setup.cut_probability <= self.env.random("cut").random():
            return
        for request_id in list(self.parts.exit.live):
            if self.env.random("cut").random() < 0.3:
                asyncio.get_running_loop().call_soon(self.parts.pipeline.cancel, request_id, "disconnect")

    def _check_progress(self, plan: Any, grant: Any) -> None:
        scheduler = self.parts.schedule.scheduler
        is_stuck = grant is None and len(plan.slots) > 0 and scheduler.num_in_flight == 0
        self.num_void_plans = self.num_void_plans + 1 if is_stuck else 0
        limit = 2 * self.setup.config.max_num_seqs
        assert self.num_void_plans <= limit, f"I9: {self.num_void_plans} plans in a row ran nothing, none in flight"
        for sequence in scheduler.sequences.values():
            count = sequence.num_preempted
            assert count <= MAX_PREEMPTIONS, f"I9: sequence {sequence.sequence_id} was preempted {count} times"

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error`."""
        if not self.failure.done():
            self.failure.set_exception(error)

    # -- clients

    async def live(self) -> Report:
        """The run, from its start until no work is left."""
        pipeline = self.parts.pipeline
        try:
            await pipeline.start()
        except ThreadNotStarted:
            return await self._not_started()
        clients = [asyncio.create_task(self._serve(client), name="client") for client in self.setup.clients]
        ending = asyncio.create_task(self._end_early(), name="ending")
        everything = asyncio.gather(*clients, ending)
        await asyncio.wait([everything, self.failure], return_when=asyncio.FIRST_COMPLETED)
        if self.failure.done():
            everything.cancel()
            with contextlib.suppress(BaseException):
                await everything
            self.failure.result()
        histories = everything.result()[:-1]
        await self.env.sleep(QUIET_S)
        if self.failure.done():
            self.failure.result()
        self.report.health = pipeline.health.state
        self._check_histories(histories)
        if pipeline.health.state in ("ready", "draining"):
            self._check_quiet()
        await pipeline.stop()
        await self.env.aclose()
        self.failure.cancel()
        self.report.num_steps = self.parts.model.num_steps
        if isinstance(self.parts.model, AsyncScriptedModel):
            graphs = self.parts.model.line.graphs
            num_guided = self.parts.model.num_guided
            self.report.states.update(replayed=graphs.num_replayed, eager=graphs.num_eager, guided=num_guided)
        return self.report

    async def _not_started(self) -> Report:
        """The end of a run whose device got no thread. `run_seed` checks that nothing is left of it."""
        await self.parts.pipeline.stop()
        await self.env.aclose()
        self.failure.cancel()
        self.report.states["not started"] += 1
        return self.report

    async def _end_early(self) -> None:
        if self.setup.ends == "all":
            return
        await self.env.sleep(self.setup.ends_at_s)
        if self.setup.ends == "drain":
            await self.parts.pipeline.drain()
        else:
            await self.parts.pipeline.stop()

    async def _serve(self, client: Client) -> History:
        count = client.request.num_sequences
        history = History(client, [[] for _ in range(count)], [""] * count, [None] * count)
        await self.env.sleep(client.arrival_s)
        reading = asyncio.create_task(self._read(history), name="reader")
        try:
            await self._wait_for(reading, client)
        except TimeoutError:
            history.outcome = "left"
            self.parts.pipeline.cancel(client.request.request_id, "disconnect")
        except (NotServing, Busy) as error:
            history.outcome = type(error).__name__
        except RequestError as error:
            history.outcome = type(error).__name__
            history.error = error  # type: ignore[attr-defined]
        if not client.stalls:
            self.others_left -= 1
            if not self.others_left:
                self.others_gone.set()
        self.report.outcomes[history.outcome] += 1
        return history

    async def _wait_for(self, reading: asyncio.Task[None], client: Client) -> None:
        """Raises TimeoutError if the client has lost patience."""
        if client.gives_up_turns is None:
            async with asyncio.timeout(client.gives_up_s):
                await reading
            return
        for _ in range(client.gives_up_turns):
            await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
            await asyncio.wait([reading])
            raise TimeoutError
        reading.result()

    async def _read(self, history: History) -> None:
        client, pipeline = history.client, self.parts.pipeline
        box = await pipeline.submit(client.request, deadline_s=client.deadline_s, wait=client.waits_at_door)
        try:
            if client.stalls:
                await self.others_gone.wait()
            async for deltas in box:
                for delta in deltas:
                    history.take(delta)
                if client.leaves_after is not None and sum(map(len, history.token_ids)) >= client.leaves_after:
                    history.outcome = "left"
                    return
                if client.pause_s:
                    await self.env.sleep(client.pause_s)
            history.outcome = "finished"
        finally:
            pipeline.cancel(client.request.request_id)

    # -- the checks of the end

    def _check_histories(self, histories: Sequence[History]) -> None:
        """I1 and I2: one end a request, and its tokens are those of the right answer, from the first on."""
        for history in histories:
            request = history.client.request
            expected_ends = 0 if history.outcome == "NotServing" and not self.ends[request.request_id] else 1
            ends = self.ends[request.request_id]
            _require(ends == expected_ends or history.outcome == "left", f"I1: {request.request_id} ended {ends} times")
            _require(ends <= 1, f"I1: {request.request_id} ended {ends} times")
            self._check_outcome(history)
            for index in range(request.num_sequences):
                self._check_choice(history, index)

    def _allowed_outcomes(self) -> set[str]:
        """How requests may end besides, in this world."""
        return set()

    def _check_outcome(self, history: History) -> None:
        name, request = history.outcome, history.client.request
        faults = self.setup.faults.keys() - {CLOCK_FAULT}
        allowed = {"finished", "left", "Overloaded", "Busy"} | self._allowed_outcomes()
        if history.client.deadline_s is not None:
            allowed.add(TimedOut.__name__)
        if faults:
            allowed |= {Failed.__name__, Unavailable.__name__, "NotServing"}
        if self.setup.ends != "all":
            allowed.add("NotServing")
        _require(name in allowed, f"{request.request_id} came to {name}: {getattr(history, 'error', '')}")
        if name == Overloaded.__name__:
            _require(not any(history.token_ids), f"{request.request_id} was refused, and got tokens")
        if name == "finished":
            _require(all(history.finishes), f"I1: {request.request_id} is over, but {history.finishes}")

    def _check_choice(self, history: History, index: int) -> None:
        request = history.client.request
        prompt_index, choice = divmod(index, request.params.n)
        ids = _prompt_ids(request.prompts[prompt_index])
        room = (self.setup.config.max_model_len or 0) - len(ids)
        if room < 1:
            return
        right = right_answer(self.script, ids, request.params, choice, room)
        tokens, text, finish = history.token_ids[index], history.texts[index], history.finishes[index]
        where = f"choice {index} of {request.request_id}"
        if finish is not None and finish[0] == "error":
            tokens = tokens[:-1]  # the last one means nothing
            _require(tokens == right.token_ids[: len(tokens)], f"I2: {where} got {tokens}, right is {right.token_ids}")
            return
        _require(tokens == right.token_ids[: len(tokens)], f"I2: {where} got {tokens}, right is {right.token_ids}")
        _require(right.text.startswith(text), f"I2: {where} got {text!r}, right is {right.text!r}")
        if finish is not None and finish[0] != "abort":
            found = (tokens, text, *finish)
            expected = (right.token_ids, right.text, right.finish_reason, right.stop_reason)
            _require(found == expected, f"I2: {where} ended as {found}, right is {expected}")

    def _check_quiet(self) -> None:
        try:
            self.parts.check_quiet()
        except AssertionError as error:
            raise Broken(f"at the end: {error}") from None


def _prompt_ids(prompt: Prompt) -> list[int]:
    return prompt.token_ids.tolist() if prompt.token_ids is not None else list((prompt.text or "").encode())


def _require(is_true: bool, complaint: str) -> None:
    if not is_true:
        raise Broken(complaint)


def run_seed(
    seed: int, *, keep_trace: bool = False, change: Callable[[Setup], Setup] | None = None
) -> SimResult[Report]:
    """Runs the world of `seed`. Raises `Broken` or another error, with a note on how to repeat the run."""
    setup = draw_setup(seed)
    if change is not None:
        setup = change(setup)

    async def main(env: SimEnv) -> Report:
        return await World(setup, env).live()

    try:
        with captured_logs():
            result = run(
                main,
                seed=seed,
                policy=setup.policy,
                fault_probability=1.0,
                fault_names=setup.faults,
                thread_delay_s=(0.0, setup.tokenize_delay_s),
                worker_delay_s={name: (0.0, setup.device_delay_s) for name in ("device", "completion")},
                max_callbacks=3_000_000,
                keep_trace=keep_trace,
            )
        _require(not result.leaked_tasks, f"I7: tasks outlived the run: {result.leaked_tasks}")
    except BaseException as error:
        late = f" --late {setup.config.steps_in_flight}" if setup.is_async else ""
        error.add_note(f"again: python -m tests.simulation.run --seed {seed} --trace{late}")
        raise
    return result
