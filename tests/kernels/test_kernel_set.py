"""Backends of kernels: each offers every kernel of the protocols, and is chosen by name."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import kernel_set
from millrace.kernels.kernel_set import KernelSet, SamplingKernels
from millrace.kernels.reference import sampling

PROTOCOLS = (KernelSet, SamplingKernels)
KERNELS = Path(kernel_set.__file__).parent
BACKENDS = sorted(path.parent.name for path in KERNELS.glob("*/kernel_set.py"))


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=120)


def kernels_of(protocol: type) -> dict[str, Callable[..., Any]]:
    return {name: member for name, member in vars(protocol).items() if name[0] != "_" and inspect.isfunction(member)}


def mismatches(backend: Any, protocol: type) -> Iterator[str]:
    """What a backend lacks of a protocol, and each kernel with another signature: names, kinds, defaults, types."""
    for name, member in kernels_of(protocol).items():
        _, *want = inspect.signature(member).parameters.values()
        kernel = getattr(backend, name, None)
        if kernel is None:
            yield f"{name} is missing"
        elif (got := list(inspect.signature(kernel).parameters.values())) != want:
            yield f"{name}: {got} instead of {want}"


# ---- the protocols --------------------------------------------------------------------------------------------------


def test_the_backends_are_the_torch_and_the_triton_kernels() -> None:
    assert BACKENDS == ["reference", "triton"]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_lora_kernels_of_a_backend_have_the_signatures_of_the_protocol(name: kernel_set.BackendName) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    assert not [*mismatches(kernel_set.load_lora(name), kernel_set.LoraKernels)]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_kernels_of_other_kinds_of_layers_have_the_signatures_of_the_protocols(name: kernel_set.BackendName) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    assert not [*mismatches(kernel_set.load_experts(name), kernel_set.ExpertKernels)]
    assert not [*mismatches(kernel_set.load_recurrent(name), kernel_set.RecurrentKernels)]
    assert not [*mismatches(kernel_set.load_latents(name), kernel_set.LatentKernels)]


@pytest.mark.parametrize("folder", BACKENDS)
def test_a_backend_has_every_kernel_with_the_signature_of_the_protocol(folder: str) -> None:
    if folder == "triton":
        pytest.importorskip("triton")
    backend = importlib.import_module(f"millrace.kernels.{folder}.kernel_set")
    names = {"name"}.union(*map(kernels_of, PROTOCOLS))
    assert [problem for protocol in PROTOCOLS for problem in mismatches(backend, protocol)] == []
    assert set(backend.__all__) == names


def other_name(x: Tensor, factors: Tensor | None, eps: float) -> Tensor: ...  # type: ignore[empty-body]
def other_kind(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor: ...  # type: ignore[empty-body]
def other_default(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor: ...  # type: ignore[empty-body]
def one_more(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> Tensor: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("wrong", [other_name, other_kind, other_default, one_more, None])
def test_another_signature_or_a_missing_kernel_is_found(wrong: Callable[..., Tensor] | None) -> None:
    backend = SimpleNamespace(**vars(kernel_set.load("torch")) | {"rms_norm": wrong})
    (problem,) = mismatches(backend, KernelSet)
    assert problem.startswith("rms_norm")


def test_every_kernel_of_the_protocols_says_what_it_does() -> None:
    for protocol in PROTOCOLS:
        for name, member in kernels_of(protocol).items():
            assert member.__doc__, name


# ---- the choice -----------------------------------------------------------------------------------------------------


def test_torch_gives_the_twins() -> None:
    kernels = kernel_set.load("torch")
    assert kernels.name == "torch"
    for name in kernels_of(KernelSet):
        assert getattr(kernels, name).__module__.startswith("millrace.kernels.reference.")
    for name in kernels_of(SamplingKernels):
        assert getattr(kernel_set.load_sampling("torch"), name) is getattr(sampling, name)


@pytest.mark.slow
def test_choosing_torch_imports_no_triton_kernels() -> None:
    code = """
import sys
from millrace.kernels import kernel_set
before = {name for name in sys.modules if name.partition(".")[0] == "triton"}  # torch may import it by itself
kernel_set.load("torch"), kernel_set.load_sampling("torch")
assert not [name for name in sys.modules if name.startswith("millrace.kernels.triton")], sys.modules
assert before == {name for name in sys.modules if name.partition(".")[0] == "triton"}
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_triton_without_a_gpu_says_what_to_do() -> None:
    pytest.importorskip("triton")
    with pytest.raises(kernel_set.BackendUnavailableError, match="no CUDA device.*attention_backend = torch"):
        kernel_set.load("triton")


def test_triton_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_set.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(kernel_set.BackendUnavailableError, match="not installed.*attention_backend = torch"):
        kernel_set.load("triton")


@pytest.mark.slow
def test_triton_loads_under_its_interpreter() -> None:
    pytest.importorskip("triton")
    code = "from millrace.kernels import kernel_set; print(kernel_set.load('triton').name)"
    done = run_python(code, TRITON_INTERPRET="1")
    assert done.stdout == "triton\n", done.stderr


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="must be 'torch' or 'triton'"):
        kernel_set.load("cuda")  # type: ignore[arg-type]
