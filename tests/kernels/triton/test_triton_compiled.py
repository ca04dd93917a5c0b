"""The Triton kernels compile for GPUs that are not here, and the code has what speed needs. About 2 s a kernel.

A part of `python -m millrace.kernels.checks.compile_check`, which takes every head size and type.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from millrace.kernels.checks import compile_cases, compile_check
from millrace.kernels.checks.compile_cases import CompileCase
from millrace.kernels.checks.compile_check import CompileReport
from millrace.kernels.checks.expert_cases import expert_cases
from millrace.kernels.checks.latent_cases import latent_cases
from millrace.kernels.checks.listings import spills_in_loops, waits_in_loops
from millrace.kernels.checks.recurrent_cases import recurrent_cases
from millrace.kernels.layout.attention_tilings import REGISTERS, Tiling
from millrace.kernels.triton import attention_plan
from millrace.kernels.triton import launch as triton_launch
from tests.counts import FULL, count

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton_launch.IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled"),
]

BF16 = torch.bfloat16
GROUPS = compile_cases.group_cases(128)
QUICK = ("latents prologue DeepSeek-V3 bf16", "recurrent gates Granite 4 H 64 bf16")
OTHER_KINDS = [  # of layers: heads of 512, latents, recurrence in chunks, experts in codes
    *compile_cases.attention_cases(512, BF16)[:2],
    *latent_cases(BF16),
    *recurrent_cases(BF16),
    *(case for case in expert_cases(BF16) if "in codes" in case.name),
]
CASES = [
    *((90, case) for case in compile_cases.layer_cases(BF16)),
    *((90, case) for case in compile_cases.other_layer_cases(BF16)[:3]),
    *((arch, case) for arch in (90, 80) for case in compile_cases.prologue_cases(arch, 128, BF16)),
    *((90, case) for case in compile_cases.other_prologue_cases(128, BF16)[1:6]),
    *((arch, case) for arch in (90, 80) for case in compile_cases.copy_cases()),
    *((90, case) for case in compile_cases.sampling_cases(BF16)),
    *((80, case) for case in compile_cases.sampling_cases(BF16)[: None if FULL else 1]),
    *((90, case) for case in compile_cases.attention_cases(64, BF16, group=3)[:2]),
    *((90, case) for case in compile_cases.attention_cases(128, BF16)[:6]),
    *((90, case) for case in compile_cases.attention_cases(128, BF16)[8:10]),
    *((90, case) for case in compile_cases.attention_cases(128, BF16, cache_dtype=torch.float8_e4m3fn)[:2]),
    *((80, case) for case in compile_cases.attention_cases(128, BF16)[:2]),
    *((arch, compile_cases.attention_cases(dim, BF16)[0]) for arch, dim in ((90, 24), (80, 120))),  # no multiples of 16
    *((90, case) for case in expert_cases(BF16, ["OLMoE"], (1, 64, 2048))[: count(1, 4)]),
    *((90, case) for case in OTHER_KINDS if FULL or case.name in QUICK),
    *((80, case) for case in OTHER_KINDS if FULL),
    *(
        (90, case) for case in (GROUPS if FULL else [GROUPS[0], GROUPS[7], GROUPS[8]])
    ),  # each, over either type of cache
]

CASE = compile_cases.attention_cases(64, BF16)[0]  # decode


@pytest.mark.parametrize(("arch", "case"), CASES, ids=lambda value: getattr(value, "name", value))
def test_no_register_spills_in_a_loop_and_loops_are_pipelined(arch: int, case: CompileCase) -> None:
    reports = compile_check.check(case, arch)
    assert reports
    for report in reports:
        assert not report.problems(case), report


def test_a_loop_that_waits_for_its_own_copies_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "decode_tiling", lambda *_: Tiling(16, 64, 4, 2, 3))
    (_, report), case = compile_check.check(CASE, 90), CASE
    assert report.waits == (0,) and report.num_buffers == 1
    assert report.problems(case) == [
        "loops over cached tokens leave [0] groups of copies in flight, of 2, and have 1 buffers, of 2: "
        "loads are not pipelined"
    ]


def test_a_report_names_what_is_wrong() -> None:
    case = CompileCase("extend 128", lambda: None, copies_ahead=True, uses_wgmma=True)
    good = CompileReport("extend 128: attention_kernel", 90, 1, 8, 200, 0, 0, 98560, (2, 4), 2, 24)
    assert good.problems(case) == []
    usual, *others = compile_check.STACK_BYTES.values()
    assert {"3.6": 32, "3.7": 8, "3.9": 8}.get(compile_check.TRITON, 0) == usual
    assert all(usual <= other <= usual + 64 for other in others)
    assert replace(good, stack_bytes=usual).problems(case) == []
    (much,) = replace(good, stack_bytes=usual + 8).problems(case)
    assert much.endswith("0 accesses to them in innermost loops: registers spill")
    for kind, most in compile_check.STACK_BYTES.items():
        of_kind = replace(case, stack=kind)
        assert replace(good, stack_bytes=most).problems(of_kind) == []
        (much,) = replace(good, stack_bytes=most + 8).problems(of_kind)
        assert much.startswith(f"{most + 8} bytes of stack")
        (spilled,) = replace(good, stack_bytes=most, num_loop_spills=1).problems(of_kind)
        assert spilled.endswith("1 accesses to them in innermost loops: registers spill")
    for waits, num_buffers in (((2, 1), 2), ((), 2), ((2, 2), 1)):
        (late,) = replace(good, waits=waits, num_buffers=num_buffers).problems(case)
        assert late.endswith("loads are not pipelined")
    bad = CompileReport("extend 128: attention_kernel", 90, 1, 8, 255, 48, 0, 240 << 10, (), 0, 0)
    assert [problem.split()[0] for problem in bad.problems(case)] == ["48", "245760", "loops", "no", "0"]


LISTING = """
_kernel:
        /*0000*/                   STL [R1], R12 ;
.L_x_2:
        /*0010*/                   LDL R138, [R1] ;
        /*0020*/               @P3 BRA `(.L_x_1) ;
.L_x_0:
        /*0030*/                   FADD R4, R4, R2 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   FADD R5, R4, R2 ;
        /*0060*/               @P2 BRA `(.L_x_0) ;
.L_x_1:
        /*0070*/                   LDL.64 R2, [R1] ;
        /*0080*/                   BRA `(.L_x_2) ;
"""


def test_spills_count_within_innermost_loops_alone() -> None:
    assert spills_in_loops(LISTING) == 0
    for spill in ("LDL R4, [R1+0x4] ;", "STL.64 [R1], R4 ;"):
        assert spills_in_loops(LISTING.replace("FADD R4, R4, R2 ;", spill)) == 1
        assert spills_in_loops(LISTING.replace("FADD R5, R4, R2 ;", spill)) == 1


PTX = """
	cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10, %r1;
	bra.uni 	$L__BB0_2;
$L__BB0_1:                              //   in Loop: Header=BB0_2 Depth=1
	cp.async.wait_group 	0;
$L__BB0_2:                              // =>This Loop Header: Depth=1
                                        //     Child Loop BB0_4 Depth 2
	cp.async.ca.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x8, %r1;
	@%p1 bra 	$L__BB0_1;
// %bb.3:                               //   in Loop: Header=BB0_2 Depth=1
$L__BB0_4:                              //   Parent Loop BB0_2 Depth=1
                                        // =>  This Inner Loop Header: Depth=2
	cp.async.wait_group 	2;
	@%p2 bra 	$L__BB0_6;
// %bb.5:                               //   in Loop: Header=BB0_4 Depth=2
	cp.async.wait_group 	3;
	cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10, %r1;
	cp.async.commit_group;
	bra.uni 	$L__BB0_4;
$L__BB0_6:                              //   in Loop: Header=BB0_2 Depth=1
	bra.uni 	$L__BB0_1;
"""


def test_waits_are_those_of_innermost_loops_that_copy() -> None:
    assert waits_in_loops(PTX) == [3]
    assert waits_in_loops(PTX.replace("cp.async.wait_group 	2", "").replace("cp.async.wait_group 	3", "")) == [0]
    inner = PTX.split("// %bb.5")[1]
    assert waits_in_loops(PTX.replace(inner, inner.replace("cp.async.cg", "ld"))) == []


def test_a_launch_is_recorded_with_all_its_arguments() -> None:
    (case, *_) = compile_cases.attention_cases(64, BF16)
    launches = compile_check.recorded_launches(case.launch, 90)
    assert [launch.kernel.__name__ for launch in launches] == ["list_kernel", "attention_kernel"]
    for launch in launches:
        assert set(launch.arguments) == set(launch.kernel.arg_names)
    plain = {"enable_fp_fusion": True, "launch_pdl": True}
    warps_and_registers = [{"num_warps": 8, "maxnreg": 128}, {"num_warps": 4, "maxnreg": 168}]
    assert [launch.options for launch in launches] == [plain | each for each in warps_and_registers]


def test_programs_that_share_a_multiprocessor_get_an_even_share_of_its_registers() -> None:
    for occupancy, registers in ((1, None), (2, None), (3, 168), (4, 128)):
        tiling = Tiling(16, 64, 4, 2, occupancy)
        assert tiling.max_registers == registers
        assert registers is None or occupancy * registers * 4 * 32 <= REGISTERS < occupancy * (registers + 8) * 4 * 32


def test_launches_are_the_same_for_any_lengths() -> None:
    """Meta tensors hold no numbers, so sizes alone decide: one CUDA graph serves any mix of lengths."""
    decode, extend = compile_cases.attention_cases(128, BF16)[:2]
    grids = [[launch.grid for launch in compile_check.recorded_launches(case.launch, 90)] for case in (decode, extend)]
    # A program makes each list. 132 multiprocessors: 3 programs each for decode, 1 for extend.
    assert grids == [[(1,), (396,)], [(2,), (132,)]]
