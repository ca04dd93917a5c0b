"""Settings that may change how fast tokens come and not which: the same answers with each of them.

Answers of every kind of sampling, with sequences that lose their blocks among them; and where the engine promises equal
bits, log-probabilities of equal bits, alone and among others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from millrace.stages.errors import ConfigError
from tests.bench.gpu.parts.workload import options_of
from tests.bench.gpu.place import TINY, Place

PROMPTS = (
    "Once upon a time there was",
    "The old mill by the river",
    "A small dog and a big cat went",
    "In the morning, she",
    "Why does the moon",
    "Three children found a box. Inside was",
    "He said:",
    "The end of the story is that",
)
NUM_TOKENS = 64
NUM_OTHERS = 32  # that one request is asked alone and among


@dataclass(frozen=True, slots=True)
class Kind:
    """What a request asks of the sampler. What is drawn depends on the noise of the kernels that draw."""

    name: str
    params: dict[str, Any]
    is_drawn: bool = False


KINDS = (
    Kind("greedy", {"temperature": 0.0}),
    Kind("drawn", {"temperature": 1.0, "seed": 1}, is_drawn=True),
    Kind("truncated", {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 2}, is_drawn=True),
    Kind(
        "penalised",
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {40: 2.0}},
    ),
    Kind("scored", {"temperature": 0.0, "logprobs": 5}),
    Kind("regex", {"temperature": 0.0, "regex": "[a-z ]{8,200}"}),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: Any
    kind: Kind


@dataclass(frozen=True, slots=True)
class Answer:
    """Its tokens, and what was told of them: (log-probability, rank, [(id, log-probability) of the likeliest])."""

    token_ids: list[int]
    logprobs: list[tuple[float, int, list[tuple[int, float]]]]


@dataclass(frozen=True, slots=True)
class Gate:
    """Settings that all have, and those that answers may not depend on; the first are what others are held against.
    `has_equal_bits`: log-probabilities may not differ either, nor depend on who is beside a request."""

    name: str
    common: dict[str, Any]
    variants: tuple[dict[str, Any], ...]
    has_equal_bits: bool = False


TIGHT = {"max_model_len": 128, "block_size": 16, "num_gpu_blocks": 12, "enable_prefix_caching": False}
TIGHT_DRY = {"max_model_len": 16, "block_size": 4, "num_gpu_blocks": 5, "enable_prefix_caching": False}
RECOMPUTE, SWAP = {"num_cpu_blocks": 0, "swap_space": None}, {"num_cpu_blocks": 64, "swap_space": None}

GATES = (
    Gate(
        "float32",
        {"dtype": "float32"},
        (
            {"attention_backend": "triton", "steps_in_flight": 1},
            {"attention_backend": "triton", "steps_in_flight": 2},
            {"attention_backend": "triton", "steps_in_flight": 4},
            {"attention_backend": "triton", "enforce_eager": True},
            {"attention_backend": "triton", "async_scheduling": False},
            {"attention_backend": "triton", **TIGHT, **RECOMPUTE},
            {"attention_backend": "triton", **TIGHT, **SWAP},
            {"attention_backend": "torch"},
        ),
    ),
    Gate(
        "deterministic",
        {"dtype": "bfloat16", "deterministic": True, "attention_backend": "triton"},
        ({}, {"steps_in_flight": 4}, {"enforce_eager": True}, {"max_num_seqs": 1}),
        has_equal_bits=True,
    ),
    Gate(
        "fp8 cache",
        {"dtype": "float32", "kv_cache_dtype": "fp8", "attention_backend": "triton"},
        ({"steps_in_flight": 1}, {"steps_in_flight": 4}, {"enforce_eager": True}),
    ),
)
DRY_TOKENS = {False: 4, True: 2}  # by `has_equal_bits`: by Triton's interpreter, at a second a step
DRY_GATES = (
    Gate(
        "float32",
        {"dtype": "float32"},
        (
            {"attention_backend": "torch", "steps_in_flight": 1},
            {"attention_backend": "torch", "steps_in_flight": 2},
            {"attention_backend": "triton"},
            {"attention_backend": "torch", "enforce_eager": True},
            {"attention_backend": "torch", **TIGHT_DRY, **RECOMPUTE},
            {"attention_backend": "torch", **TIGHT_DRY, **SWAP},
        ),
    ),
    Gate(
        "deterministic",
        {"dtype": "float32", "deterministic": True, "attention_backend": "triton"},
        ({}, {"max_num_seqs": 1}),
        has_equal_bits=True,
    ),
    Gate(
        "fp8 cache",
        {"dtype": "float32", "kv_cache_dtype": "fp8", "attention_backend": "torch"},
        ({"steps_in_flight": 1}, {"steps_in_flight": 2}),
    ),
)


def run(place: Place) -> None:
    """The part `gates`, with the bundled model."""
    with ExitStack() as stack:
        options: dict[str, Any] = {"device": place.device.type, "max_model_len": 512, "max_num_seqs": 16}
        prompts: list[Any] = list(PROMPTS)
        num_others = NUM_OTHERS
        if place.is_dry:
            options = options_of(place, TINY, Path(stack.enter_context(TemporaryDirectory())))
            prompts, num_others = [[3, 4, 5], [9, 8]], 2
        for gate in DRY_GATES if place.is_dry else GATES:
            num_tokens = DRY_TOKENS[gate.has_equal_bits] if place.is_dry else NUM_TOKENS
            pass_gate(place, gate, options, asks_of(prompts), num_tokens)
            if gate.has_equal_bits:
                company = {"enable_prefix_caching": False, "max_num_seqs": num_others + 1}
                settings = options | gate.common | company
                compare_company(place, gate, settings, prompts, num_others, num_tokens)


def asks_of(prompts: Sequence[Any]) -> list[Ask]:
    """As many as there are prompts, or kinds if those are more: each kind with the next prompt."""
    count = max(len(prompts), len(KINDS))
    return [Ask(prompts[i % len(prompts)], KINDS[i % len(KINDS)]) for i in range(count)]


def pass_gate(place: Place, gate: Gate, options: dict[str, Any], asks: Sequence[Ask], num_tokens: int) -> None:
    """Tells which settings were tried, and complains of answers that differ. What this engine has no setting for is
    told too, and not tried."""
    first: tuple[dict[str, Any], list[Answer]] | None = None
    for variant in gate.variants:
        settings = {**gate.common, **variant}
        missing = list(missing_settings(settings))
        if missing:
            place.tell({"gate": gate.name, **variant, "skipped": f"the engine has no setting {', '.join(missing)} yet"})
            continue
        try:
            found, lost = answers(options | settings, asks, num_tokens)
        except ConfigError as error:
            place.complain(f"{gate.name}: the engine refuses {settings}: {error}")
            continue
        num_told = sum(len(answer.token_ids) for answer in found)
        place.tell({"gate": gate.name, **variant, "tokens": num_told, "lost_blocks": dict(lost)})
        way = "swap" if variant.get("num_cpu_blocks") else "recompute"
        if "num_cpu_blocks" in variant and not lost[way]:
            place.complain(
                f"{gate.name}: no sequence had its blocks back by {way} with {variant}, so that was not tried"
            )
        if first is None:
            first = variant, found
        has_other_noise = first[0].get("attention_backend") != variant.get("attention_backend")
        for index, what in differing(asks, first[1], found, has_other_noise, gate.has_equal_bits):
            place.complain(f"{gate.name}: {what} {index} with {variant} is not the one with {first[0]}")


def compare_company(
    place: Place, gate: Gate, settings: dict[str, Any], prompts: Sequence[Any], num_others: int, num_tokens: int
) -> None:
    """One request alone, and at either end of a crowd, by one engine: equal tokens, log-probabilities of equal bits."""
    scored = Ask(prompts[0], Kind("scored", {"temperature": 0.0, "logprobs": 5}))
    others = [Ask(prompts[i % len(prompts)], KINDS[i % len(KINDS)]) for i in range(num_others)]
    with engine_of(settings) as llm:
        alone, before, behind = (
            generate(llm, asks, num_tokens)[at]
            for asks, at in (([scored], 0), ([scored, *others], 0), ([*others, scored], -1))
        )
    place.tell({"gate": gate.name, "company": num_others, "tokens": len(alone.token_ids)})
    for answer, where in ((before, "before"), (behind, "behind")):
        if answer != alone:
            place.complain(f"{gate.name}: an answer {where} {num_others} others has not the bits that it has alone")


def differing(
    asks: Sequence[Ask], one: Sequence[Answer], other: Sequence[Answer], has_other_noise: bool, has_equal_bits: bool
) -> Iterator[tuple[int, str]]:
    """Which answers differ, and in what. Where the noise is another, those that are drawn are not looked at."""
    for index, (ask, this, that) in enumerate(zip(asks, one, other, strict=True)):
        if ask.kind.is_drawn and has_other_noise:
            continue
        if this.token_ids != that.token_ids:
            yield index, f"{ask.kind.name} answer"
        elif has_equal_bits and this.logprobs != that.logprobs:
            yield index, "log-probabilities of answer"


def missing_settings(settings: dict[str, Any]) -> Iterator[str]:
    """Names that no engine of this version knows."""
    from millrace.stages import EngineConfig

    known = {field.name for field in fields(EngineConfig)}
    return (name for name in settings if name not in known)


def answers(options: dict[str, Any], asks: Sequence[Ask], num_tokens: int) -> tuple[list[Answer], Counter[str]]:
    """From an engine of its own, and how often a sequence lost its blocks there, by how it has them back. They move to
    the host wherever there is room for them, whatever that costs."""
    with engine_of(options) as llm:
        host = llm.engine.core.stages.allocate.allocator.host
        if host is not None:
            host.rates = None
        before, lost = (
            Counter(llm.engine.status().core.scheduler.preemptions),
            Counter[str](),
        )  # before: while it warmed up
        found = generate(llm, asks, num_tokens)
        for (how, _), count in (Counter(llm.engine.status().core.scheduler.preemptions) - before).items():
            lost[how] += count
        return found, lost


def engine_of(options: dict[str, Any]) -> Any:
    from millrace.stages import LLM

    return LLM(**options)


def generate(llm: Any, asks: Sequence[Ask], num_tokens: int) -> list[Answer]:
    """All at once."""
    params = [params_of(ask.kind, num_tokens) for ask in asks]
    outputs = llm.generate([ask.prompt for ask in asks], params, use_tqdm=False)
    return [answer_of(output.outputs[0]) for output in outputs]


def params_of(kind: Kind, num_tokens: int) -> Any:
    from millrace.stages import SamplingParams, StructuredOutputs

    fields = dict(kind.params)
    regex = fields.pop("regex", None)
    structured = None if regex is None else StructuredOutputs(regex=regex)
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, structured_outputs=structured, **fields)


def answer_of(choice: Any) -> Answer:
    told = [(each.logprob, each.rank, [(top[0], top[3]) for top in each.top]) for each in choice.logprobs or ()]
    return Answer(list(choice.token_ids), told)
