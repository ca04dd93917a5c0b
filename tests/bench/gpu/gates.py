"""Settings that may change how fast tokens come and not which: the same greedy answers with each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from millrace.stages.errors import ConfigError

from .place import TINY, Place
from .workload import options_of

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
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Gate:
    """Settings that all have, and those that answers may not depend on; the first are what others are held against."""

    name: str
    common: dict[str, Any]
    variants: tuple[dict[str, Any], ...]


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
            {"attention_backend": "torch"},
        ),
    ),
    Gate(
        "deterministic",
        {"dtype": "bfloat16", "deterministic": True, "attention_backend": "triton"},
        ({}, {"steps_in_flight": 4}, {"enforce_eager": True}, {"max_num_seqs": 1}),
    ),
    Gate(
        "fp8 cache",
        {"dtype": "float32", "kv_cache_dtype": "fp8", "attention_backend": "triton"},
        ({"steps_in_flight": 1}, {"steps_in_flight": 4}, {"enforce_eager": True}),
    ),
)
DRY_GATES = (
    Gate(
        "float32",
        {"dtype": "float32"},
        (
            {"attention_backend": "torch", "steps_in_flight": 1},
            {"attention_backend": "torch", "steps_in_flight": 2},
            {"attention_backend": "triton"},
            {"attention_backend": "torch", "enforce_eager": True},
        ),
    ),
    Gate(
        "deterministic",
        {"dtype": "float32", "deterministic": True, "attention_backend": "triton"},
        ({}, {"max_num_seqs": 1}),
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
        if place.is_dry:
            options = options_of(place, TINY, Path(stack.enter_context(TemporaryDirectory())))
            prompts = [[3, 4, 5], [9, 8]]
        for gate in DRY_GATES if place.is_dry else GATES:
            pass_gate(place, gate, options, prompts, 4 if place.is_dry else NUM_TOKENS)


def pass_gate(place: Place, gate: Gate, options: dict[str, Any], prompts: list[Any], num_tokens: int) -> None:
    """Tells which settings were tried, and complains of answers that differ. What this engine has no setting for is
    told too, and not tried."""
    first: tuple[dict[str, Any], Tokens] | None = None
    for variant in gate.variants:
        settings = {**gate.common, **variant}
        missing = list(missing_settings(settings))
        if missing:
            place.tell({"gate": gate.name, **variant, "skipped": f"the engine has no setting {', '.join(missing)} yet"})
            continue
        try:
            tokens = answers(options | settings, prompts, num_tokens)
        except ConfigError as error:
            place.complain(f"{gate.name}: the engine refuses {settings}: {error}")
            continue
        place.tell({"gate": gate.name, **variant, "tokens": sum(map(len, tokens))})
        if first is None:
            first = variant, tokens
        for index in differing(first[1], tokens):
            place.complain(f"{gate.name}: answer {index} with {variant} is not the one with {first[0]}")


def differing(one: Tokens, other: Tokens) -> Iterator[int]:
    """Which answers differ."""
    return (index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])


def missing_settings(settings: dict[str, Any]) -> Iterator[str]:
    """Names that no engine of this version knows."""
    from millrace.stages import EngineConfig

    known = {field.name for field in fields(EngineConfig)}
    return (name for name in settings if name not in known)


def answers(options: dict[str, Any], prompts: list[Any], num_tokens: int) -> Tokens:
    """Greedy, from an engine of its own."""
    from millrace.stages import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(**options) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
