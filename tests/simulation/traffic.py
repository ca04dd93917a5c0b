"""Runs of a front whose engines have labels, in virtual time: a split and a shadow, which change while requests run.

As `machines.py`, with the same draws, strikes and checks. Of two engines the second has the label, and of three or four
the third serves copies at times. Besides:

    I21  at rest no copy is in flight, and each that was sent has one result; no engine of a shadow ever had a client's
         request
    I22  all tokens of a request, and of all steps of a beam search, come from engines with one model

In every other run the engines of v2 have other weights, and there is always a split between them and the others. A
request whose model has been away for half a minute may then fail. The script of all engines is the same, so the right
answers are known.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from millrace.runtime.pipeline import NotServing
from millrace.runtime.simulation.run import SimResult
from millrace.stages.errors import Failed, RequestError
from millrace.stages.messages import StepTokens, TokenRequest
from millrace.stages.split.inflight_requests import FIRST_COPY_ID
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.simulation.fleet import _note, run_fleet_seed
from tests.simulation.machines import MachinesWorld
from tests.simulation.world import Report, _require

VERSIONS = ("v1", "v2", "v3", "v1")  # by engine
LEFT_ALONE = "no other model goes on with it"


class TrafficWorld(MachinesWorld):
    """See `FleetWorld`."""

    def __init__(self, drawn: Any, env: Any) -> None:
        super().__init__(drawn, env)
        self._dice = Random(f"traffic/{drawn.setup.seed}")
        self._has_models = drawn.setup.seed % 2 == 1
        self._models: dict[str, str] = {}  # by client's request: the digest of the model that computes it
        self.num_copies = 0
        self.rules = self._drawn_rules()

    def labels_of(self, index: int) -> dict[str, str]:
        return {"version": VERSIONS[index]}

    def files_of(self, index: int) -> dict[str, str]:
        return {"model.safetensors": VERSIONS[index]} if self._has_models and VERSIONS[index] == "v2" else {}

    def _drawn_rules(self) -> TrafficRules:
        split = self._dice.choice((None, "version=v2:0", "version=v2:50", "version=v2:100", "version=v3:30"))
        if self._has_models and (split is None or not split.startswith("version=v2")):
            split = "version=v2:50"
        has_shadow = self.setup.config.data_parallel_size > 2 and split != "version=v3:30"
        shadow = self._dice.choice((None, "version=v3:30", "version=v3:100")) if has_shadow else None
        return TrafficRules.parse(split, shadow)

    async def _live(self, engine: Any) -> Report:
        self._watch_sends(engine)
        self._watch_models(engine)
        tasks = [asyncio.create_task(self._change(engine), name="rules")]
        tasks += [asyncio.create_task(self._search(engine), name="search") for _ in range(self._dice.randrange(4))]
        try:
            report = await super()._live(engine)
            for task in tasks:
                _require(task.done(), f"{task.get_name()} goes on")
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        copies = engine.traffic.copies
        _require(not len(copies), f"I21: {len(copies)} copies are in flight")
        _require(not (copies._ours or copies._copied or copies._of_client), "I21: something of a copy is left")
        _require(not len(engine.traffic.counts), "I21: the split still counts requests")
        report.states["copies"] += self.num_copies
        report.states["moved"] += sum(side.num_moved for side in engine.traffic.counts.sides.values())
        return report

    async def _change(self, engine: Any) -> None:
        for _ in range(self._dice.randrange(4)):
            await self.env.sleep(self._dice.choice((self._dice.uniform(0.0, 0.1), self._dice.uniform(0.0, 5.0))))
            self.rules = self._drawn_rules()
            engine.traffic.change(self.rules)

    async def _search(self, engine: Any) -> None:
        """A client with a beam search, or two of one request."""
        await self.env.sleep(self._dice.uniform(0.0, 5.0))
        prompt = [self._dice.randrange(97, 123) for _ in range(self._dice.randrange(1, 4))]
        max_tokens = min(12, (self.setup.config.max_model_len or 0) - len(prompt))
        try:
            await engine.beam_search(prompt, self._dice.randrange(1, 4), max_tokens)
            self.report.states["searched"] += 1
        except (RequestError, NotServing) as error:
            is_left = self._is_left_alone(error) or isinstance(error, NotServing)
            _note(self, is_left or bool(self.guilty), f"I19: a search failed: {error}")

    def _is_left_alone(self, error: BaseException | None) -> bool:
        return self._has_models and isinstance(error, Failed) and LEFT_ALONE in str(error)

    def _check_outcome(self, history: Any) -> None:
        if self._is_left_alone(getattr(history, "error", None)):
            _require(bool(self.drawn.strikes), f"I19: {history.client.request.request_id} lost its model")
            self.report.states["left alone"] += 1
        else:
            super()._check_outcome(history)

    def _watch_models(self, engine: Any) -> None:
        """I22, for each step that arrives."""
        cores, table = engine.core.processes.cores, engine.core.processes.table
        note = table.note

        def note_and_check(step: StepTokens, core: int = 0) -> None:
            for sequence_id in step.sequence_ids.tolist():
                if (request := self.parts.exit.find_request(sequence_id)) is not None:
                    owner, digest = request.parent_id or request.request_id, cores[core].model_digest
                    is_one = self._models.setdefault(owner, digest) == digest
                    _note(self, is_one, f"I22: tokens of {request.request_id} came from two models")
            note(step, core)

        table.note = note_and_check

    def _watch_sends(self, engine: Any) -> None:
        """Notes what goes to each engine."""
        for core in engine.core.processes.cores:
            send = core.requests.try_send

            def sent(prompt: TokenRequest, send: Any = send, index: int = core.index) -> bool:
                is_copy = prompt.first_sequence_id >= FIRST_COPY_ID
                is_shadow = not engine.traffic.rules.serves_clients(self.labels_of(index))
                _note(self, is_copy == is_shadow, f"I21: {prompt.request_id} went to engine {index}")
                is_sent: bool = send(prompt)
                self.num_copies += is_copy and is_sent
                return is_sent

            core.requests.try_send = sent


def run_traffic_seed(seed: int, *, keep_trace: bool = False) -> SimResult[Report]:
    """As `run_machines_seed`, with labels and what goes by them."""
    return run_fleet_seed(seed, keep_trace=keep_trace, make_world=TrafficWorld, flags=" --traffic")
