"""Histograms of requests, steps and stages: each value counts once, as a recount from the trace confirms."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millrace.deploy.config import ServerConfig
from millrace.deploy.metrics.latencies import FIRST_TOKEN_US, REQUEST_US, SIZES, TIMES, one_two_five
from millrace.deploy.metrics.metrics import Metrics
from millrace.deploy.metrics.stats_line import StatsLine
from millrace.deploy.metrics.watchdog import Watchdog
from millrace.runtime.env.log import captured_logs
from millrace.runtime.histogram import STAGE_BOUNDS_US, Histogram
from millrace.runtime.stage import Outlet
from millrace.runtime.trace.tracer import EventKind
from millrace.stages import EngineConfig, SamplingParams, Stage, reply_text
from millrace.stages.detokenize.token_gaps import BOUNDS_US
from millrace.stages.messages import Request
from millrace.stages.outputs import RequestOutput
from millrace.stages.testing.scripted.engine import ScriptedEngine, scripted_engine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.metrics.test_metrics import of, samples_of

NEVER_ENDS = Script(eos_probability=0.0)


def watched(engine: ScriptedEngine) -> Metrics:
    metrics = Metrics(Watchdog(ServerConfig(), None))
    metrics.watch(engine, engine.info.model_id)
    return metrics


def samples(metrics: Metrics) -> dict[str, float]:
    return samples_of(metrics.render().decode())


async def ask(engine: ScriptedEngine, num_prompt: int, **params: object) -> None:
    async for _ in engine.generate([97] * num_prompt, SamplingParams(**params)):  # type: ignore[arg-type]
        pass


class Greet(Stage[Request, Request]):
    """Answers every request by itself."""

    async def handle(self, batch: Sequence[Request], out: Outlet[Request]) -> None:
        for request in batch:
            out.reply(reply_text(request, "Hello"))


def test_an_answer_of_a_users_stage_has_no_time_of_the_device():
    async def run() -> tuple[dict[str, float], RequestOutput]:
        engine = scripted_engine()
        engine.insert(Greet(), after="intake")
        async with engine:
            metrics = watched(engine)
            async for output in engine.generate("hi", SamplingParams(n=2), output_kind="final"):
                last = output
            await engine.check_quiet()
            return samples(metrics), last

    found, output = asyncio.run(run())
    assert [choice.text for choice in output.outputs] == ["Hello"] * 2 and output.num_generated_tokens == 0
    assert output.metrics is not None and output.metrics["tokens_per_second"] is None
    assert of(found, "vllm:e2e_request_latency_seconds_count") == 1
    for name in ("prefill_time", "queue_time", "inference_time"):
        assert of(found, f"vllm:request_{name}_seconds_count") == 0


def test_a_beam_search_began_when_its_first_step_did():
    async def run() -> tuple[dict[str, float], RequestOutput]:
        async with scripted_engine(script=NEVER_ENDS) as engine:
            metrics = watched(engine)
            output = await engine.beam_search("hi", width=2, max_tokens=3)
            return samples(metrics), output

    found, output = asyncio.run(run())
    assert output.metrics is not None and output.metrics["tokens_per_second"] > 1
    assert of(found, "vllm:request_prefill_time_seconds_count") == 1
    assert of(found, "vllm:request_prefill_time_seconds_sum") <= of(found, "vllm:e2e_request_latency_seconds_sum") < 60


def test_each_request_is_counted_once_in_each_histogram():
    async def run() -> dict[str, float]:
        async with scripted_engine(script=NEVER_ENDS) as engine:
            metrics = watched(engine)
            await asyncio.gather(*(ask(engine, i, n=2, max_tokens=5) for i in (1, 2, 3, 20)))
            await ask(engine, 4, max_tokens=1)
            return samples(metrics)

    found = asyncio.run(run())
    for name in ("time_to_first_token", *TIMES):
        once_a_token = name == "request_time_per_output_token"
        assert of(found, f"vllm:{name}_seconds_count") == (4 if once_a_token else 5), name
    for name in SIZES:
        assert of(found, f"vllm:{name}_count") == 5, name
    assert of(found, "vllm:request_prompt_tokens_sum") == 1 + 2 + 3 + 20 + 4
    assert of(found, "vllm:request_generation_tokens_sum") == 4 * 10 + 1
    assert of(found, "vllm:request_max_num_generation_tokens_sum") == 4 * 5 + 1
    assert of(found, "vllm:request_params_n_bucket", le="1.0") == 1
    assert of(found, "vllm:request_params_n_sum") == 9
    assert of(found, "vllm:inter_token_latency_seconds_count") == 8 * 4  # all tokens of each answer except its first
    assert of(found, "vllm:request_prompt_tokens_bucket", le="2.0") == 2


def test_a_gap_between_tokens_is_the_step_that_made_it_and_what_came_between():
    async def run() -> dict[str, float]:
        async with scripted_engine(script=NEVER_ENDS, step_s=0.012) as engine:
            metrics = watched(engine)
            await ask(engine, 3, max_tokens=11)
            return samples(metrics)

    found = asyncio.run(run())
    assert of(found, "vllm:inter_token_latency_seconds_count") == 10
    assert of(found, "vllm:inter_token_latency_seconds_sum") > 10 * 0.011
    decode_s = of(found, "vllm:request_decode_time_seconds_sum")
    assert abs(of(found, "vllm:inter_token_latency_seconds_sum") - decode_s) < 0.1 * decode_s


def test_no_gap_is_lost_or_invented_when_sequences_are_preempted():
    config = EngineConfig(max_model_len=128, max_num_seqs=8, num_gpu_blocks=16, num_cpu_blocks=200, swap_space=0)

    async def run() -> tuple[dict[str, float], int]:
        async with scripted_engine(config, script=NEVER_ENDS, step_s=0.0005) as engine:
            metrics = watched(engine)
            began = engine.pipeline.env.now_ns()
            await asyncio.gather(*(ask(engine, 20, max_tokens=60) for _ in range(8)))
            return samples(metrics), engine.pipeline.env.now_ns() - began

    found, passed_ns = asyncio.run(run())
    assert of(found, "vllm:num_preemptions_total") > 0
    assert of(found, "vllm:inter_token_latency_seconds_count") == 8 * 59
    assert of(found, "vllm:inter_token_latency_seconds_sum") < 8 * passed_ns / 1e9
    decode_s = of(found, "vllm:request_decode_time_seconds_sum")
    assert abs(of(found, "vllm:inter_token_latency_seconds_sum") - decode_s) < 0.1 * decode_s


def test_stages_and_steps_agree_with_a_recount_from_the_trace():
    async def run() -> tuple[dict[str, float], list[tuple[str, Histogram, Histogram]], Histogram]:
        async with scripted_engine(script=NEVER_ENDS, enable_prefix_caching=False) as engine:
            metrics = watched(engine)
            await asyncio.gather(*(ask(engine, 5 + i, max_tokens=30) for i in range(12)))
            await engine.check_quiet()
            records = engine.pipeline.tracer.read_all()
            names = engine.pipeline.tracer.readers()[0].names()
            recounts = []
            for stage in engine.pipeline.runners:
                own = records[(records["kind"] == EventKind.STAGE_BATCH) & (records["source"] == names.index(stage))]
                wait, service = Histogram(STAGE_BOUNDS_US), Histogram(STAGE_BOUNDS_US)
                wait.observe_many(own["b"].astype(int))
                if stage == "execute":  # the device's time, which has records of its own
                    own = records[records["kind"] == EventKind.STEP_EXECUTED]
                service.observe_many(own["c"].astype(int))
                recounts.append((stage, wait, service))
            steps = Histogram(engine.step_tokens.bounds)
            steps.observe_many(records[records["kind"] == EventKind.STEP_GRANTED]["b"].astype(int))
            return samples(metrics), recounts, steps

    found, recounts, steps = asyncio.run(run())
    for stage, wait, service in recounts:
        for name, recount in (("wait", wait), ("service", service)):
            if (name, stage) == ("service", "sample"):
                continue  # without its waits for the device, which its records include
            assert recount.num_observed > 0
            assert of(found, f"millrace:stage_{name}_seconds_count", stage=stage) == recount.num_observed
            assert round(1e6 * of(found, f"millrace:stage_{name}_seconds_sum", stage=stage)) == recount.total
            at_most_1_ms = recount.cumulative()[STAGE_BOUNDS_US.index(1000)]
            assert of(found, f"millrace:stage_{name}_seconds_bucket", stage=stage, le="0.001") == at_most_1_ms
    assert of(found, "vllm:iteration_tokens_total_count") == steps.num_observed
    assert of(found, "vllm:iteration_tokens_total_sum") == steps.total == sum(5 + i + 29 for i in range(12))


def test_what_is_cut_short_has_a_first_token_and_no_end():
    async def run() -> dict[str, float]:
        async with scripted_engine(script=NEVER_ENDS, step_s=0.001) as engine:
            metrics = watched(engine)
            async for _ in engine.generate([97], SamplingParams(max_tokens=200)):
                break
            return samples(metrics)

    found = asyncio.run(run())
    assert of(found, "vllm:time_to_first_token_seconds_count") == 1
    assert of(found, "vllm:e2e_request_latency_seconds_count") == 0


def test_the_buckets_are_vllms():
    assert [us / 1e6 for us in BOUNDS_US] == [
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ]
    assert [us / 1e6 for us in FIRST_TOKEN_US] == [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ]
    assert [us / 1e6 for us in REQUEST_US] == [
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
        *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
    ]
    assert one_two_five(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert one_two_five(1) == (1,)


def test_an_asynchronous_device_reports_its_idle_time_and_others_do_not():
    async def run(*, is_async: bool) -> tuple[dict[str, float], Histogram | None, dict[str, object]]:
        with captured_logs() as logs:
            async with scripted_engine(script=NEVER_ENDS, is_async=is_async) as engine:
                metrics = watched(engine)
                stats = StatsLine(engine, metrics.num_tokens, 1e-6)
                await ask(engine, 5, max_tokens=30)
                await engine.check_quiet()
                stats.check()
                (line,) = [line for line in logs if line["event"] == "engine.stats"]
                return samples(metrics), engine.idle_gaps_us, line

    found, idle, line = asyncio.run(run(is_async=True))
    assert idle is not None and 0 <= line["device_idle"] < 1  # type: ignore[operator]
    assert of(found, "millrace:device_idle_gap_seconds_count") == idle.num_observed == 29
    assert round(1e6 * of(found, "millrace:device_idle_gap_seconds_sum")) == idle.total
    found, idle, line = asyncio.run(run(is_async=False))
    assert idle is None and "device_idle" not in line and not any("device_idle" in name for name in found)


def test_rates_are_right_where_another_engine_process_counts_anew():
    async def main() -> None:
        with captured_logs() as logs:
            async with scripted_engine(script=NEVER_ENDS) as engine:
                metrics = watched(engine)
                await ask(engine, 5, max_tokens=2)
                await ask(engine, 5, max_tokens=2)
                cache = engine.prefix_cache
                assert cache is not None and cache.num_queries > 5
                stats = StatsLine(engine, metrics.num_tokens, 1e-6)
                cache.num_queries = cache.num_hits = 0
                await ask(engine, 3, max_tokens=2)
                stats.check()
                (line,) = [line for line in logs if line["event"] == "engine.stats"]
                assert cache.num_queries == 3
                assert line["prefix_hit_rate"] == round(cache.num_hits / 3, 4)

    asyncio.run(main())
