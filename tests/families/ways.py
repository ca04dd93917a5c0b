"""Ways in which a request is computed, none of which may change its tokens, and what an engine gives in each."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial, partialmethod
from typing import Any, Literal

import pytest

from millrace.model.decoder.decoder import Decoder
from millrace.model.errors import ModelError
from millrace.model.fallback.transformers_decoder import TransformersDecoder
from millrace.model.families.registry import read_spec
from millrace.stages import LLM, EngineConfig, SamplingParams
from millrace.stages.backends.native.runner import NativeRunner
from millrace.stages.errors import ConfigError
from tests.families.oracle import BEAM_LENGTH, LENGTHS, NUM_BEAMS, NUM_NEW, Answer, prompts
from tests.families.zoo import Entry
from tests.stages.pressure import begin_together, swap_if_there_is_room

State = Literal["equal", "differs", "refused", "failed"]
BACKENDS = ("native", "torch", "triton", "transformers", "auto")
BLOCK_SIZE = 4  # tokens; small, so that answers grow by more blocks than are reserved for them
STEPS_AHEAD = 4  # steps before a request's first one, at most; its prompt has to have more
LONGEST = max(LENGTHS) + NUM_NEW  # tokens of a sequence
TOLERANCE = 2e-3  # of log-probabilities, which show what keeps the order of logits: multipliers and caps


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one way, or of all."""

    state: State
    detail: str = ""  # how it differs, or the message


@dataclass(frozen=True, slots=True)
class Way:
    """Settings of an engine, and how its requests come."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    num_rounds: int = 1  # how often they come
    num_others: int = 0  # requests beside them
    num_choices: int = 1  # answers to each, which share its prompt
    is_search: bool = False  # by beam search instead
    is_aborted: bool = False  # one comes first whose client leaves in the middle of its prompt
    check: Callable[[LLM, Sequence[Any]], str] = lambda llm, outputs: ""  # what should have happened and did not


def _was_cached(llm: LLM, outputs: Sequence[Any]) -> str:
    return "" if sum(output.num_cached_tokens for output in outputs) else "no prompt was found in the cache"


def _was_preempted(llm: LLM, _: Sequence[Any]) -> str:
    schedule: Any = llm.engine.pipeline.stages["schedule"]
    return "" if schedule.scheduler.num_preemptions else "no sequence was preempted"


def _was_swapped(llm: LLM, outputs: Sequence[Any]) -> str:
    """Of recurrent layers, whose states travel too; of others some caches keep nothing on the host."""
    schedule: Any = llm.engine.pipeline.stages["schedule"]
    is_swapped = any(how == "swap" for how, _ in schedule.scheduler.lifecycle.preemptions)
    if llm.info.states is not None and not is_swapped:
        return "no sequence was swapped out with its state"
    return _was_preempted(llm, outputs)


NO_CACHE: dict[str, Any] = {"enable_prefix_caching": False}
FORKS_FEW = {"num_gpu_blocks": -(-LONGEST // BLOCK_SIZE) + 10}
FEW = {**NO_CACHE, **FORKS_FEW}
WAYS: Mapping[str, Way] = {
    "plain": Way({**NO_CACHE, "speculation": "off", "max_num_seqs": 1}),
    "chunked": Way({**NO_CACHE, "max_num_batched_tokens": 16, "max_num_seqs": 8}),
    "prefix": Way({}, num_rounds=2, check=_was_cached),
    "preempted": Way({**FEW, "swap_space": 0.0}, num_others=4, check=_was_preempted),
    "swapped": Way({**FEW, "num_cpu_blocks": 256}, num_others=4, check=_was_swapped),
    "among16": Way({**NO_CACHE, "max_num_seqs": 16}, num_others=13),
    "choices": Way({**NO_CACHE, "max_num_batched_tokens": 16, "max_num_seqs": 8}, num_choices=3),
    "forked": Way({"max_num_batched_tokens": 48, "max_num_seqs": 8}, num_rounds=2, num_choices=3, check=_was_cached),
    "forked_swapped": Way({**FORKS_FEW, "num_cpu_blocks": 256}, num_others=4, num_choices=3, check=_was_swapped),
    "beams": Way({}, num_rounds=2, is_search=True),
    "aborted": Way({"max_num_batched_tokens": 8, "max_num_seqs": 4}, num_rounds=2, is_aborted=True, check=_was_cached),
}


def settings_of(backend: str) -> dict[str, Any]:
    """The settings that choose a backend; KeyError if the engine has no such setting yet."""
    has_impl = "model_impl" in {item.name for item in fields(EngineConfig)}
    if backend == "auto":
        return {}
    if backend == "transformers":
        if not has_impl:
            raise KeyError("model_impl")
        return {"model_impl": "transformers"}
    return {"attention_backend": backend} | ({"model_impl": "millrace"} if has_impl else {})


def run_way(entry: Entry, name: str, backend: str) -> Outcome:
    """Compare an engine's answers in one way with those of transformers."""
    way = WAYS[name]
    common = {"device": "cpu", "dtype": "float32", "threads": 1, "block_size": BLOCK_SIZE}
    sizes = {"max_model_len": LONGEST, "num_gpu_blocks": 40 * LONGEST // BLOCK_SIZE}
    try:
        settings = settings_of(backend)
    except KeyError as error:
        return Outcome("refused", f"there is no setting {error.args[0]}")
    try:
        windows = _windows(entry, backend) if "num_gpu_blocks" in way.settings else []
        few = {"num_gpu_blocks": few_of_windows(max(windows))} if windows else {}
        llm = LLM(str(entry.folder), **{**common, **sizes, **settings, **way.settings, **few})
    except (ModelError, ConfigError) as error:
        return Outcome("refused", str(error).replace(str(entry.folder), "FOLDER"))
    except Exception as error:
        return Outcome("failed", f"at the start: {error!r}")
    with llm:
        try:
            return _compare_searches(llm, way, entry) if way.is_search else _compare(llm, way, entry.answers)
        except Exception as error:
            return Outcome("failed", repr(error))


def few_of_windows(window: int) -> int:
    """As `FEW`'s blocks, where all layers have windows, of which a sequence holds few: two sequences', and two more."""
    return 2 * (-(-(window - 1) // BLOCK_SIZE) + 1) + 2


def _windows(entry: Entry, backend: str) -> list[int]:
    """The windows of the layers, if all have one, which free what they pass unless transformers computes them."""
    if backend == "transformers":
        return []
    try:
        windows = [each.window for each in read_spec(entry.folder).attentions]
    except ModelError:
        return []  # transformers computes it, or the engine refuses it
    found = [window for window in windows if window is not None and window < LONGEST]
    return found if len(found) == len(windows) else []


def _compare(llm: LLM, way: Way, answers: Sequence[Answer]) -> Outcome:
    others = prompts(tuple(range(3, 3 + 5 * way.num_others, 5)))
    lists = [answer.prompt for answer in answers]
    counts = [len(answer.token_ids) for answer in answers]
    params = [
        SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0, n=number)
        for count, number in [*((count, way.num_choices) for count in counts), *[(max(counts), 1)] * len(others)]
    ]
    wait_until_idle(llm)  # after steps of the warm-up, whose results are not awaited
    if way.is_aborted and not abort_midway(llm, max(lists, key=len)):
        return Outcome("failed", "the client left after the first token, not in the middle of its prompt")
    if has_few := "num_gpu_blocks" in way.settings:
        swap_if_there_is_room(llm.engine)
    for turn in range(way.num_rounds):
        if has_few:
            begin_together(llm.engine, len(lists) + len(others))
        outputs = llm.generate([*lists, *others], params, use_tqdm=False)
        for place, answer in enumerate(answers):
            for number, choice in enumerate(outputs[place].outputs):
                if difference := differing(answer, choice):
                    where = f"prompt of {len(answer.prompt)}, round {turn}, choice {number}"
                    return Outcome("differs", f"{where}, {difference}")
        wait_until_idle(llm)  # so that the next round finds what this one leaves
    problem = way.check(llm, outputs)
    return Outcome("failed", problem) if problem else Outcome("equal")


def _compare_searches(llm: LLM, way: Way, entry: Entry) -> Outcome:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for turn in range(way.num_rounds):
        lists = [answer.prompt for answer in entry.answers]
        outputs = llm.beam_search(lists, NUM_BEAMS, BEAM_LENGTH, use_tqdm=False, params=params)
        for output, wanted in zip(outputs, entry.beams, strict=True):
            found = [list(choice.token_ids) for choice in output.outputs]
            if found != wanted:
                return Outcome("differs", f"prompt of {output.num_prompt_tokens}, round {turn}: {found}, not {wanted}")
    return Outcome("equal")


def wait_until_idle(llm: LLM) -> None:
    """Until the last answer's slot is free, and the step that saves its state is over."""
    stages: Any = llm.engine.pipeline.stages
    scheduler, pool = stages["schedule"].scheduler, stages["allocate"].allocator.pool
    until_s = time.monotonic() + 60
    while scheduler.sequences or pool.num_in_use or pool.num_quarantined or scheduler.num_in_flight:
        assert time.monotonic() < until_s
        time.sleep(0.002)


def abort_midway(llm: LLM, prompt: list[int], num_new: int = 9) -> bool:
    """Sends a prompt whose client leaves once its first step has run. Whether it has no token then.

    Steps that run ahead of the warm-up's answer may come first, when there is no such client yet.
    """

    def leave(number: int) -> None:
        if number < STEPS_AHEAD:
            has_left = threading.Event()
            llm._loop.call_soon_threadsafe(lambda: (llm.engine.abort("midway"), has_left.set()))
            assert has_left.wait(60), "the engine's loop stands still"

    async def ask() -> Any:
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        stream = llm.engine.generate(prompt, params, request_id="midway")
        return [output async for output in stream][-1].outputs[0]

    with after_each_step(leave):
        choice = llm._run(ask())
    return choice.finish_reason == "abort" and not choice.token_ids


@contextmanager
def after_each_step(call: Callable[[int], object]) -> Iterator[None]:
    """Calls `call(number)` on the device thread when all layers of a step have changed what they keep."""
    numbers = itertools.count()

    def patched(compute: Callable[..., Any], *args: Any, **options: Any) -> Any:
        found = compute(*args, **options)
        call(next(numbers))
        return found

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((Decoder, "hidden"), (TransformersDecoder, "hidden"), (NativeRunner, "compute")):
            patch.setattr(kind, name, partialmethod(partial(patched, getattr(kind, name))))
        yield


def differing(answer: Answer, choice: Any) -> str:
    """Where a choice's tokens or log-probabilities leave those of transformers; "" if nowhere."""
    for step, (wanted, found) in enumerate(zip(answer.token_ids, choice.token_ids, strict=True)):
        logits = answer.logits[step]
        if wanted != found:
            gap = float(logits[wanted] - logits[found])
            return (
                f"step {step} of {len(answer.token_ids)}: {found} instead of {wanted}, whose logit is {gap:.2g} higher"
            )
        logprob = float(logits.log_softmax(-1)[wanted])
        if abs(logprob - choice.logprobs[step].logprob) > TOLERANCE:
            return f"step {step}: log-probability {choice.logprobs[step].logprob:.4f} instead of {logprob:.4f}"
    return ""
