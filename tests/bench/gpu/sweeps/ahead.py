"""The parts `compile` and `compile-steps`: the kernels that a run launches, and all candidates, compiled beforehand.

Many processes of each compile beside each other: for the parts `correct` and `attention`, and for `products` and steps.

Nothing is launched, and no process has a context. The model and the candidates are run on meta tensors, with Triton's
own launcher, which then looks up and compiles what it would launch; so what it leaves in TRITON_CACHE_DIR is found
again by the launches of the run.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from tests.bench.gpu.sweeps.compiling import compile_all

if TYPE_CHECKING:
    from tests.bench.gpu.trials.trial import Trial

NUM_PROCESSES = 8  # of each part
CAPABILITY_MAJOR, CAPABILITY_MINOR, NUM_PROCESSORS = 75, 76, 16  # attributes, as the driver numbers them


@dataclass(frozen=True, slots=True)
class Target:
    """A card, as far as its kernels depend on it."""

    capability: int
    num_processors: int


H200 = Target(90, 132)


def run(write: Callable[[str, Any], None], job: dict[str, Any]) -> None:
    """The part `compile`. `job` is the conductor's."""
    _compile(write, job, attention_jobs, dry_jobs)


def run_steps(write: Callable[[str, Any], None], job: dict[str, Any]) -> None:
    """The part `compile-steps`."""
    _compile(write, job, step_jobs, dict)


def _compile(
    write: Callable[[str, Any], None],
    job: dict[str, Any],
    jobs_of: Callable[[Target], dict[str, Any]],
    dry_jobs: Callable[[], dict[str, Any]],
) -> None:
    """Tells which job did not compile, and how long all took."""
    is_dry = job["is_dry"]
    target = H200 if is_dry else target_here()
    jobs = dry_jobs() if is_dry else jobs_of(target)
    began_s = time.monotonic()
    num_processes = 1 if is_dry else min(NUM_PROCESSES, os.cpu_count() or 1)
    said = compile_all(jobs, partial(compile_job, target), num_processes, job["end_s"])
    for name, reason in said.items():
        if reason:
            write("left_out", {"what": name, "why": reason})
    took_s = round(time.monotonic() - began_s, 1)
    num_well = sum(not reason for reason in said.values())
    write("row", {"name": "compiled", "num_jobs": len(jobs), "num_compiled": num_well, "seconds": took_s})


def target_here() -> Target:
    """Of the first card, asked of the driver without a context."""
    driver = ctypes.CDLL("libcuda.so.1")
    card = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(card), 0):
        raise RuntimeError("the driver shows no card")

    def asked(attribute: int) -> int:
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, card):
            raise RuntimeError(f"the driver does not tell attribute {attribute}")
        return value.value

    return Target(10 * asked(CAPABILITY_MAJOR) + asked(CAPABILITY_MINOR), asked(NUM_PROCESSORS))


@dataclass(frozen=True, slots=True)
class ModelJob:
    """Steps of a model, of one size."""

    shape: str
    is_fp8: bool
    num_rows: int
    num_tokens: int
    is_decode: bool
    kinds: tuple[int, ...]  # of sampling
    has_adapters: bool = False  # in as many slots as the part `steps-lora` fills


def attention_jobs(target: Target) -> dict[str, Any]:
    """By name: what is checked first of all, then the candidates."""
    import torch

    from tests.bench.gpu.sweeps.attention import cases_of, choices_of, compile_choice

    has_fp8 = target.capability >= 89
    jobs: dict[str, Any] = {}
    for is_tiny in (False, True):
        for index, trial in enumerate(_checked_trials(is_tiny)):
            jobs[f"correct {index} {trial.name}"] = (compile_trial, is_tiny, index)
    with pretended(target):
        for case in cases_of(None):
            if has_fp8 or not case.is_fp8:
                what = f"{case.widths} {case.kind} {case.is_fp8} {case.block_size} {case.is_folded}"
                for choice in choices_of(case, torch.device("meta"), torch.bfloat16, is_dry=False):
                    jobs.setdefault(f"{what} {choice}", (compile_choice, case, choice))
    return jobs


def step_jobs(target: Target) -> dict[str, Any]:
    """By name, those that take longest first."""
    from tests.bench.gpu.sweeps import products
    from tests.bench.gpu.sweeps.product_candidates import forms_of

    jobs: dict[str, Any] = {}
    for shape in ("qwen3-0.6b", "llama-3.1-8b"):
        for is_fp8 in (False, True)[: 1 + (target.capability >= 89)]:
            for size, kinds in (((256, 512, False), ()), ((1, 1, True), (0, 1)), ((64, 64, True), (4, 9))):
                job = ModelJob(shape, is_fp8, *size, kinds)
                jobs[f"{shape}{' fp8' * is_fp8} {size}"] = job
    for num_rows in (1, 64):
        jobs[f"llama-3.1-8b adapters {num_rows}"] = ModelJob(
            "llama-3.1-8b", False, num_rows, num_rows, True, (0,), has_adapters=True
        )
    for product in products.cases_of(None):
        for form in forms_of(product):
            jobs.setdefault(product.compiled_as(form), (products.compile_form, product, form))
    return jobs


def _checked_trials(is_tiny: bool) -> Iterator[Trial]:
    """Those of attention in the part `correct`, on meta tensors."""
    import torch

    from millrace.kernels.triton import kernel_set as triton_kernels
    from tests.bench.gpu.trials.attention import checked_trials

    dtype = torch.float32 if is_tiny else torch.bfloat16
    return checked_trials(triton_kernels, torch.device("meta"), dtype, 0, is_tiny)


def compile_trial(is_tiny: bool, index: int) -> None:
    """Launches one of them, for the processes that compile."""
    next(islice(_checked_trials(is_tiny), index, None)).launch()


def dry_jobs() -> dict[str, Any]:
    """One candidate, and one that cannot be compiled."""
    from millrace.kernels.layout.work_lists import Tiling
    from tests.bench.gpu.sweeps.attention import Case, Choice, compile_choice
    from tests.bench.gpu.trials.layers import Widths

    case = Case("decode", Widths(64, 4, 2, 16, 64), "decode", ((1, 40), (1, 9)))
    choices = (Choice(Tiling(16, block_n, 4, 2, 2)) for block_n in (16, 24))
    return {str(choice): (compile_choice, case, choice) for choice in choices}


def compile_job(target: Target, job: Any) -> None:
    """In a process of its own."""
    with pretended(target):
        if isinstance(job, ModelJob):
            _compile_model(target, job)
        else:
            compile_candidate, case, candidate = job
            compile_candidate(case, candidate)


def _compile_model(target: Target, job: ModelJob) -> None:
    import torch

    from millrace.kernels import kernel_set
    from millrace.kernels.tilings.tables import load_tilings
    from millrace.model.decoder.lora_slots import LoraSlots
    from millrace.runtime.device_streams.simulated import SimStreams
    from millrace.stages.outputs import GraphBatch
    from tests.bench.gpu.floors import GPU_SHAPES
    from tests.bench.gpu.parts.adapters import MOST_ADAPTERS, RANK
    from tests.bench.gpu.parts.subject import Subject

    sizes = [(256, 1200)]
    subject = Subject(GPU_SHAPES[job.shape], torch.device("meta"), sizes, max_step_tokens=2048, is_fp8=job.is_fp8)
    predicted = load_tilings("auto", "", target.num_processors)
    slots = None
    if job.has_adapters:
        kernels = kernel_set.load_lora("triton")
        sizes_of_slots = (MOST_ADAPTERS, RANK, subject.max_step_tokens)
        slots = LoraSlots(subject.spec, subject.weights, kernels, *sizes_of_slots)
    for tilings in (None,) if job.has_adapters else (None, predicted):
        line = subject.line(SimStreams(Random(0)), time.perf_counter, tilings=tilings, slots=slots)
        line.submitter.warm([GraphBatch(job.num_rows, job.num_tokens, job.is_decode)], job.kinds)


@contextmanager
def pretended(target: Target) -> Iterator[None]:
    """Triton's launches compile for this card, and their launchers for this host, and launch nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    import millrace.kernels.triton.kernel_set
    import millrace.kernels.triton.lora.launches  # noqa: F401  all that launch
    import millrace.kernels.triton.step_state  # noqa: F401

    class Driver:
        """What a launch asks of it before there is a kernel."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", target.capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

    launch = JITFunction.run

    built: set[str] = set()

    def look_up(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        if compiled is not None and compiled.hash not in built:
            built.add(compiled.hash)
            with suppress(Exception):  # a C compiler and libcuda are needed; without, it is built by the first launch
                CudaLauncher(compiled.src, compiled.metadata)
        return compiled

    told = {"capability": lambda device: target.capability, "num_multiprocessors": lambda device: target.num_processors}
    rooms = [module for name, module in sys.modules.items() if name.startswith("millrace.kernels.triton.")]
    patches: list[tuple[Any, str, Any]] = [(JITFunction, "run", look_up)]
    patches += [(module, name, value) for module in rooms for name, value in told.items() if hasattr(module, name)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    active = driver._active
    driver.set_active(Driver())
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        driver._active = active
