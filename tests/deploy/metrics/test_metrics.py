"""Scraped metrics, compared with the requests that were served."""

from __future__ import annotations

import asyncio
import re
import time

from prometheus_client.parser import text_string_to_metric_families

from millrace.deploy.config import ServerConfig
from millrace.deploy.metrics.metrics import Metrics
from millrace.deploy.metrics.watchdog import Watchdog
from millrace.runtime.env import log
from millrace.stages import EngineConfig, SamplingParams
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine
from tests.deploy.running import RunningServer, post_bytes, send

TEXT = "/v1/completions"
VLLM = {'model_name="scripted"', 'engine="0"'}


def scrape(server: RunningServer) -> dict[str, float]:
    """Maps each sample name with its labels, in order, to its value."""
    return samples_of(server.get("/metrics").body.decode())


def samples_of(text: str) -> dict[str, float]:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


def of(samples: dict[str, float], name: str, **labels: str) -> float:
    """The only sample with this name and these labels."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    own = {key: value for key, value in samples.items() if key.startswith(name + "{")}
    found = [value for key, value in own.items() if all(part in key for part in wanted)]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_tokens_and_reasons_are_counted(server: RunningServer):
    before = scrape(server)
    server.post(TEXT, {"prompt": "abcde", "n": 2, "max_tokens": 7, "ignore_eos": True})
    server.post(TEXT, {"prompt": "abc", "max_tokens": 0})
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return of(after, name, **labels) - of(before, name, **labels)

    assert grown("vllm:prompt_tokens_total") == 5
    assert grown("vllm:generation_tokens_total") == 14
    assert grown("vllm:request_success_total", finished_reason="length") == 2
    assert grown("millrace:request_errors_total", code="invalid_value") == 1


def test_what_runs_shows_while_it_runs(slow_server: RunningServer):
    with slow_server.connect() as connection:
        send(connection, post_bytes(TEXT, {"prompt": "a", "max_tokens": 400, "stream": True}))
        connection.recv(1, 2)
        during = scrape(slow_server)
    slow_server.wait_until_idle()
    after = scrape(slow_server)
    assert of(during, "vllm:num_requests_running", model_name="scripted", engine="0") == 1
    assert of(during, "vllm:kv_cache_usage_perc") > 0
    assert of(after, "vllm:num_requests_running") == of(after, "vllm:kv_cache_usage_perc") == 0
    assert of(after, "millrace:requests_aborted_total", cause="disconnect") >= 1
    assert of(after, "vllm:request_success_total", finished_reason="abort") >= 1


def test_vllms_names_are_there_with_their_labels_and_the_work_that_waits(server: RunningServer):
    samples = scrape(server)
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_swapped",
        "millrace:work_seconds_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cpu_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    ):
        (key,) = (key for key in samples if key.startswith(name + "{"))
        assert set(re.findall(r'\w+="[^"]*"', key)) == VLLM


def test_gateways_find_the_sizes_of_the_cache_and_that_there_are_no_adapters(server: RunningServer):
    samples = scrape(server)
    blocks = sum(
        value for key, value in samples.items() if key.startswith("millrace:kv_blocks{") and "shared" not in key
    )
    assert of(samples, "vllm:cache_config_info", block_size="16", num_gpu_blocks=str(int(blocks)), engine="0") == 1
    assert of(samples, "vllm:lora_requests_info", max_lora="0", running_lora_adapters="", waiting_lora_adapters="")


async def scrape_after_pressure(config: EngineConfig) -> dict[str, float]:
    """The metrics after eight answers of 60 tokens have shared few blocks."""
    metrics = Metrics(Watchdog(ServerConfig(), None))
    async with scripted_engine(config) as engine, asyncio.TaskGroup() as group:
        metrics.watch(engine, engine.info.model_id)

        async def one(i: int) -> None:
            async for _ in engine.generate([97 + i] * 20, SamplingParams(max_tokens=60, ignore_eos=True)):
                pass

        tasks = [group.create_task(one(i)) for i in range(8)]
        await asyncio.gather(*tasks)
        return samples_of(metrics.render().decode())


def test_how_large_a_step_may_be_shows_as_schedule_has_decided():
    async def run() -> None:
        metrics = Metrics(Watchdog(ServerConfig(), None))
        async with scripted_engine(max_num_batched_tokens=100, itl_target_ms=5.0) as engine:
            metrics.watch(engine, engine.info.model_id)
            for _ in range(2):
                budget = engine.scheduler.step_token_budget
                assert of(samples_of(metrics.render().decode()), "millrace:step_token_budget") == budget
                await asyncio.gather(*(read(engine, i) for i in range(8)))
            assert 16 < budget <= 100

    async def read(engine: ScriptedEngine, i: int) -> None:
        await asyncio.sleep(i / 100)
        async for _ in engine.generate([97 + i] * 200, SamplingParams(max_tokens=60, ignore_eos=True)):
            pass

    asyncio.run(run())


def test_a_swap_that_did_not_happen_is_counted_with_its_reason():
    for num_cpu_blocks in (0, 3, 200):
        config = EngineConfig(
            max_model_len=128, max_num_seqs=8, num_gpu_blocks=16, num_cpu_blocks=num_cpu_blocks, swap_space=0
        )
        samples = asyncio.run(scrape_after_pressure(config))
        swapped = of(samples, "millrace:preemptions_total", mode="swap", cause="blocks")
        computed_again = of(samples, "millrace:preemptions_total", mode="recompute", cause="blocks")
        refused = of(samples, "millrace:swaps_refused_total", reason="full")
        assert swapped + computed_again > 0
        assert (swapped > 0) >= (num_cpu_blocks == 200)
        assert (swapped > 0) <= (num_cpu_blocks > 0)
        assert swapped > 0 or num_cpu_blocks < 200
        assert (refused > 0) == (num_cpu_blocks == 3)
        assert of(samples, "millrace:swaps_refused_total", reason="slower") == 0


def test_stages_and_channels_account_for_themselves(server: RunningServer):
    samples = scrape(server)
    for stage in ("intake", "tokenize", "schedule", "allocate", "execute", "sample", "detokenize"):
        assert of(samples, "millrace:stage_seconds_total", stage=stage, state="busy") > 0
        assert of(samples, "millrace:stage_queue_depth", stage=stage) == 0
    edges = [key for key in samples if key.startswith("millrace:channel_capacity{")]
    assert len(edges) >= 9
    for edge in (re.search(r'edge="([^"]+)"', key).group(1) for key in edges):
        high_water = of(samples, "millrace:channel_high_water", edge=edge)
        assert high_water <= of(samples, "millrace:channel_capacity", edge=edge)


def test_no_client_can_add_a_series(server: RunningServer):
    server.get("/health")
    before = set(scrape(server))
    for i in range(50):
        server.get(f"/path/{i}", method=f"M{i}")
        server.post(TEXT, {"prompt": "a", "model": f"m{i}", "user": f"u{i}", "max_tokens": 1})
    assert set(scrape(server)) == before


def test_drafts_and_what_was_right_of_them_have_the_names_that_vllm_gives_them():
    async def run() -> None:
        script = Script(eos_probability=0.0, period=3)
        async with scripted_engine(script=script, speculation="ngram", num_speculative_tokens=3) as engine:
            metrics = Metrics(Watchdog(ServerConfig(), None))
            metrics.watch(engine, engine.info.model_id)
            params = SamplingParams(max_tokens=60)
            async for _ in engine.generate("abc", params):
                pass
            samples, told = samples_of(metrics.render().decode()), engine.scheduler.speculation
            assert of(samples, "vllm:spec_decode_num_drafts_total") == told.num_drafts > 5
            assert of(samples, "vllm:spec_decode_num_draft_tokens_total") == told.num_draft_tokens
            assert of(samples, "vllm:spec_decode_num_accepted_tokens_total") == told.num_accepted_tokens > 10
            for position, count in enumerate(told.num_accepted_at):
                by_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                assert of(samples, by_place, position=str(position)) == count
            assert of(samples, "millrace:num_requests_drafting") == 0

    asyncio.run(run())


def test_tokens_that_say_they_were_drafted_are_the_accepted_drafts():
    async def run() -> None:
        script = Script(eos_probability=0.0, period=3)
        async with scripted_engine(script=script, speculation="ngram", num_speculative_tokens=3) as engine:
            outputs = engine.generate("abc", SamplingParams(max_tokens=60, logprobs=0), output_kind="final")
            (entries,) = [output.outputs[0].logprobs async for output in outputs]
            assert entries is not None and len(entries) == 60
            assert sum(entry.is_drafted for entry in entries) == engine.scheduler.speculation.num_accepted_tokens > 10
            times_us = [entry.time_us for entry in entries]
            assert times_us == sorted(times_us) and times_us[0] < times_us[-1]

    asyncio.run(run())


def test_log_lines_that_could_not_be_written_are_counted() -> None:
    metrics = Metrics(Watchdog(ServerConfig(), None))
    with open("/dev/full", "wb") as full:
        log.configure(level="error", fd=full.fileno())
        for _ in range(3):
            log.get_logger("test").error("thing.happened")
        deadline_s = time.monotonic() + 60.0
        while log.dropped() < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        assert of(samples_of(metrics.render().decode()), "millrace:log_lines_dropped_total") == 3
