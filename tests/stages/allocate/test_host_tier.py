"""The host tier: swapping out and in, its cost, and cached prefixes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.backends import cache_size
from millrace.stages.backends.cache_size import SWAP_GIB, num_host_blocks, pool_bytes
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.messages import Direction, Rates, StepPlan
from millrace.stages.params import SamplingParams
from tests.runtime.test_cpus import written
from tests.stages.schedule.plans import plan

pytest_plugins = ["millrace.stages.testing.pytest_plugin"]


def make(num_host_blocks: int = 8, rates: Rates | None = None, **sizes: Any) -> Allocator:
    sizes = {"num_blocks": 4, "block_size": 2, "num_slots": 4, "max_model_len": 8, **sizes}
    return Allocator(**sizes, host=HostTier(num_host_blocks, sizes["block_size"], rates))


def squeeze(allocator: Allocator) -> Any:
    """Slot 0 takes from slot 1, which has three tokens, in step 1."""
    allocator.serve(plan(0, {0: 4, 1: 3}))
    return allocator.serve(plan(1, {0: 1}, completed=0, victims=[1], may_take={0: 1}))


def copies(grant: Any) -> list[tuple[Direction, int]]:
    return [(copy.direction, len(copy.sources)) for copy in grant.copies]


def test_a_victims_blocks_are_copied_to_the_host_and_freed_when_that_step_is_done():
    allocator = make()
    grant, report = squeeze(allocator)
    assert report.preempted == [1] and report.swapped == {1: 3}
    assert copies(grant) == [(Direction.OUT, 2)] and not len(grant.slots) and not report.is_void
    assert report.num_quarantined == 2
    grant, _ = allocator.serve(plan(2, {0: 1}, completed=1))
    assert grant is not None and grant.slots.tolist() == [0]
    allocator.check()


def kinds_on_host(more_blocks: list[int], rates: Rates | None = None) -> HostTier:
    """Four blocks of kind 0, of 2 tokens; a block of kind 1 is five times as large."""
    return HostTier(4, 2, rates, more_blocks, [5.0])


def test_a_sequence_is_swapped_with_the_blocks_of_all_kinds_or_not_at_all():
    host = kinds_on_host([3])
    assert host.swap_out(1, 3, [2]) is not None
    assert [len(blocks) for blocks in host.more_blocks(1)] == [2]
    assert host.swap_out(2, 3, [2]) is None and host.num_full == 1, "one block of kind 1 is left"
    assert host.pool.num_available == 2, "nothing is taken for what does not fit"
    host.check()
    host.release(1, 5, 4)
    assert host.more[0].num_quarantined == 2
    host.complete_steps(5, [], 0)
    assert host.swap_out(2, 3, [2]) is not None
    host.check()


def test_copying_is_weighed_by_the_bytes_of_all_kinds():
    rates = Rates(copy_s=1.0, compute_s=4.0)  # of a block of kind 0, and of a token
    assert kinds_on_host([3], rates).swap_out(1, 3, [0]) is not None  # 2 * 2 blocks against 3 tokens
    host = kinds_on_host([3], rates)
    assert host.swap_out(1, 3, [1]) is None and host.num_dear == 1  # 2 * (2 + 5)


def test_after_a_crash_the_host_blocks_of_all_kinds_are_free_again():
    host = kinds_on_host([3])
    host.swap_out(1, 3, [2])
    host.forget_all(7)
    host.complete_steps(7, [], 0)
    assert host.pool.num_free == 4 and host.more[0].num_free == 3
    host.check()


def test_cached_prefixes_are_contiguous_on_the_host_however_few_come_at_a_time():
    host = HostTier(64, block_size=32)  # eight runs of eight blocks

    def adopted(step: int, count: int) -> list[int]:
        host.complete_steps(step - 1, [], 0)
        places: list[int] = host.adopt(count, step, 0, step - 1).tolist()
        host.pool.check()
        return places

    assert [adopted(step, count) for step, count in enumerate((1, 1, 3, 1, 2))] == [[0], [1], [2, 3, 4], [5], [6, 7]]
    run = adopted(5, 8)
    assert run == [*range(run[0], run[0] + 8)] and run[0] % 8 == 0 and run[0] > 0
    rest = [adopted(step, 1)[0] for step in range(6, 54)]
    assert {*rest} == {*range(8, 64)} - {*run}
    assert adopted(54, 3) == [0, 1, 2]  # the least recently cached are evicted, as few runs are cached
    assert host.pool.num_evicted == 3


def test_where_what_was_adopted_last_was_given_up_the_next_goes_anywhere():
    host = HostTier(16, block_size=16)
    (place,) = host.adopt(1, 0, 0, -1).tolist()
    assert host.complete_steps(0, [0], 0) == [place]  # the step that copies it was voided
    host.pool.check()
    assert len(host.adopt(3, 1, 0, 0)) == 3
    host.pool.check()


def test_what_comes_back_is_copied_and_only_the_rest_is_computed():
    allocator = make()
    squeeze(allocator)
    allocator.serve(plan(2, {0: 1}, completed=1))
    grant, report = allocator.serve(plan(3, {1: 5}, completed=2, ended=[0]))
    assert report.num_cached.tolist() == [3] and report.num_granted.tolist() == [2]
    assert grant is not None and grant.starts.tolist() == [3] and copies(grant) == [(Direction.IN, 2)]
    (started,) = grant.started
    assert (started.num_cached, started.num_shared) == (3, 0)
    assert grant.copies[0].destinations.tolist() == grant.table_blocks.tolist()[:2]
    assert allocator.host is not None and allocator.host.pool.num_quarantined == 2
    allocator.serve(plan(4, {}, completed=3))
    assert allocator.host.pool.num_free == 8
    allocator.check()


def test_what_does_not_fit_on_the_host_is_computed_again():
    allocator = make(num_host_blocks=1)
    grant, report = squeeze(allocator)
    assert report.preempted == [1] and report.swapped == {} and not grant.copies
    assert allocator.host is not None and allocator.host.num_full == 1


@pytest.mark.parametrize(("rates", "is_swapped"), [(Rates(1.0, 2.0), True), (Rates(1.0, 1.0), False)])
def test_a_victim_goes_the_way_that_the_measured_cost_favours(rates: Rates, is_swapped: bool):
    """Two blocks out and in take 4 s; three tokens take 6 s or 3 s."""
    allocator = make(rates=rates)
    _, report = squeeze(allocator)
    assert (1 in report.swapped) == is_swapped
    assert allocator.host is not None and allocator.host.num_dear == (not is_swapped)


def test_what_is_discarded_leaves_the_host_once_no_step_copies_it():
    allocator = make()
    squeeze(allocator)
    assert allocator.host is not None
    allocator.serve(_discarding(plan(2, {}, completed=0), 1))
    assert allocator.host.pool.num_quarantined == 2 and not len(allocator.host)
    allocator.serve(plan(2, {}, completed=1))
    assert allocator.host.pool.num_free == 8
    allocator.check()


def test_a_row_that_cannot_resume_yet_keeps_its_blocks_on_the_host():
    allocator = make()
    squeeze(allocator)
    allocator.serve(plan(2, {0: 1}, completed=1))
    grant, report = allocator.serve(plan(3, {0: 1, 1: 5}, completed=2))  # one block is free, and two must come back
    assert report.num_granted.tolist() == [1, 0] and report.num_cached.tolist() == [0, 0]
    assert allocator.host is not None and allocator.host.num_tokens(1) == 3
    allocator.check()


def test_a_reset_forgets_the_host_too():
    allocator = make()
    squeeze(allocator)
    report = allocator.reset(plan(2, {}, completed=1))
    assert report.is_reset and allocator.host is not None
    assert not len(allocator.host) and allocator.host.pool.num_free == 8


def test_the_pool_on_the_host_is_no_larger_than_all_slots_could_use():
    config = EngineConfig(max_num_seqs=2, block_size=16)
    assert num_host_blocks(config, 1024, max_model_len=64, device="cpu") == 8
    assert num_host_blocks(EngineConfig(swap_space=0), 1024, max_model_len=64, device="cpu") == 0
    assert num_host_blocks(EngineConfig(num_cpu_blocks=5), 1024, max_model_len=64, device="cpu") == 5


def test_a_pinned_pool_is_counted_by_the_power_of_two_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(tmp_path, {"proc/meminfo": f"MemTotal: 64 kB\nMemAvailable: {40 * 2**10} kB\n"})
    monkeypatch.setattr(cache_size, "ROOT", tmp_path)
    assert [pool_bytes(count, 1000, is_pinned=True) for count in (0, 1, 32, 33)] == [0, 1024, 32_768, 65_536]
    assert pool_bytes(33, 1000, is_pinned=False) == 33_000
    blocks = {device: num_host_blocks(EngineConfig(), 2**20, max_model_len=2048, device=device) for device in SWAP_GIB}
    assert blocks == {"cpu": 5, "cuda": 4}, "an eighth of 40 MiB"
    config = EngineConfig(num_cpu_blocks=33)
    assert num_host_blocks(config, 2**20, max_model_len=2048, device="cpu") == 33
    with pytest.raises(ConfigError, match="num_cpu_blocks = 33 needs 64 MiB of host memory, and 40 MiB are free"):
        num_host_blocks(config, 2**20, max_model_len=2048, device="cuda")


def test_more_swap_space_than_the_machine_has_is_refused_with_what_is_free():
    with pytest.raises(ConfigError, match="swap_space = 1e\\+06 GiB needs .* are free"):
        num_host_blocks(EngineConfig(swap_space=1e6), 2**30, max_model_len=2**25, device="cpu")
    with pytest.raises(ConfigError, match="num_cpu_blocks = -1"):
        EngineConfig(num_cpu_blocks=-1)


def test_under_pressure_sequences_resume_from_the_host_with_nothing_computed_twice(scripted: Any) -> None:
    """Eight answers of 60 tokens in memory for two."""

    async def main(engine: Any) -> None:
        async def one(i: int) -> list[int]:
            params = SamplingParams(max_tokens=60, ignore_eos=True, seed=i)
            prompt = [65 + i] * 20
            found = [t async for o in engine.generate(prompt, params) for t in o.outputs[0].token_ids]
            assert found == engine.model.script.expected(prompt, params)
            return found

        await asyncio.gather(*(one(i) for i in range(8)))
        scheduler = engine.scheduler
        assert scheduler.preemptions["swap", "blocks"] > 0 and not scheduler.preemptions["recompute", "blocks"]
        assert scheduler.num_recomputed_tokens == 0
        assert engine.model.num_copied > 0
        await engine.check_quiet()

    sizes = {"num_gpu_blocks": 20, "block_size": 8, "max_model_len": 128, "enable_prefix_caching": False}
    scripted(main, num_cpu_blocks=200, **sizes)


def _discarding(plan: StepPlan, *sequence_ids: int) -> StepPlan:
    return replace(plan, discarded=sequence_ids)
