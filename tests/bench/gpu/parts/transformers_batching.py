"""The requests of `workload.py` through transformers' continuous batching, on the same device in the same run."""

from __future__ import annotations

import time
from typing import Any

import torch

from tests.bench.gpu.parts.workload import TEMPERATURE, Requests, chosen, row_of
from tests.bench.gpu.place import Place

WAIT_S = 1.0  # for an answer, before it is seen whether any can come


def run(place: Place) -> None:
    """The part `transformers`."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    shape, requests, before = chosen(place)
    torch.manual_seed(place.seed)
    model = make_model(shape, place)
    generation = GenerationConfig(
        max_new_tokens=4096, do_sample=True, temperature=TEMPERATURE, eos_token_id=-1, pad_token_id=0, bos_token_id=1
    )
    batching = ContinuousBatchingConfig()  # its own choices for the device
    if place.is_dry:
        batching = ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=64)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        answer(manager, before, "w")
        began = time.perf_counter()
        counts = answer(manager, requests, "r")
        place.tell({"name": "workload", **row_of(place, shape, requests, time.perf_counter() - began)})
    for got, (_, want) in zip(counts, requests, strict=True):
        if got != want:
            place.complain(f"an answer of transformers has {got} tokens and was to have {want}")


def make_model(shape: dict[str, Any], place: Place) -> Any:
    """A model of that shape with random weights, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with place.device:
        return AutoModelForCausalLM.from_config(config, dtype=place.dtype, attn_implementation="sdpa").eval()


def answer(manager: Any, requests: Requests, prefix: str) -> list[int]:
    """How many tokens each answer has. Raises RuntimeError if the manager's thread ends before."""
    for index, (prompt, num_answer) in enumerate(requests):
        manager.add_request(prompt, request_id=f"{prefix}{index}", max_new_tokens=num_answer)
    counts: dict[str, int] = {}
    while len(counts) < len(requests):
        result = manager.get_result(timeout=WAIT_S)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the thread of transformers' batching ended before its requests did")
        elif result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers' batching: {result.error}")
            counts[result.request_id] = len(result.generated_tokens)
    return [counts[f"{prefix}{index}"] for index in range(len(requests))]
