"""Cross-compiles every Triton kernel as its launcher would launch it, without a GPU, and inspects the code.

    python -m millrace.kernels.checks.compile_check            # all, for sm_90 and sm_80; exit status 1 on a problem
    python -m millrace.kernels.checks.compile_check --quick    # head sizes 64 and 128 in bfloat16
    python -m millrace.kernels.checks.compile_check --arch 86  # a chip with less shared memory, as 8.9 and 12.0 have
    python -m millrace.kernels.checks.compile_check --only 'extend.* 128 '     # cases by a regular expression

It checks:

- no spilled register in a loop over tokens, and at most STACK_BYTES outside of attention's kind;
- shared memory within the chip's limit;
- in each loop over cached tokens, at least MIN_AHEAD groups of asynchronous copies in flight, into at least two
  buffers: the keys and values of a tile are on their way while those of the tile before are computed with;
- room on a multiprocessor for all programs that are launched for it;
- on sm_90, warpgroup matrix instructions in the extend kernel.

It does not measure speed. `compile_cases.py` lists the launches, with `lora_cases.py`, `expert_cases.py`,
`recurrent_cases.py` and `latent_cases.py`.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from ..layout.attention_tilings import REGISTERS
from ..tilings.shared_memory import block_bytes
from ..triton import attention as triton_attention
from ..triton import attention_plan as triton_plan
from ..triton import launch as triton_launch
from .compile_cases import NUM_PROCESSORS, TYPE_NAMES, CompileCase, StackBound, all_cases
from .expert_cases import expert_cases
from .latent_cases import latent_cases
from .listings import num_buffers, spills_in_loops, waits_in_loops
from .lora_cases import lora_cases
from .recurrent_cases import recurrent_cases

SHARED_BYTES = {arch: block_bytes(arch) for arch in (80, 86, 90)}  # most of a block
MIN_AHEAD = 2  # groups of copies that a loop leaves in flight: a tile of keys, and one of values
PROCESSOR_SHARED_BYTES = {
    80: 164 << 10,
    86: 100 << 10,
    90: 228 << 10,
}  # of a multiprocessor; each block takes 1 KiB more
TRITON = ".".join(triton.__version__.split(".")[:2])
# Stack of a thread that is allowed outside loops over tokens.
STACK_BYTES: dict[StackBound, int] = {
    # Triton 3.6 (PyTorch 2.11) and 3.7 (2.13) spill a value of fp8 extend that is read once an item; 3.6 also spills
    # some of `thresholds`. 3.9 spills an address that is read once an item of extend with sinks.
    "usual": {"3.6": 32, "3.7": 8, "3.9": 8}.get(TRITON, 0),
    # Attention in f32 is there to compare with, and too slow to serve with as it has no tensor cores. Triton 3.6 spills
    # two more values there, for heads above 64, and 3.9 in three of 348 launches: they are read once an item.
    "f32": {"3.6": 40, "3.7": 8, "3.9": 16}.get(TRITON, 0),
    # Extend of heads of 256 fills the 255 registers of a thread on sm_90: 3.9 spills in five of 15 forms what is read
    # once an item; 3.6, with the same tiles, in none.
    "wide": {"3.6": 32, "3.7": 8, "3.9": 72}.get(TRITON, 0),
}


class Launch(NamedTuple):
    """A launch as recorded: the kernel, its grid, its arguments by name, and the compile options."""

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    arguments: dict[str, object]
    options: dict[str, object]


@dataclass(frozen=True, slots=True)
class CompileReport:
    """The resources and instructions of a compiled kernel."""

    name: str
    arch: int
    num_programs: int  # launched for each of NUM_PROCESSORS
    num_warps: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread; holds spilled registers
    local_bytes: int
    shared_bytes: int  # of a block
    waits: tuple[int, ...]  # see `waits_in_loops`
    num_buffers: int  # see there
    num_warpgroup_dots: int
    num_loop_spills: int = 0  # see `spills_in_loops`

    def problems(self, case: CompileCase) -> list[str]:
        """A description of each failed check; empty if all pass."""
        found = []
        is_attention = self.name.endswith("attention_kernel")
        most_stack = STACK_BYTES[case.stack if is_attention else "usual"]
        if self.stack_bytes > most_stack or self.local_bytes or self.num_loop_spills:
            found.append(
                f"{self.stack_bytes} bytes of stack and {self.local_bytes} local a thread, "
                f"{self.num_loop_spills} accesses to them in innermost loops: registers spill"
            )
        if self.shared_bytes > SHARED_BYTES[self.arch]:
            found.append(f"{self.shared_bytes} bytes of shared memory, sm_{self.arch} has {SHARED_BYTES[self.arch]}")
        if case.copies_ahead and is_attention and (min(self.waits, default=0) < MIN_AHEAD or self.num_buffers < 2):
            found.append(
                f"loops over cached tokens leave {list(self.waits)} groups of copies in flight, of {MIN_AHEAD}, "
                f"and have {self.num_buffers} buffers, of 2: loads are not pipelined"
            )
        if case.uses_wgmma and is_attention and self.arch >= 90 and not self.num_warpgroup_dots:
            found.append("no wgmma: the slower matrix instructions")
        if is_attention and self.occupancy < self.num_programs:
            found.append(
                f"{self.occupancy} programs fit on a multiprocessor, {self.num_programs} are launched for each"
            )
        return found

    @property
    def occupancy(self) -> int:
        """Blocks that fit on a multiprocessor by registers (8 a thread is a warp's unit) and shared memory."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.num_warps)
        return min(by_registers, PROCESSOR_SHARED_BYTES[self.arch] // (self.shared_bytes + 1024))


def check(case: CompileCase, arch: int) -> list[CompileReport]:
    """Compiles the launches of a case for `arch`."""
    return [_compile(launch, case.name, arch) for launch in recorded_launches(case.launch, arch)]


def recorded_launches(launch: Callable[[], object], arch: int) -> list[Launch]:
    """The kernel launches of `launch()`, recorded instead of run. Its tensors are meta tensors."""
    if triton_launch.IS_INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, so the kernels are not compiled; unset it for the compile check")
    launches = []
    backend = make_backend(GPUTarget("cuda", arch, 32))

    def record(kernel: JITFunction[Any], *args: object, grid: tuple[int, ...], warmup: bool, **kwargs: object) -> None:
        # NOTE: binds as a real launch does: that fails for some names of arguments, such as `params`
        create_function_from_signature(kernel.signature, kernel.params, backend)(*args, **kwargs)
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        launches.append(Launch(kernel, grid, arguments, options))

    def capability(device: object) -> int:
        return arch

    with (
        _replaced(JITFunction, "run", record),
        _replaced(triton_launch, "capability", capability),
        _replaced(triton_plan, "capability", capability),
        _replaced(triton_attention, "capability", capability),
    ):
        launch()
    return launches


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def compiled(launch: Launch, arch: int) -> tuple[Any, dict[str, str]]:
    """The compiled kernel of a launch, and the types of its arguments by name: `constexpr` if it takes none."""
    kernel, _, arguments, options = launch
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    divisible: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_constant = (
            parameter.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
        )
        signature[parameter.name] = "constexpr" if is_constant else _type_of(value)
        if is_constant:
            constants[(index,)] = value
        elif not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment) and _is_aligned(value):
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options), signature


def _compile(launch: Launch, name: str, arch: int) -> CompileReport:
    kernel, _ = compiled(launch, arch)
    usage = _resource_usage(kernel.asm["cubin"])
    has_stack = usage["STACK"] or usage["LOCAL"]
    ptx = kernel.asm["ptx"]
    return CompileReport(
        name=f"{name}: {launch.kernel.__name__.strip('_')}",
        arch=arch,
        num_programs=launch.grid[0] // NUM_PROCESSORS,
        num_warps=kernel.metadata.num_warps,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        waits=tuple(waits_in_loops(ptx)),
        num_buffers=num_buffers(kernel.asm["ttgir"]),
        num_warpgroup_dots=ptx.count("wgmma.mma_async"),
        num_loop_spills=spills_in_loops(of_cubin("nvdisasm", "-c", kernel.asm["cubin"])) if has_stack else 0,
    )


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPE_NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_aligned(value: object) -> bool:
    """Whether a launch would declare the value divisible by 16: allocations are, and such numbers."""
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    listing = of_cubin("cuobjdump", "-res-usage", cubin)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}


def of_cubin(tool: str, option: str, cubin: bytes) -> str:
    """What one of Triton's binary tools prints of a compiled kernel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Cross-compile the Triton kernels and inspect the code.")
    parser.add_argument("--arch", type=int, choices=sorted(SHARED_BYTES), action="append", help="default: 90 and 80")
    parser.add_argument("--quick", action="store_true", help="head sizes 64 and 128 in bfloat16 only")
    parser.add_argument("--only", default="", help="a regular expression that names of cases have in them")
    options = parser.parse_args()
    head_dims = (64, 128) if options.quick else (8, 16, 24, 64, 80, 96, 120, 128, 256, 512)
    dtypes = (torch.bfloat16,) if options.quick else (torch.bfloat16, torch.float16, torch.float32)
    num_problems = num_launches = 0
    for arch in options.arch or (90, 80):
        cases = all_cases(arch, head_dims, dtypes) + [
            case
            for dtype in dtypes
            for cases_of in (lora_cases, expert_cases, recurrent_cases, latent_cases)
            for case in cases_of(dtype)
        ]
        for case in cases:
            for report in check(case, arch) if re.search(options.only, case.name) else []:
                problems = report.problems(case)
                num_problems += len(problems)
                num_launches += 1
                print(
                    f"sm_{arch}  {report.name:48} {report.registers:4} registers {report.shared_bytes:7} B shared "
                    f"waits {list(report.waits)} {report.num_warpgroup_dots:3} wgmma  {'; '.join(problems)}",
                    flush=True,
                )
    print(f"{num_problems} problems in {num_launches} launches, by Triton {triton.__version__}")
    return 1 if num_problems or not num_launches else 0


if __name__ == "__main__":
    sys.exit(main())
