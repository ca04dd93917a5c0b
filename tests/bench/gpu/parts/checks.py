"""The kernels against float64 on the device itself, on fresh random inputs, with poison where they are to write.

Kernels whose results are whole numbers are held against their twins exactly, and the edits of logits, which are a few
operations a number, against theirs in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import ModuleType

import torch

from millrace.kernels import kernel_set
from millrace.kernels.kernel_set import KernelSet, LoraKernels, SamplingKernels
from tests.bench.gpu.place import Place
from tests.bench.gpu.trials.attention import checked_trials
from tests.bench.gpu.trials.folded import folded_trials
from tests.bench.gpu.trials.layers import Widths, copy_trial, norm_trials, prologue_trial
from tests.bench.gpu.trials.lora import lora_trials
from tests.bench.gpu.trials.sampling import sampling_trials
from tests.bench.gpu.trials.trial import Trial, check
from tests.bench.gpu.trials.twins import twin_trials
from tests.kernels.step_sides import differences

SIZES = ((1, 1, 7), (4, 4, 40), (70, 2, 33), (256, 16, 300))  # slots, tokens a block, tokens of a sequence
NUM_STEPS = 8
ODD = Widths(hidden=1000, num_heads=7, num_groups=1, head_dim=24, inner=1025)
QWEN3_06B = Widths(hidden=1024, num_heads=16, num_groups=8, head_dim=128, inner=3072)
LLAMA_8B = Widths(hidden=4096, num_heads=32, num_groups=8, head_dim=128, inner=14_336)


def run_hot(place: Place) -> None:
    """The part `correct`: what a run is about, attention and sampling, before it is timed."""
    tell_checked(place, hot_trials(place, kernel_set.load("triton"), kernel_set.load_sampling("triton")))


def run_others(place: Place) -> None:
    """The part `checks`."""
    from millrace.kernels.triton import step_state as triton_step

    tell_checked(place, other_trials(place, kernel_set.load("triton")))
    tell_checked(place, checked_lora_trials(place, kernel_set.load_lora("triton")))
    check_steps(place, triton_step)


def run_all(place: Place) -> None:
    """Both, as the sanitizer runs them."""
    run_hot(place)
    run_others(place)


def check_kernels(place: Place, kernels: KernelSet, sampler: SamplingKernels, steps: ModuleType) -> None:
    """Complains of each kernel of these that is wrong."""
    tell_checked(place, other_trials(place, kernels))
    tell_checked(place, hot_trials(place, kernels, sampler))
    check_steps(place, steps)


def tell_checked(place: Place, trials: Iterator[Trial]) -> None:
    """Complains of each trial that is wrong, and tells how many there were."""
    count = 0
    for trial in place.in_time(trials):
        with place.trying(trial.name):
            count += 1
            for complaint in check(trial):
                place.complain(complaint)
    place.tell({"name": "trials", "count": count})


def hot_trials(place: Place, kernels: KernelSet, sampler: SamplingKernels) -> Iterator[Trial]:
    """One at a time, so that the memory of one serves the next."""
    draw = torch.Generator(place.device).manual_seed(place.seed)
    is_small = place.is_dry or place.is_tiny
    yield from checked_trials(kernels, place.device, place.dtype, place.seed, is_small)
    if not is_small:
        yield from checked_trials(kernels, place.device, torch.float32, place.seed + 1, True)
    for num_rows, vocab_size in ((4, 300),) if is_small else ((5, 300), (9, 50_257), (33, 151_936)):
        yield from sampling_trials(sampler, num_rows, vocab_size, place.dtype, draw)


def other_trials(place: Place, kernels: KernelSet) -> Iterator[Trial]:
    """Norms, activations, the prologue, decode with it, products of few rows, and copies."""
    draw = torch.Generator(place.device).manual_seed(place.seed)
    is_small = place.is_dry or place.is_tiny
    tiny = Widths(hidden=33, num_heads=4, num_groups=2, head_dim=16, inner=20)
    for widths in (tiny,) if is_small else (tiny, ODD, QWEN3_06B, LLAMA_8B):
        yield from folded_trials(kernels, widths, place.dtype, draw, is_small=is_small)
        for num_tokens in (3,) if is_small else (1, 7, 300):
            yield from norm_trials(kernels, widths, num_tokens, place.dtype, draw)
            yield prologue_trial(kernels, widths, num_tokens, place.dtype, draw)
            yield prologue_trial(kernels, widths, num_tokens, place.dtype, draw, has_norms=True)
            yield from twin_trials(kernels, widths, num_tokens, place.dtype, draw)
            if not place.is_dry:  # NOTE: Triton's interpreter loses carries where it rounds to e4m3
                yield prologue_trial(kernels, widths, num_tokens, place.dtype, draw, has_norms=True, is_fp8=True)
    for block_bytes, num_copied in ((512, 3),) if is_small else ((512, 3), (1_835_008, 40)):
        yield copy_trial(kernels, block_bytes, num_copied, draw)


def checked_lora_trials(place: Place, kernels: LoraKernels) -> Iterator[Trial]:
    """Updates of a layer by adapters, one and several, in tiles of both sizes."""
    draw = torch.Generator(place.device).manual_seed(place.seed)
    is_small = place.is_dry or place.is_tiny
    tiny = Widths(hidden=40, num_heads=4, num_groups=2, head_dim=16, inner=24)
    for widths in (tiny,) if is_small else (tiny, QWEN3_06B, LLAMA_8B):
        for num_tokens, num_adapters, rank in ((5, 2, 3),) if is_small else ((1, 1, 8), (37, 5, 16), (300, 3, 64)):
            yield from lora_trials(kernels, widths, num_tokens, num_adapters, rank, place.dtype, draw)


def check_steps(place: Place, steps: ModuleType) -> None:
    """Complains of kernels of a step's state that differ from their twins over random walks."""
    walks = (SIZES[1:2], 2) if place.is_dry or place.is_tiny else (SIZES, NUM_STEPS)
    for complaint in check_step_state(steps, place.device, place.seed, *walks):
        place.complain(complaint)


def check_step_state(
    kernels: ModuleType,
    device: torch.device,
    seed: int,
    sizes: tuple[tuple[int, int, int], ...] = SIZES,
    num_steps: int = NUM_STEPS,
) -> Iterator[str]:
    """What the kernels write otherwise than their twins, in a sentence each."""
    dice = Random(seed)
    for num_slots, block_size, max_model_len in sizes:
        for room in (9, 5000):
            walk = dice.randrange(1 << 30)
            for found in differences(
                kernels,
                walk,
                num_slots=num_slots,
                block_size=block_size,
                max_model_len=max_model_len,
                room=room,
                num_steps=num_steps,
                device=device,
            ):
                yield f"walk {walk} of {num_slots} slots of {max_model_len} tokens, {found} is not the twin's"
