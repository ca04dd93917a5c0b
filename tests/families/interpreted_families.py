"""Decoders of other families on the Triton kernels, in Triton's interpreter, against transformers: a row a piece.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/families/interpreted_families.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millrace.kernels import kernel_set
from tests.families.oracle import prompts
from tests.families.zoo import Entry, chosen
from tests.model.stepping import greedy, load_decoder

LENGTHS, NUM_NEW = (9,), 2
PIECES = {
    "gemma2": "soft caps, norms with f32 weights and gated GELU",
    "cohere-qk-norm": "LayerNorms, and norms of heads with a weight each",
    "olmo2": "norms over rows",
    "hunyuan": "norms after the rotation",
    "apertus": "xIELU",
    "ministral3": "factors of queries",
    "smollm3-interval": "layers without rotation",
}


@pytest.mark.parametrize("name", PIECES)
def test_a_family_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    row = next(row for row in chosen([name]) if row.name == name)
    entry = Entry(row, tmp_path / name, NUM_NEW, LENGTHS)
    decoder = load_decoder(entry.folder, kernels=kernel_set.load("triton"))
    sequences = greedy(decoder, prompts(LENGTHS), NUM_NEW, block_size=4)
    for sequence, answer in zip(sequences, entry.answers, strict=True):
        assert sequence.generated == answer.token_ids
        torch.testing.assert_close(torch.stack(sequence.logits), answer.logits, rtol=1e-4, atol=1e-4)
