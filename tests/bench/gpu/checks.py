"""The kernels against their twins on the GPU itself, on fresh random inputs, with poison where they are to write.

So far those of a step's state; what sees cached tokens or logits is still to be added.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import ModuleType

import torch

from tests.kernels.step_sides import differences

SIZES = ((1, 1, 7), (4, 4, 40), (70, 2, 33), (256, 16, 300))  # slots, tokens a block, tokens of a sequence
NUM_STEPS = 8


def check_step_state(kernels: ModuleType, device: torch.device, seed: int) -> Iterator[str]:
    """What the kernels write otherwise than their twins, in a sentence each."""
    dice = Random(seed)
    for num_slots, block_size, max_model_len in SIZES:
        for room in (9, 5000):
            walk = dice.randrange(1 << 30)
            for found in differences(
                kernels,
                walk,
                num_slots=num_slots,
                block_size=block_size,
                max_model_len=max_model_len,
                room=room,
                num_steps=NUM_STEPS,
                device=device,
            ):
                yield f"walk {walk} of {num_slots} slots of {max_model_len} tokens, {found} is not the twin's"
