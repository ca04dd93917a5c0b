"""What a step allocates on a GPU besides its activations is bounded, and counted in the memory plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millrace.stages.backends.torch.fitted_runner import LOGIT_COPIES_BYTES, _logits_bytes
from millrace.stages.config import EngineConfig
from millrace.stages.device.scored_prompts import PIECE_BYTES, LogitsWithPrompts, ScoredChunk


@pytest.mark.parametrize(
    ("vocab_size", "max_rows", "expected"), [(151_936, 256, 55), (1_000, 8, 8), (20_000_000, 8, 1)]
)
def test_a_long_scored_prompt_never_has_more_logits_than_a_piece(vocab_size: int, max_rows: int, expected: int) -> None:
    sizes: list[int] = []

    def to_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return torch.empty(len(hidden), 1)

    run = ScoredChunk(0, 1, np.zeros(2_000, np.int32), 0, 1)
    sampled = torch.empty(0, vocab_size)
    logits = LogitsWithPrompts(sampled, (run,), torch.empty(2_000, 1), to_logits, max_rows)
    assert sum(len(range(2_000)[piece]) for _, piece, _ in logits.pieces()) == 2_000
    assert max(sizes) == expected and (expected == 1 or 4 * vocab_size * max(sizes) <= PIECE_BYTES)


def test_the_plan_counts_rows_drafts_and_a_piece_of_scored_prompts() -> None:
    config = EngineConfig(max_num_seqs=4, speculation="ngram", num_speculative_tokens=7, max_num_batched_tokens=64)
    each, scored = 2 + LOGIT_COPIES_BYTES, 4 * 100 * (2 + LOGIT_COPIES_BYTES)
    assert _logits_bytes(config, 100, torch.float16, 4, is_async=False) == (4 + 8) * 100 * each + scored
    assert _logits_bytes(config, 100, torch.float16, 16, is_async=True) == 16 * 100 * (each + 2) + scored
