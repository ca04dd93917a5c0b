"""The floors of the sampling kernels, on numbers one can check by hand."""

from __future__ import annotations

from millrace.kernels.checks import roofline_sampling


def test_choosing_reads_logits_once_and_writes_and_reads_each_group() -> None:
    # 3 rows of 8,193 tokens in bf16: 65 groups each. A row's slot has 64 bytes of parameters; slot, position, token.
    work = roofline_sampling.choose(3, 8193, 2)
    assert work.num_bytes == 3 * 8193 * 2 + 3 * (64 + 8 + 8 + 8) + 2 * 3 * 65 * 8
    assert work.num_flops == 3 * 8193 * 5
    assert roofline_sampling.choose_truncated(3, 8193, 2).num_bytes == work.num_bytes + 3 * 4


def test_drawing_for_a_full_batch_is_bound_by_memory() -> None:
    # 256 rows of 151,936 tokens in bf16: 78 MB, 19 us at 4.3 TB/s; arithmetic in f32 at 60 TFLOP/s takes less.
    work = roofline_sampling.choose(256, 151_936, 2)
    assert round(work.floor_s(4.3e12, 60e12) * 1e6, 1) == round(work.num_bytes / 4.3e12 * 1e6, 1) == 19.2


def test_edits_cost_a_pass_and_what_is_asked_for() -> None:
    plain = roofline_sampling.edit(2, 100, 2, 0, 0, [0, 0])
    assert plain.num_bytes == 2 * 100 * (2 + 4) + 2 * (64 + 16)
    full = roofline_sampling.edit(2, 100, 2, 1, 1, [3, 0])
    assert full.num_bytes - plain.num_bytes == 100 * 2 + 4 * 4 + 2 * 8 + 3 * 16


def test_scoring_reads_logits_once_and_writes_and_reads_each_group() -> None:
    work = roofline_sampling.score(2, 8193, 2, 5)
    assert work.num_bytes == 2 * 8193 * 2 + 2 * 2 * (65 * 12 + 5 * 4) + 2 * (16 + 12 + 60)
    assert roofline_sampling.force(3).num_bytes == 3 * (8 + 8 + 4)
    assert roofline_sampling.count_tokens(3, 2).num_bytes == 3 * (64 + 16) + 8
