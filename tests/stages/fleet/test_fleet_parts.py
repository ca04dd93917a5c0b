"""The parts of a fleet that need no process: choice, table of requests, merge, and shares of the machine."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.runtime.env.cpus import Cpus
from millrace.runtime.pipeline import Health
from millrace.runtime.processes.link_channels import OutboundChannel
from millrace.stages.config import EngineConfig, not_for_encoders
from millrace.stages.engine.engine import Engine
from millrace.stages.engine.wiring import PortsOnly
from millrace.stages.errors import ConfigError
from millrace.stages.fleet.core_set import CoreSet
from millrace.stages.fleet.dispatcher import CoreLoad, choose, work_of
from millrace.stages.fleet.fleet_engine import FleetEngine
from millrace.stages.fleet.fleet_requests import FleetRequests
from millrace.stages.fleet.merged_channel import MergedChannel
from millrace.stages.fleet.placement import deal, places
from millrace.stages.fleet.stage import Merge
from millrace.stages.messages import AdapterRef, Started, StepTokens, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.sample.logits_processor import LogitsProcessor
from millrace.stages.split.front import CORE
from millrace.stages.split.inflight_requests import GROUP_FROM
from tests.stages.split.test_split import token_request, tokens


class Core:
    """A core without a process."""

    def __init__(self, table: FleetRequests, index: int, capacity: int = 2) -> None:
        self.index, self.is_serving, self.is_silent, self.sent = index, True, False, list[str]()
        self.is_draining, self.is_parting, self.model_digest = False, False, ""
        self.requests: OutboundChannel[TokenRequest] = OutboundChannel("a", capacity, on_send=self._sent)
        self._table = table

    def _sent(self, prompt: TokenRequest) -> None:
        self._table.sent(prompt, self.index)
        self.sent.append(prompt.request_id)


def fleet(count: int, capacity: int = 100) -> tuple[CoreSet, FleetRequests, list[Core]]:
    table = FleetRequests(count)
    cores = [Core(table, index, capacity) for index in range(count)]
    return CoreSet(cores, table), table, cores  # type: ignore[arg-type]


# -- the choice


def test_the_core_with_the_least_work_is_chosen_then_that_with_the_fewest_requests() -> None:
    assert choose([]) is None
    assert choose([CoreLoad(10, 1, 0), CoreLoad(9, 5, 1), CoreLoad(10, 0, 2)]) == 1
    assert choose([CoreLoad(9, 2, 0), CoreLoad(9, 1, 1), CoreLoad(9, 1, 2)]) == 1


def test_work_counts_the_prompt_once_and_each_answer_up_to_a_usual_length() -> None:
    short = replace(token_request("a", 0), params=SamplingParams(n=1, max_tokens=1))
    assert work_of(short) == 3 + 4
    assert work_of(token_request("a", 0, n=3)) == 3 + 3 * 4 * 50
    endless = replace(short, params=SamplingParams(max_tokens=100_000))
    assert work_of(endless) == 3 + 4 * 256


def test_requests_spread_evenly_and_all_prompts_of_one_stay_together() -> None:
    cores, table, (a, b) = fleet(2)
    for number in range(6):
        assert cores.place(token_request(f"r{number}", 10 * number))
    assert cores.place(token_request("r1", 11, index=1))
    assert a.sent == ["r0", "r2", "r4"] and b.sent == ["r1", "r3", "r5", "r1"]
    assert table.load_of(1).num_requests == 3 and table.load_of(1).work == 4 * 203
    for number in range(6):
        table.forget(f"r{number}")
    assert table.load_of(0) == CoreLoad(0, 0, 0) and table.is_idle(1)


def test_the_work_of_a_core_is_that_of_its_requests_after_any_history() -> None:
    dice = Random(11)
    cores, table, parts = fleet(3, capacity=10_000)
    alive: dict[str, int] = {}
    for number in range(600):
        core, name = dice.choice(parts), f"r{number}"
        match dice.randrange(5):
            case 0 | 1:
                assert cores.place(token_request(name, 10 * number))
                alive[name] = 10 * number
            case 2 if alive:
                name = dice.choice(sorted(alive))
                cores.place(token_request(name, alive[name] + dice.randrange(1, 9), index=1))
            case 3 if alive:
                table.forget(name := dice.choice(sorted(alive)))
                del alive[name]
            case 4 if number % 20 == 0:
                table.note_death(core.index)
                for orphan in sum(table.orphans(), []):
                    for prompt in table.prompts_to_resume(orphan, lambda _: True):
                        cores.send(prompt, dice.choice(parts))  # type: ignore[arg-type]
        for one in parts:
            there = [live for live in table._live.values() if live.core == one.index]
            work = sum(work_of(prompt) for live in there for prompt in live.prompts)
            assert table.load_of(one.index) == CoreLoad(work, len(there), one.index)


def test_a_core_without_room_or_process_is_passed_over_and_a_full_fleet_takes_nothing() -> None:
    cores, _, (a, b) = fleet(2, capacity=1)
    a.is_serving = False
    assert cores.place(token_request("x", 0)) and b.sent == ["x"]
    assert not cores.place(token_request("y", 1)) and not cores.place(token_request("x", 2, index=1))
    a.is_serving = True
    assert cores.place(token_request("y", 1)) and a.sent == ["y"]


def test_a_core_that_is_not_heard_gets_requests_only_if_no_other_is() -> None:
    cores, _, (a, b) = fleet(2)
    a.is_silent = True
    for number in range(3):
        cores.place(token_request(f"r{number}", number))
    assert not a.sent
    b.is_silent = True
    cores.place(token_request("last", 9))
    assert a.sent == ["last"]


def test_requests_with_an_adapter_go_only_to_a_core_that_has_it() -> None:
    cores, table, (a, b) = fleet(2)
    for core, digests in ((a, {"x"}), (b, {"x", "y"})):
        core.adapters = SimpleNamespace(holds=digests.__contains__)  # type: ignore[attr-defined]
    for number, digest in enumerate("yyyx"):
        assert cores.place(replace(token_request(f"r{number}", number), adapter=AdapterRef("name", digest)))
    assert (a.sent, b.sent) == (["r3"], ["r0", "r1", "r2"]) and table.adapter_of("r3") == "x"
    assert not cores.place(replace(token_request("z", 9), adapter=AdapterRef("name", "z"))), "it waits"
    assert cores.choose("y") is b and cores.choose("") is a and cores.choose("z") is None


# -- deaths


def test_only_the_requests_of_the_dead_core_are_resumed_with_what_they_have() -> None:
    cores, table, (a, b) = fleet(2)
    for number in range(4):
        cores.place(token_request(f"r{number}", number))
    table.admit(range(3))  # r3 had no slot yet
    table.note(tokens(0, [(0, 0, 7), (2, 0, 8)]), 0)
    table.note(tokens(0, [(1, 0, 9)]), 1)
    assert table.note_death(0) is None
    assert table.orphans() == (["r2", "r0"], []) and table.is_idle(0) and not table.is_idle(1)
    assert table.note_death(1) is None and table.orphans()[1] == ["r3"]
    (prompt,) = table.prompts_to_resume("r1", lambda _: True)
    assert prompt.generated is not None and prompt.generated[0].tolist() == [9]
    assert cores.place(token_request("r1", 9, index=1)) and a.sent == ["r0", "r2"], "it waits with its request"
    assert len(table.prompts_to_resume("r1", lambda _: True)) == 2
    assert cores.send(prompt, a) and table.core_of("r1") == 0 and table.load_of(0).num_requests == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_request_stays_with_its_model_once_anything_of_it_has_come(is_planned: bool) -> None:
    cores, table, (a, b) = fleet(2)
    a.model_digest, b.model_digest, b.is_serving = "v1", "v2", False
    scored = token_request("scored", 9)
    scored = replace(scored, params=replace(scored.params, prompt_logprobs=0))
    prompts = [token_request("queued", 0), token_request("begun", 1), token_request("one is over", 2, n=2), scored]
    assert all(map(cores.place, prompts))
    table.note(tokens(0, [(1, 0, 7), (2, 0, 8)], over=(2,)))
    table.note_departure(0) if is_planned else table.note_death(0)
    a.is_serving, b.is_serving = False, True
    models = {prompt.request_id: table.model_of(prompt.request_id) for prompt in prompts}
    assert models == {"queued": None, "begun": "v1", "one is over": "v1", "scored": "v1"}
    found = {name: cores.choose("", model) for name, model in models.items()}
    assert [name for name, core in found.items() if core is not None] == ["queued"]
    assert not cores.is_hopeless(None) and cores.is_hopeless("v1")


def searching(table: FleetRequests) -> None:
    """From now on a request whose name begins with `s/` is a step of the search s."""
    table.search_of = lambda request_id: "s" if request_id.startswith("s/") else None


def test_a_step_waits_for_the_model_of_its_search_and_lets_others_pass() -> None:
    cores, table, (a, b) = fleet(2, capacity=1)
    a.model_digest, b.model_digest = "v1", "v2"
    searching(table)
    waiting: list[str] = []
    cores.on_waiting = lambda: waiting.append("a step")
    assert cores.place(token_request("s/0.0", 0)) and a.sent == ["s/0.0"]
    for index in range(2):
        assert cores.place(token_request("s/1.0", 1 + index, index=index)) and table.core_of("s/1.0") is None
    assert waiting == ["a step"] and [prompt.prompt_index for prompt in table.prompts_to_resume("s/1.0", bool)] == [
        0,
        1,
    ]
    assert not cores.send(token_request("s/2.0", 3), b), "to the other model never, however it is chosen"  # type: ignore[arg-type]
    assert cores.place(token_request("r", 4)) and b.sent == ["r"]
    assert cores.choose("", table.model_of("s/1.0")) is None
    a.requests.pay(1)
    assert cores.choose("", table.model_of("s/1.0")) is a


def test_a_step_goes_to_a_draining_engine_only_while_no_other_has_its_model() -> None:
    cores, table, (a, b, c) = fleet(3, capacity=2)
    a.model_digest = b.model_digest = "v1"
    c.model_digest = "v2"
    searching(table)
    assert cores.send(token_request("s/0.0", 0), a)  # type: ignore[arg-type]
    a.is_draining = True
    assert cores.place(token_request("s/1.0", 1)) and b.sent == ["s/1.0"]
    b.is_draining = True
    b.is_parting = True
    assert cores.place(token_request("s/2.0", 2)) and a.sent == ["s/0.0", "s/2.0"]
    assert cores.place(token_request("r", 3)) and c.sent == ["r"], "no new request goes there"
    assert cores.place(token_request("s/3.0", 4)) and table.core_of("s/3.0") is None, "it is full"
    a.requests.pay(1)
    assert cores.choose("", table.model_of("s/3.0")) is a
    a.is_parting = True
    assert cores.choose("", table.model_of("s/3.0")) is None
    c.is_serving = a.is_parting = False
    assert cores.place(token_request("s/4.0", 5)) and not cores.place(token_request("q", 6)), "of a single engine"


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_search_is_free_of_its_model_only_while_nothing_of_any_step_can_come(is_planned: bool) -> None:
    cores, table, (a, b, c) = fleet(3)
    a.model_digest = b.model_digest = "v1"
    c.model_digest = "v2"
    searching(table)
    end = table.note_departure if is_planned else table.note_death
    for number, core in enumerate((a, b)):
        assert cores.send(token_request(f"s/{number}.0", number), core)  # type: ignore[arg-type]
    end(0)
    assert table.model_of("s/0.0") == table.model_of("s/2.0") == "v1", "the other step may bring tokens"
    end(1)
    assert table.model_of("s/0.0") is table.model_of("s/1.0") is table.model_of("s/2.0") is None
    for number in range(2):
        assert cores.send(token_request(f"s/{number}.0", number, generated={}), c)  # type: ignore[arg-type]
    table.note(tokens(0, [(0, 0, 7)], over=(0,)))
    table.forget("s/0.0")
    end(2)
    assert table.model_of("s/1.0") == table.model_of("s/0.1") == "v2", "the search has used a step of it"
    table.forget("s/1.0")
    table.forget("s")
    assert table.model_of("s/0.2") is None and not table._searches


def test_the_request_on_trial_when_a_second_core_dies_is_guilty_and_its_neighbours_are_not() -> None:
    cores, table, (a, b) = fleet(2)
    for number in range(4):
        cores.place(token_request(f"r{number}", number))
    table.admit(range(4))
    table.note(tokens(0, [(1, 0, 7), (3, 0, 7)]), 1)
    table.note_death(0)
    table.begin_trial("r2", 1)
    assert table.orphans() == (["r0"], []), "the one on trial is not tried elsewhere at the same time"
    (prompt,) = table.prompts_to_resume("r2", lambda _: True)
    cores.send(prompt, b)  # type: ignore[arg-type]
    assert table.note_death(1) == "r2"
    table.forget("r2")
    assert table.orphans() == (["r0"], ["r1", "r3"])


def test_a_request_without_a_token_beside_the_one_on_trial_is_a_suspect_too() -> None:
    cores, table, (_, b, _) = fleet(3)
    cores.place(token_request("old", 0))
    table.admit([0])
    table.note_death(0)
    (prompt,) = table.prompts_to_resume("old", lambda _: True)
    table.begin_trial("old", 1)
    cores.send(prompt, b)  # type: ignore[arg-type]
    cores.place(token_request("elsewhere", 1))
    assert table.core_of("elsewhere") == 0, "new requests avoid a process with a trial"
    cores.send(token_request("new", 2), b)  # type: ignore[arg-type]
    table.admit([0, 2])
    assert table.note_death(1) == "old" and table.orphans()[0] == ["new", "old"]


def test_a_request_that_passed_its_trial_is_a_suspect_again_after_another_death() -> None:
    cores, table, (a, b) = fleet(2)
    cores.place(token_request("r", 0))
    table.admit([0])
    table.note_death(0)
    table.begin_trial("r", 1)
    (prompt,) = table.prompts_to_resume("r", lambda _: True)
    cores.send(prompt, b)  # type: ignore[arg-type]
    table.note(tokens(0, [(0, 0, 5), (0, 1, 6)]), 1)
    assert table.num_trial_tokens("r") == 2 and table.num_trial_tokens("x") == 0
    table.end_trial("r")
    table.admit([0])
    assert table.note_death(1) is None and table.orphans() == (["r"], [])


def test_the_end_of_a_connection_whose_process_lives_says_nothing_of_any_request() -> None:
    cores, table, (_, b) = fleet(2)
    for number in range(4):
        cores.place(token_request(f"r{number}", number))
    table.admit(range(3))  # r3 had no slot yet
    table.note_death(0)
    table.note_return(0)
    assert table.orphans() == ([], ["r0", "r2"])
    table.note_death(1)
    assert table.orphans() == (["r1"], ["r0", "r2", "r3"])
    table.begin_trial("r1", 1)
    (prompt,) = table.prompts_to_resume("r1", lambda _: True)
    cores.send(prompt, b)  # type: ignore[arg-type]
    assert table.note_death(1) == "r1"
    table.doubt("r1")
    assert "r1" not in sum(table.orphans(), []), "no process gets it until it is known what has ended"
    table.note_return(1)
    assert table.orphans()[0] == ["r1"], "the first death may have been of it"


def test_a_trial_whose_core_dies_before_the_request_was_sent_proves_nothing() -> None:
    cores, table, _ = fleet(2)
    cores.place(token_request("r", 0))
    table.admit([0])
    table.note_death(0)
    table.begin_trial("r", 1)
    assert table.note_death(1) is None and table.orphans() == (["r"], [])


def test_a_request_that_ends_processes_before_it_runs_is_a_suspect_after_the_second() -> None:
    cores, table, (a, b) = fleet(2)
    cores.place(token_request("r", 0))
    assert table.note_death(0) is None and table.orphans() == ([], ["r"])
    (prompt,) = table.prompts_to_resume("r", lambda _: True)
    cores.send(prompt, b)  # type: ignore[arg-type]
    assert table.note_death(1) is None and table.orphans() == (["r"], [])
    table.begin_trial("r", 0)
    cores.send(prompt, a)  # type: ignore[arg-type]
    assert table.note_death(0) == "r"


def late_suspects(count: int, num_cores: int = 3) -> tuple[CoreSet, FleetRequests, list[Core]]:
    """A fleet whose first core died, with so many requests that had made tokens."""
    cores, table, parts = fleet(num_cores)
    for number in range(count):
        cores.send(token_request(f"r{number}", number), parts[0])  # type: ignore[arg-type]
    table.admit(range(count))
    table.note(tokens(0, [(number, 0, 7) for number in range(count)]), 0)
    assert table.note_death(0) is None
    return cores, table, parts


def anything(request_id: str) -> bool:
    return True


def test_many_suspects_that_had_made_tokens_are_tried_together_and_few_are_not() -> None:
    _, table, _ = late_suspects(GROUP_FROM)
    assert table.next_trial(4, anything) == [f"r{GROUP_FROM - 1}"]
    _, table, _ = late_suspects(GROUP_FROM + 1)
    assert table.next_trial(4, anything) == [f"r{GROUP_FROM - number}" for number in range(4)]
    assert table.next_trial(4, lambda one: one in ("r2", "r5")) == ["r5"], "few can run there"
    assert table.next_trial(4, lambda one: False) == []


def test_a_suspect_without_a_token_is_tried_alone_though_many_others_wait() -> None:
    cores, table, (a, b, _) = late_suspects(GROUP_FROM + 2)
    cores.send(token_request("new", 99), b)  # type: ignore[arg-type]
    table.admit([99])
    table.note_death(1)
    assert table.orphans()[0][0] == "new" and "new" not in table.next_trial(64, anything)
    for request_id in table.next_trial(64, anything):
        table.begin_trial(request_id, 2)
    assert table.next_trial(64, anything) == ["new"]


def test_after_a_death_in_a_trial_of_several_each_of_them_is_tried_alone() -> None:
    cores, table, (_, b, c) = late_suspects(GROUP_FROM + 4)
    tried = table.next_trial(3, anything)
    for request_id in tried:
        table.begin_trial(request_id, 1)
    for request_id in tried[:2]:
        (prompt,) = table.prompts_to_resume(request_id, lambda _: True)
        cores.send(prompt, b)  # type: ignore[arg-type]
    table.end_trial(tried[0])  # it made enough tokens
    (prompt,) = table.prompts_to_resume(tried[2], lambda _: True)
    cores.send(prompt, b)  # type: ignore[arg-type]
    assert table.note_death(1) is None and set(tried) <= set(table.orphans()[0]) | {tried[0]}
    assert not set(tried[1:]) & set(table.next_trial(64, anything))
    for request_id in table.next_trial(64, anything):
        table.forget(request_id)
    (last,) = table.next_trial(64, anything)
    assert last == tried[1]
    table.begin_trial(last, 2)
    (prompt,) = table.prompts_to_resume(last, lambda _: True)
    cores.send(prompt, c)  # type: ignore[arg-type]
    assert table.note_death(2) == last
    table.forget(last)
    assert table.next_trial(64, anything) == [tried[2]]


def test_only_a_single_suspect_left_in_its_trial_is_guilty() -> None:
    cores, table, (_, b, _) = late_suspects(GROUP_FROM + 1)
    first, second = table.next_trial(2, anything)
    for request_id in (first, second):
        table.begin_trial(request_id, 1)
        (prompt,) = table.prompts_to_resume(request_id, lambda _: True)
        cores.send(prompt, b)  # type: ignore[arg-type]
    table.end_trial(first)
    assert table.note_death(1) == second


# -- the merge


class Carrier:
    def __init__(self) -> None:
        self.num_wakes = 0

    def carry(self, kind: int, edge: int, message: Any = None) -> None: ...

    def wake(self) -> None:
        self.num_wakes += 1


def test_steps_of_all_cores_come_in_one_order_and_each_link_gets_its_own_credits() -> None:
    noted: list[int] = []
    merged = MergedChannel("m", 32, lambda: 0.0)
    ends = [merged.add_end(core, "e", 16, lambda: 0.0, lambda step: noted.append(step.step)) for core in range(2)]
    links = [Carrier(), Carrier()]
    for end, link in zip(ends, links, strict=True):
        end.bind(link, 0)
    for number, core in enumerate((0, 1, 1)):
        ends[core].arrive(tokens(number, [(0, 0, 1)]))
    ends[1].unbind()  # its process is lost: what came stays in its place, and no credits go back
    ends[0].arrive(tokens(3, [(0, 1, 1)]))
    assert [(item.core, item.step) for item in merged.recv_all()] == [(0, 0), (1, 1), (1, 2), (0, 3)]
    assert noted == [0, 1, 2, 3] and (ends[0].num_owed, ends[1].num_owed) == (2, 0)
    assert (links[0].num_wakes, links[1].num_wakes) == (1, 0)
    ends[0].close()
    assert not merged.is_closed, "other processes go on"


def test_each_core_has_slots_of_its_own_after_the_merge() -> None:
    started = Started(2, 5, "r", np.array([1], np.int32), 1, SamplingParams(), 0)
    step = replace(tokens(0, [(5, 0, 7)]), slots=np.array([2]), started=(started,), pooled={1: "vector"})
    shifted: StepTokens = Merge.shifted(step, 16)
    assert shifted.slots.tolist() == [18] and shifted.started[0].slot == 18 and list(shifted.pooled) == [17]
    assert step.slots.tolist() == [2]
    untouched = [field.name for field in fields(StepTokens) if field.name not in ("slots", "started", "pooled")]
    assert all(getattr(shifted, name) is getattr(step, name) for name in untouched)


# -- shares of the machine


def test_cores_are_dealt_in_whole_by_numa_node_and_too_few_are_shared(tmp_path: Path) -> None:
    cpu = tmp_path / "sys/devices/system/cpu"
    for number, node in enumerate((0, 1, 0, 1)):  # CPUs 0 to 3 are cores; 4 to 7 their siblings
        for one in (number, number + 4):
            (cpu / f"cpu{one}/node{node}").mkdir(parents=True)
            (cpu / f"cpu{one}/topology").mkdir()
            (cpu / f"cpu{one}/topology/thread_siblings_list").write_text(f"{number},{number + 4}\n")
    cpus = Cpus(tuple(range(8)), (0, 1, 2, 3))
    assert deal(cpus, 2, tmp_path) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert deal(cpus, 5, tmp_path) == [()] * 5 and deal(cpus, 1, tmp_path) == [()]
    assert deal(Cpus((0, 1, 2), (0, 1, 2)), 2, tmp_path / "none") == [(0,), (1, 2)]


def test_engine_processes_share_threads_and_get_a_gpu_each(tmp_path: Path) -> None:
    cpus = Cpus((0, 1, 2, 3), (0, 1, 2, 3))
    config = EngineConfig(data_parallel_size=3)
    found = places(config, cpus, {}, tmp_path)
    assert [place.config.threads for place in found] == [1, 1, 1]
    assert [place.environment for place in found] == [{"CUDA_VISIBLE_DEVICES": str(index)} for index in range(3)]
    own = {"CUDA_VISIBLE_DEVICES": "5, 7"}
    pair = places(replace(config, data_parallel_size=2, device="cuda", threads=4), cpus, own, tmp_path)
    assert [(place.config.threads, *place.environment.values()) for place in pair] == [(4, "5"), (4, "7")]
    assert places(replace(config, device="cpu"), cpus, {}, tmp_path)[0].environment == {}
    wide = places(EngineConfig(data_parallel_size=2, tensor_parallel_size=2, device="cuda"), cpus, {}, tmp_path)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in wide] == ["0,1", "2,3"]
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # none, which is not the same as unset
    assert {place.environment["CUDA_VISIBLE_DEVICES"] for place in places(config, cpus, hidden, tmp_path)} == {"-1"}
    with pytest.raises(ConfigError, match="needs 3 GPUs, and CUDA_VISIBLE_DEVICES names 0"):
        places(replace(config, device="cuda"), cpus, hidden, tmp_path)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES = 1,0,1: names 1 twice"):
        places(config, cpus, {"CUDA_VISIBLE_DEVICES": "1,0,1"}, tmp_path)
    with pytest.raises(ConfigError, match="needs 3 GPUs, and CUDA_VISIBLE_DEVICES names 2"):
        places(replace(config, device="cuda"), cpus, own, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"record": "a.rec"}, "records one engine"), ({"device": "cuda:1"}, "is one GPU, and data_parallel_size = 2")],
)
def test_settings_for_one_engine_are_refused_for_several(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        places(EngineConfig(data_parallel_size=2, **settings), Cpus((0,), (0,)), {})


def test_a_successor_may_take_the_memory_that_is_free_for_those_that_are_being_started() -> None:
    engine = FleetEngine(data_parallel_size=3)
    shares = [engine.core.processes.config_of(core).data_parallel_size for core in engine.core.processes.cores]
    assert shares == [3, 3, 3]
    for core, away in zip(engine.core.processes.cores, ("loading", None, "dead"), strict=True):
        core.client = SimpleNamespace(is_open=away is None)  # type: ignore[assignment]
        core.keeper = SimpleNamespace(away=away and Health(away))  # type: ignore[assignment, arg-type]
    assert engine.core.processes.config_of(engine.core.processes.cores[0]).data_parallel_size == 1
    engine.core.processes.cores[1].client = SimpleNamespace(is_open=False)  # type: ignore[assignment]
    assert engine.core.processes.config_of(engine.core.processes.cores[0]).data_parallel_size == 2


def test_what_needs_one_engine_says_so_and_how_to_have_it() -> None:
    one, two = EngineConfig(), EngineConfig(data_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size = 2: .* use data_parallel_size = 1 and mode = inline"):
        FleetEngine(two, logits_processor=LogitsProcessor())
    with pytest.raises(ConfigError, match="data_parallel_size = 2: sample is in the engine process"):
        FleetEngine(two).replace("sample", PortsOnly(CORE["sample"]))
    assert str(not_for_encoders(two)).startswith("data_parallel_size = 2: must be 1 for an encoder model")
    assert str(not_for_encoders(one)).startswith("mode = split: must be inline for an encoder model")


def test_an_engine_in_this_process_says_how_to_have_several() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size = 2: must be at most 1 here; use FleetEngine or LLM"):
        Engine(data_parallel_size=2)
