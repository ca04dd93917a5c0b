"""The trials that check kernels on a GPU: they pass the twins, and find a kernel that is wrong, each by its name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.kernels.layout import step_state
from tests.bench.gpu.parts.checks import check_kernels, checked_lora_trials, tell_checked
from tests.bench.gpu.place import Place
from tests.bench.gpu.trials.attention import checked_trial
from tests.bench.gpu.trials.layers import Widths, prologue_trial
from tests.bench.gpu.trials.trial import check, far, poisoned_memory

CPU = torch.device("cpu")
KERNELS = kernel_set.load("torch")
TWINS = kernel_set.load_sampling("torch")


def complaints(kernels: kernel_set.KernelSet = KERNELS, sampler: Any = TWINS) -> list[str]:
    found: list[str] = []
    check_kernels(Place(CPU, 3, lambda row: None, found.append), kernels, sampler, step_state)
    return found


def test_the_twins_are_found_right() -> None:
    assert complaints() == []


def replace(kernels: Any, **others: Callable[..., Any]) -> Any:
    """The same kernels but for `others`."""
    return SimpleNamespace(**vars(kernels) | others)


def spoilt(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves one number as memory came, of the first tensor that is returned."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        right = kernel(*args, **kwargs)
        first, *others = right if isinstance(right, tuple) else (right,)
        out = torch.empty_like(first)
        out.view(-1)[1:] = first.reshape(-1)[1:]
        return (out, *others) if others else out

    return wrong


LAYER_KERNELS = ["rms_norm", "add_rms_norm", "layer_norm", "gated", "activated", "attention_prologue"]
FOLDED = ["prologue_decode", "norm_linear", "gated_linear", "linear_add"]


@pytest.mark.parametrize("name", [*LAYER_KERNELS, *FOLDED, "paged_decode", "paged_attention"])
def test_a_number_that_a_kernel_does_not_write_is_found(name: str) -> None:
    found = complaints(replace(KERNELS, **{name: spoilt(getattr(KERNELS, name))}))
    assert found and all(complaint.startswith(name) and " are off by up to " in complaint for complaint in found)


def test_updates_by_adapters_that_are_wrong_are_found() -> None:
    twins = kernel_set.load_lora("torch")
    spoils = {"lora_shrink": spoilt(twins.lora_shrink), "lora_gated": spoilt(twins.lora_gated)}
    spoils |= {"lora_add": lambda *_: None, "group_tokens": lambda *_: None}
    for name, spoil in {"": None, **spoils}.items():
        found: list[str] = []
        place = Place(CPU, 3, lambda row: None, found.append)
        kernels = twins if spoil is None else replace(twins, **{name: spoil})
        tell_checked(place, checked_lora_trials(place, kernels))
        assert bool(found) == bool(name), (name, found)
        start = {"group_tokens": "lora_"}.get(name, name)
        assert all(complaint.startswith(start) or name == "lora_shrink" for complaint in found), (name, found)


@pytest.mark.parametrize("name", ["choose", "choose_truncated", "edit"])
def test_a_row_that_the_sampler_does_not_write_is_found(name: str) -> None:
    found = complaints(sampler=replace(TWINS, **{name: spoilt(getattr(TWINS, name))}))
    assert found and all(complaint.startswith(name) for complaint in found)


def test_scores_counts_and_copies_that_are_wrong_are_found() -> None:
    def score(*args: Any) -> tuple[Tensor, ...]:
        logprobs, *others = TWINS.score(*args)
        return logprobs + 0.01, *others

    wrong = replace(TWINS, score=score, count_tokens=lambda *_: None)
    found = complaints(replace(KERNELS, copy_blocks=lambda *_: None), wrong)
    assert [complaint.split(" ")[0] for complaint in found] == ["copy_blocks", "count_tokens", "score"]


def test_keys_that_are_written_beside_their_slots_are_found() -> None:
    def beside(*args: Any) -> Tensor:
        k_cache, slots = args[5], args[7]
        out = KERNELS.attention_prologue(*args)
        if slots[0] < 0:  # of the padding, slot -1
            k_cache[slots[0] // k_cache.shape[2], :, slots[0] % k_cache.shape[2]] = 0
        return out

    found = complaints(replace(KERNELS, attention_prologue=beside))
    assert found and all("beside the written slots" in complaint for complaint in found)


WIDTHS = Widths(hidden=33, num_heads=4, num_groups=2, head_dim=16, inner=20)


@pytest.mark.parametrize("has_norms", [False, True])
def test_an_fp8_cache_that_forgets_its_scales_is_found(has_norms: bool) -> None:
    def forgetful(*args: Any) -> Tensor:
        return KERNELS.attention_prologue(*args[:-2], args[-2] * 3, args[-1])

    for kernels, is_right in ((KERNELS, True), (replace(KERNELS, attention_prologue=forgetful), False)):
        draw = torch.Generator().manual_seed(0)
        trial = prologue_trial(kernels, WIDTHS, 9, torch.float32, draw, has_norms=has_norms, is_fp8=True)
        assert (check(trial) == []) == is_right


@pytest.mark.parametrize("is_fp8", [False, True])
def test_what_bfloat16_rounds_before_a_head_is_turned_is_no_fault_of_the_kernel(is_fp8: bool) -> None:
    def a_tenth_off(*args: Any) -> Tensor:
        return KERNELS.attention_prologue(args[0] * 1.1, *args[1:])

    for kernels, is_right in ((KERNELS, True), (replace(KERNELS, attention_prologue=a_tenth_off), False)):
        draw = torch.Generator().manual_seed(0)
        trial = prologue_trial(kernels, WIDTHS, 300, torch.bfloat16, draw, has_norms=True, is_fp8=is_fp8)
        assert (check(trial) == []) == is_right


@pytest.mark.parametrize("more", [{"window": 9}, {"soft_cap": 3.0}, {"has_sinks": True}, {"is_fp8": True}])
def test_what_attention_is_asked_for_besides_is_checked(more: dict[str, Any]) -> None:
    load = [(1, 40), (7, 30)]
    assert check(checked_trial(KERNELS, "attention", load, CPU, torch.float32, 0, **more)) == []

    def forgetful(*args: Any, **kwargs: Any) -> Tensor:
        if "window" in more:
            args = (*args[:7], None)
        elif "soft_cap" in more:
            kwargs["soft_cap"] = None
        elif "has_sinks" in more:
            kwargs["sinks"] = None
        else:
            kwargs["v_scale"] = None
        return KERNELS.paged_attention(*args, **kwargs)

    wrong = replace(KERNELS, paged_attention=forgetful)
    assert check(checked_trial(wrong, "attention", load, CPU, torch.float32, 0, **more))


def test_poisoned_memory_is_that_of_fresh_tensors_alone() -> None:
    with poisoned_memory():
        assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.int32).min() > 1 << 30
    assert not torch.are_deterministic_algorithms_enabled()


def test_nan_is_far_from_everything_and_infinity_near_itself() -> None:
    nan, infinity = torch.tensor([float("nan")]), torch.tensor([float("-inf")])
    assert (
        list(far("it", nan, nan)) and not list(far("it", infinity, infinity)) and list(far("it", infinity, -infinity))
    )
