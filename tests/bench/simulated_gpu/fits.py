"""Step times of a GPU, fitted to the rows of `results/gpu-h200.json` (Qwen3-0.6B's shape in bfloat16, with graphs).

Decode steps: t = t0(rows) + 36.5 ns for each token of context. Prompts: products and small kernels take 1.45 us a
token beyond t0. Attention takes, in each of 28 layers, 10 us + 62 ns a token + 21 ps for each pair of a query and a key
(512, 2,048 and 8,192 tokens: 45, 171 and 1,213 us fitted; 44, 169 and 1,210 us measured).
"""

from __future__ import annotations

import numpy as np

from millrace.stages.messages import Ints

ROWS = (1.0, 64.0, 256.0)
T0_US = (1540.0, 1790.0, 2800.0)  # at ROWS
CONTEXT_US = 0.0365  # a token of context in a decode row
NUM_LAYERS = 28
PROMPT_US = 1.45  # a token of a prompt, outside attention and beyond t0
LAUNCH_US, TOKEN_US, PAIR_US = 10.0, 0.062, 2.1e-5  # attention of a layer
UPDATE_US = 5.0  # a diff applied without rows


def step_us(starts: Ints, counts: Ints) -> float:
    """Microseconds of a step whose rows [R] have `starts` tokens in the cache and compute `counts` more."""
    if not len(starts):
        return UPDATE_US
    is_decode = counts == 1
    total = float(np.interp(len(starts), ROWS, T0_US)) + CONTEXT_US * float(starts[is_decode].sum())
    if is_decode.all():
        return total
    tokens, before = counts[~is_decode].astype(np.float64), starts[~is_decode].astype(np.float64)
    pairs = float((tokens * before + tokens * tokens / 2).sum())
    num_tokens = float(tokens.sum())
    return total + PROMPT_US * num_tokens + NUM_LAYERS * (LAUNCH_US + TOKEN_US * num_tokens + PAIR_US * pairs)
