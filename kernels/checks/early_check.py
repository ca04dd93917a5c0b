"""Checks that early launches wait for those ahead, in the code that the compiler made of them.

    python -m millrace.kernels.checks.early_check      # every kernel launched early; exit status 1 on a problem

The rules are in `kernels/triton/launch.py`. In the PTX, on every path: before `griddepcontrol.wait` a program reads
only the tensors of EARLY_TENSORS, and writes nothing; no path ends without it. In the machine code there is no access
to memory before the wait that the PTX does not have there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from .compile_cases import (
    CompileCase,
    attention_cases,
    folded_cases,
    layer_cases,
    other_layer_cases,
    prologue_cases,
    sampling_cases,
    step_cases,
)
from .compile_check import Launch, compiled, of_cubin, recorded_launches
from .expert_cases import expert_cases
from .lora_cases import lora_cases
from .product_cases import product_cases
from .recurrent_cases import recurrent_cases

EARLY_ARCH = 90
EARLY_TENSORS = {"vector_kernel": {"weight"}, "split_kernel": {"weight"}}  # by kernel: what no launch ever writes

REGISTER = re.compile(r"%[a-z]+\d+")
PARAMETER = re.compile(r"\[\s*\w+_param_(\d+)")


@dataclass(slots=True)
class PtxBlock:
    """Instructions that run one after another, and the blocks that may follow."""

    label: str
    instructions: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


def problems_of(case: CompileCase) -> list[str]:
    """The broken rules of the early launches of a case, for the first architecture that has them."""
    found = []
    for launch in recorded_launches(case.launch, EARLY_ARCH):
        if launch.options.get("launch_pdl"):
            found += [f"{case.name}: {launch.kernel.__name__}: {problem}" for problem in launch_problems(launch)]
    return found


def num_early(case: CompileCase) -> int:
    """The number of early launches of a case."""
    return sum(bool(launch.options.get("launch_pdl")) for launch in recorded_launches(case.launch, EARLY_ARCH))


def launch_problems(launch: Launch) -> list[str]:
    """The broken rules of one early launch."""
    kernel, signature = compiled(launch, EARLY_ARCH)
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    pointers = {str(index): name for index, name in enumerate(names) if signature[name].startswith("*")}
    allowed = EARLY_TENSORS.get(launch.kernel.__name__, set())
    problems = ptx_problems(kernel.asm["ptx"], pointers, allowed)
    listing = of_cubin("nvdisasm", "-c", kernel.asm["cubin"])
    return problems or machine_problems(listing, num_early_reads(kernel.asm["ptx"]))


def ptx_problems(ptx: str, pointers: Mapping[str, str], allowed: set[str]) -> list[str]:
    """The broken rules of a kernel in PTX; `pointers` has the names of tensors by the number of the parameter."""
    blocks = blocks_of(ptx)
    origins = _origins(blocks)
    waited = _waited(blocks)
    problems = []
    for block in blocks:
        has_waited = waited.get(block.label)
        if has_waited is None:
            continue  # no path leads here
        for instruction in block.instructions:
            if _is_wait(instruction):
                has_waited = True
            elif not has_waited and _is_end(instruction):
                problems.append("a program may end without having waited")
            elif not has_waited and _is_access(instruction):
                tensors = _tensors(instruction, origins, pointers)
                if _is_write(instruction) or not tensors or tensors - allowed:
                    what = ", ".join(sorted(tensors)) or "memory that cannot be told"
                    problems.append(f"{what} before the wait: {' '.join(instruction.split())}")
    return problems


def num_early_reads(ptx: str) -> int:
    """Reads before the wait, on any path: each is one instruction, or fewer, of the machine."""
    blocks = blocks_of(ptx)
    waited, count = _waited(blocks), 0
    for block in blocks:
        has_waited = waited.get(block.label)
        for instruction in block.instructions:
            has_waited = has_waited or _is_wait(instruction)
            count += not has_waited and _is_access(instruction)
    return count


def machine_problems(listing: str, num_reads: int) -> list[str]:
    """The broken rules of a listing of `nvdisasm -c`, whose code before the wait has at most `num_reads` reads."""
    before, wait, _ = listing.partition("ACQBULK")
    if not wait:
        return ["the machine code has no ACQBULK"]
    writes = re.findall(r"\b(?:STG|ATOMG?|REDG?)\b", before)
    reads = re.findall(r"\b(?:LDG|LDGSTS|CCTL)\b", before)
    problems = [f"{len(writes)} writes before ACQBULK"] if writes else []
    if len(reads) > num_reads:
        problems.append(f"{len(reads)} reads before ACQBULK, where PTX has {num_reads}")
    return problems


# -- PTX


def blocks_of(ptx: str) -> list[PtxBlock]:
    """The blocks of the only kernel, in order. A block without a jump at its end is followed by the next."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :])
    body = body[body.index("\n{") + 2 :]
    blocks = [PtxBlock("")]
    for part in re.split(r"[;\n]", body):
        instruction = part.strip()
        if label := re.fullmatch(r"(\$\w+):", instruction):
            blocks.append(PtxBlock(label[1]))
        elif instruction and not instruction.startswith("."):
            block = blocks[-1]
            block.instructions.append(instruction)
            if jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", instruction):
                block.targets.append(jump[1])
                blocks.append(PtxBlock(f"{block.label} after {len(blocks)}"))
    for block, following in zip(blocks, blocks[1:], strict=False):
        last = block.instructions[-1] if block.instructions else ""
        if not (re.match(r"bra\b", last) or re.match(r"(ret|exit)\b", last)):
            block.targets.append(following.label)
    return blocks


def _waited(blocks: list[PtxBlock]) -> dict[str, bool]:
    """For each block that can be reached: whether every path to it has waited."""
    by_label = {block.label: block for block in blocks}
    found: dict[str, bool] = {}
    todo = [("", False)]
    while todo:
        label, has_waited = todo.pop()
        if label in found and found[label] <= has_waited:
            continue
        found[label] = has_waited and found.get(label, True)
        block = by_label[label]
        after = found[label] or any(map(_is_wait, block.instructions))
        todo += [(target, after) for target in block.targets]
    return found


def _origins(blocks: list[PtxBlock]) -> dict[str, set[str]]:
    """The parameters that each register may be computed from, without reads of memory. Follows no order of the code."""
    found: dict[str, set[str]] = {}
    steps = [step for block in blocks for instruction in block.instructions for step in _step(instruction)]
    is_changed = True
    while is_changed:
        is_changed = False
        for results, sources, parameters in steps:
            origin = parameters.union(*(found.get(source, set()) for source in sources))
            for result in results:
                if not origin <= found.setdefault(result, set()):
                    found[result] |= origin
                    is_changed = True
    return found


def _step(instruction: str) -> Iterator[tuple[list[str], list[str], set[str]]]:
    """What an instruction computes: registers, from registers and parameters."""
    operation, _, operands = _without_guard(instruction).partition(" ")
    operands = operands or _without_guard(instruction).partition("\t")[2]
    if operation.startswith(("ld.global", "ld.shared", "atom", "st.", "red", "bra")):
        return
    results, _, rest = operands.strip().partition("}") if operands.strip().startswith("{") else operands.partition(",")
    yield REGISTER.findall(results), REGISTER.findall(rest), set(PARAMETER.findall(rest))


def _tensors(instruction: str, origins: Mapping[str, set[str]], pointers: Mapping[str, str]) -> set[str]:
    addresses = REGISTER.findall(" ".join(re.findall(r"\[([^\]]*)\]", instruction)))
    found = set().union(*(origins.get(address, set()) for address in addresses))
    return {pointers[number] for number in found if number in pointers}


def _without_guard(instruction: str) -> str:
    return re.sub(r"^@!?%\w+\s+", "", instruction).replace("\t", " ")


def _is_wait(instruction: str) -> bool:
    return instruction.startswith("griddepcontrol.wait")  # one with a guard counts as none


def _is_end(instruction: str) -> bool:
    return re.match(r"(ret|exit)\b", _without_guard(instruction)) is not None


def _is_access(instruction: str) -> bool:
    operation = _without_guard(instruction).partition(" ")[0]
    return operation.startswith(("atom", "red.", "cp.async.c", "cp.async.bulk", "prefetch")) or (
        operation.startswith(("ld.", "st.")) and not re.search(r"\.(shared|param|local)", operation)
    )


def _is_write(instruction: str) -> bool:
    return _without_guard(instruction).startswith(("st.", "atom", "red."))


def early_cases() -> list[CompileCase]:
    """The launches of a step that may be early, in bfloat16."""
    dtype = torch.bfloat16
    cases = [*layer_cases(dtype), *other_layer_cases(dtype), *prologue_cases(EARLY_ARCH, 128, dtype), *step_cases()]
    cases += [*attention_cases(128, dtype), *folded_cases(128, dtype), *sampling_cases(dtype)]
    cases += expert_cases(dtype, ["OLMoE", "gpt-oss"], tokens=(1, 2048)) + recurrent_cases(dtype)
    return [*cases, *product_cases(), *lora_cases(dtype, tokens=(64, 2048), ranks=(16,))]


def main() -> int:
    argparse.ArgumentParser(description="Check that early launches wait for those ahead.").parse_args()
    num_problems = 0
    for case in early_cases():
        problems = problems_of(case)
        num_problems += len(problems)
        print(f"{case.name:40} {num_early(case)} early  {'; '.join(problems)}", flush=True)
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
