"""Choosing kernels by name."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch

from millrace.kernels import kernel_set as backend
from millrace.kernels.reference import layers_and_attention as reference

KERNELS = [
    "rms_norm",
    "add_rms_norm",
    "attention_prologue",
    "silu_mul",
    "plan_attention",
    "paged_decode",
    "paged_attention",
    "copy_blocks",
]


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=120)


def test_torch_gives_the_twins() -> None:
    kernels = backend.load("torch")
    assert kernels.name == "torch"
    for name in KERNELS:
        assert getattr(kernels, name) is getattr(reference, name)


@pytest.mark.slow
def test_choosing_torch_imports_no_triton_kernels() -> None:
    code = """
import sys
from millrace.kernels import kernel_set as backend
backend.load("torch")
assert not [name for name in sys.modules if name.startswith("millrace.kernels.triton")], sys.modules
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_triton_kernels_have_the_signatures_of_their_twins() -> None:
    pytest.importorskip("triton")
    from millrace.kernels.triton import attention as triton_attention
    from millrace.kernels.triton import attention_prologue as triton_prologue
    from millrace.kernels.triton import block_copy as triton_copy
    from millrace.kernels.triton import layers as triton_layers

    modules = (triton_layers, triton_prologue, triton_attention, triton_copy)
    for name in KERNELS:
        (kernel,) = [getattr(module, name) for module in modules if hasattr(module, name)]
        own, twin = inspect.signature(kernel), inspect.signature(getattr(reference, name))
        assert own.parameters == twin.parameters, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_triton_without_a_gpu_says_what_to_do() -> None:
    pytest.importorskip("triton")
    with pytest.raises(backend.BackendUnavailableError, match="no CUDA device.*attention_backend = torch"):
        backend.load("triton")


def test_triton_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(backend.BackendUnavailableError, match="not installed.*attention_backend = torch"):
        backend.load("triton")


@pytest.mark.slow
def test_triton_loads_under_its_interpreter() -> None:
    pytest.importorskip("triton")
    code = "from millrace.kernels import kernel_set as backend; print(backend.load('triton').name)"
    done = run_python(code, TRITON_INTERPRET="1")
    assert done.stdout == "triton\n", done.stderr


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="must be 'torch' or 'triton'"):
        backend.load("cuda")  # type: ignore[arg-type]
