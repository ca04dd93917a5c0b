"""A whole engine with an asynchronous device: its answers are those of an engine that waits for each step.

The model is real, of some thousand weights, and its kernels are the PyTorch twins. The streams run late and out of
order, or at once; in either case the step line, the graphs, the slot tables and the completion thread are those that a
GPU has.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.stage import Stage
from millrace.stages.backends.cuda.cuda_graphs import batches_of
from millrace.stages.backends.cuda.device_work import TorchDeviceWork
from millrace.stages.backends.cuda.step_submission import StepSubmitter
from millrace.stages.backends.cuda.triton_chooser import EDITED, KINDS, PLAIN, SCORED, TRUNCATED, TritonTokenChooser
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError
from millrace.stages.messages import StepGrant
from millrace.stages.outputs import GraphBatch
from millrace.stages.params import SamplingParams
from tests.counts import FULL
from tests.model.checkpoints import make_checkpoint
from tests.runtime.device_streams.host_streams import HostStreams
from tests.stages.late_engines import SMALL, both, greedy, late, prompts, run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path)
    return path


# -- steps that are submitted and not waited for


@pytest.mark.parametrize("steps_in_flight", [1, 4, *[2] * FULL])
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_greedy_answers_are_the_same_whatever_is_in_flight(
    checkpoint: Path, steps_in_flight: int, is_eager: bool
) -> None:
    asks = [(prompt, greedy(5 + i)) for i, prompt in enumerate(prompts(12, 60))]
    right, ran = both(checkpoint, asks, late(steps_in_flight), steps_in_flight=steps_in_flight, enforce_eager=is_eager)
    assert ran.answers == right.answers
    assert ran.num_attended == 0 and ran.num_gaps > 0


def test_prompts_longer_than_a_step_are_computed_in_parts(checkpoint: Path) -> None:
    asks = [(prompt, greedy()) for prompt in ([*range(3, 110)], [*range(40, 120)], [7], [*range(9, 100)])]
    right, ran = both(checkpoint, asks, late(), max_num_batched_tokens=16)
    assert ran.answers == right.answers and ran.num_attended == 0


@pytest.mark.parametrize("swap_blocks", [0, 40], ids=["recompute", "swap"])
def test_sequences_that_lose_their_blocks_go_on_where_they_were(checkpoint: Path, swap_blocks: int) -> None:
    asks = [(prompt, greedy(28)) for prompt in prompts(8, 30)]
    settings = {"num_gpu_blocks": 14, "max_model_len": 100, "block_size": 8, "num_cpu_blocks": swap_blocks}
    right, ran = both(checkpoint, asks, late(), enable_prefix_caching=False, **settings)
    assert ran.num_preemptions > 0 and (ran.num_copied > 0) == (swap_blocks > 0)
    assert ran.answers == right.answers and ran.num_attended == 0


def test_cached_prefixes_are_found_and_read(checkpoint: Path) -> None:
    first = [*range(3, 60)]
    asks = [([*first, last], greedy()) for last in (7, 8, 9, 7)] + [(first, greedy())]
    right, ran = both(checkpoint, asks, late(), max_num_seqs=1)
    assert ran.answers == right.answers
    assert [output.num_cached_tokens for output in ran.outputs] == [
        output.num_cached_tokens for output in right.outputs
    ]
    assert sum(output.num_cached_tokens for output in ran.outputs) > 100


def test_stop_ids_stop_strings_and_eos_end_answers_where_they_should(checkpoint: Path) -> None:
    plain = asyncio.run(run(checkpoint, [(prompt, greedy(20)) for prompt in prompts(6, 20)], None))
    asks = []
    for i, (prompt, ((ids, text, _),)) in enumerate(zip(prompts(6, 20), plain.answers, strict=True)):
        if i % 3 == 0:
            more: dict[str, Any] = {"stop_token_ids": (ids[7],)}
        elif i % 3 == 1:
            more = {"stop_token_ids": (*range(150, 160), ids[5])}  # more than the device's table has room for
        else:
            more = {"stop": (text[4:7],)}
        asks.append((prompt, greedy(20, **more)))
    right, ran = both(checkpoint, asks, late())
    assert ran.answers == right.answers and ran.num_attended == 0
    reasons = [reason for ((_, _, reason),) in ran.answers]
    assert reasons.count("stop") >= 5


def test_choices_of_one_prompt_share_its_blocks_and_part_when_they_differ(checkpoint: Path) -> None:
    drawn = SamplingParams(max_tokens=15, temperature=1.0, n=4, seed=3, ignore_eos=True)
    asks = [([*range(3, 33)], greedy(n=3)), ([*range(50, 71)], drawn), ([*range(3, 33)], greedy())]
    right, ran = both(checkpoint, asks, HostStreams())
    assert ran.answers[0] == right.answers[0] and ran.answers[2] == right.answers[2]
    texts = [text for _, text, _ in ran.answers[1]]
    assert len(set(texts)) == 4
    again = asyncio.run(run(checkpoint, asks, late(5), steps_in_flight=4))
    assert again.answers == ran.answers, "the noise depends on seed and position alone"


def test_sampling_parameters_of_a_row_leave_the_forward_pass_in_its_graph(checkpoint: Path) -> None:
    found: list[Any] = []

    def find(engine: Engine) -> None:
        found.append(engine.pipeline.stages["execute"].runner)  # type: ignore[attr-defined]

    asks = [(prompt, greedy(9)) for prompt in prompts(5, 20)] + [([5, 6, 7], greedy(9, logprobs=4))]
    right, ran = both(checkpoint, asks, late(), prepare=find)
    graphs = found[-1].line.graphs
    assert ran.answers == right.answers and ran.num_attended == 0
    assert ran.num_eager == 0 and graphs.num_replayed > 8
    ours, theirs = (each.outputs[5].outputs[0].logprobs for each in (ran, right))
    assert ours is not None and theirs is not None
    assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-5)
    assert [[top[0] for top in each.top] for each in ours] == [[top[0] for top in each.top] for each in theirs]


def test_all_device_calls_of_a_step_come_from_a_thread_on_the_compute_stream(
    checkpoint: Path,
) -> None:
    streams, seen = late(), []

    def watch(engine: Engine) -> None:
        model: Any = engine.pipeline.stages["execute"].runner  # type: ignore[attr-defined]
        for owner, name in ((model.sampler, "start"), (model.runner, "compute"), (model._work, "note")):
            setattr(owner, name, noting(name, getattr(owner, name)))

    def noting(name: str, run: Any) -> Any:
        def noted(*args: Any) -> Any:
            seen.append((name, streams.used))
            return run(*args)

        return noted

    asks = [([5, 6, 7], greedy(3)), ([8, 9], greedy(3, prompt_logprobs=1))]
    asyncio.run(run(checkpoint, asks, streams, watch))
    assert set(seen) == {("start", "compute"), ("compute", "compute"), ("note", "compute")}


def test_once_ready_a_real_step_has_run_in_every_graph_and_kind_of_sampling(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    kinds: set[int] = set()
    begin = StepSubmitter.forward

    def noting(line: StepSubmitter, grant: StepGrant, kind: int = 0, **more: Any) -> Any:
        kinds.add(kind)
        return begin(line, grant, kind, **more)

    def find(engine: Engine) -> None:
        found.append(engine.pipeline.stages["execute"].runner)  # type: ignore[attr-defined]

    monkeypatch.setattr(StepSubmitter, "forward", noting)
    asyncio.run(run(checkpoint, [], late(), find, max_num_batched_tokens=200))
    (model,) = found
    num_replays = {batch: each.forward.num_replays for batch, each in model.line.graphs._captured.items()}
    assert len(num_replays) == 6 and min(num_replays.values()) > 1, (
        f"once without rows, behind the capture: {num_replays}"
    )
    assert kinds >= {PLAIN, TRUNCATED, EDITED} and max(kinds) >= SCORED and model.num_attended > 0


@pytest.mark.parametrize(("mode", "num_kinds"), [("raw_logprobs", 1), ("processed_logprobs", 3)])
def test_without_graphs_every_size_and_scoring_kernel_has_run_before_ready(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, mode: str, num_kinds: int
) -> None:
    sizes: set[GraphBatch] = set()
    kinds: set[int] = set()
    monkeypatch.setattr(TorchDeviceWork, "forward", noted(sizes, TorchDeviceWork.forward))
    monkeypatch.setattr(TritonTokenChooser, "choose_on_device", noted(kinds, TritonTokenChooser.choose_on_device))
    asyncio.run(run(checkpoint, [], late(), enforce_eager=True, max_num_batched_tokens=200, logprobs_mode=mode))
    decode, mixed = batches_of(8, 200)
    assert sizes >= {*decode, *mixed} and kinds >= {*KINDS}
    assert {kind // SCORED - 1 for kind in kinds if kind >= SCORED} == {0, 1, 2, 3, 5, 9, 17, 20}
    assert len({kind % SCORED for kind in kinds if kind >= SCORED}) == num_kinds


def noted(seen: set[Any], run: Any) -> Any:
    """`run`, whose last argument is put into `seen`."""

    def noting(*args: Any) -> Any:
        seen.add(args[-1])
        return run(*args)

    return noting


def test_the_sizes_that_were_captured_and_the_time_it_took_are_told(checkpoint: Path) -> None:
    asks = [([5, 6, 7], greedy(3))]
    with captured_logs() as logs:
        ran = asyncio.run(run(checkpoint, asks, HostStreams()))
    (told,) = (entry for entry in logs if entry["event"] == "graphs.captured")
    assert told["decode_rows"] == [1, 2, 4, 8] and told["mixed_tokens"] == [64]
    assert ran.info.captured is not None and ran.info.captured.to_event().items() <= told.items()
    assert ran.info.startup_s["graphs"] >= ran.info.captured.seconds - 0.001
    assert ran.info.memory is not None and "5 sizes" in ran.info.memory.row("graphs").what
    with captured_logs() as logs:
        eager = asyncio.run(run(checkpoint, asks, HostStreams(), enforce_eager=True))
    assert eager.info.captured is None and not [entry for entry in logs if entry["event"] == "graphs.captured"]
    assert eager.answers == ran.answers


def test_a_custom_stage_next_to_the_device_gets_logits_and_not_tokens(
    checkpoint: Path,
) -> None:
    for name, is_late in (("tokenize", True), ("execute", False), ("sample", False)):
        engine = Engine(model=str(checkpoint), **SMALL)
        engine.replace(name, Stage())
        assert engine.config.async_scheduling == is_late


def test_what_only_triton_promises_is_refused_elsewhere(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="deterministic = True: attention_backend = torch"):
        asyncio.run(run(checkpoint, [], None, deterministic=True))
