"""The state of a device, kept twice: by the plain twins, and by kernels that must match them."""

from __future__ import annotations

from itertools import repeat
from random import Random
from typing import Any

import numpy as np
import torch

from millrace.kernels.layout import step_state
from millrace.kernels.layout.step_state import StepBuffers
from millrace.stages.backends.cuda.step_update import EndRules, diff_size, write
from millrace.stages.messages import Ints, StepGrant
from tests.stages.step_walk import EOS, VOCAB_SIZE, DraftedWalk, Walk

CPU = torch.device("cpu")
POISON = 77  # what stands where nothing has been written


class Side:
    """A device's tables, kept by `kernels`: the twins, or Triton's."""

    def __init__(
        self,
        kernels: Any,
        walk: Walk | DraftedWalk,
        num_rows: int,
        num_tokens: int,
        device: torch.device = CPU,
        *,
        has_rope_offsets: bool = False,
        has_states: bool = False,
    ) -> None:
        self.kernels, self.block_size, self.device = kernels, walk.block_size, device

        def full(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
            return torch.full(shape, POISON, dtype=getattr(torch, dtype), device=device)

        sizes = (walk.num_slots, walk.max_model_len, walk.block_size)
        more = {"has_rope_offsets": has_rope_offsets, "has_states": has_states, "num_kinds": walk.num_kinds}
        self.slots = step_state.make_slots(full, *sizes, **more)  # type: ignore[arg-type]
        self.buffers = step_state.make_buffers(full, num_rows, num_tokens, self.slots.tables.shape[1], walk.num_kinds)
        self.told = full((2, num_rows), "int32")

    def step(self, parts: list[Ints], num_rows: int, num_tokens: int, chosen: list[int]) -> None:
        """All that a step does, padded to `num_rows` and `num_tokens`."""
        for part in parts:
            diff = torch.from_numpy(part).to(self.device)
            self.kernels.apply_updates(diff, self.slots)
        inputs = self.buffers.of(num_rows, num_tokens)
        self.kernels.make_inputs(diff, self.slots, inputs, self.block_size)
        ids = torch.full((num_rows,), 44, dtype=torch.int64)
        ids[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        self.kernels.note_tokens(self.told[:, :num_rows], ids.to(self.device), inputs, self.slots)

    def everything(self) -> dict[str, torch.Tensor]:
        """All that was written, by name."""
        found = {name: getattr(self.slots, name) for name in ("state", "tokens", "tables")}
        return found | {name: getattr(self.buffers, name) for name in StepBuffers.__slots__} | {"told": self.told}


def parts_of(grant: StepGrant, ends: EndRules, capacity: int, num_slots: int = 0) -> list[Ints]:
    """The diff, in copies of what was sent."""
    buffer = np.full(capacity, POISON, np.int32)
    return [buffer.copy() for _ in write(grant, ends, repeat(buffer), num_slots)]


def differences(
    kernels: Any,
    seed: int,
    *,
    num_slots: int,
    block_size: int,
    max_model_len: int,
    room: int,
    num_steps: int,
    device: torch.device = CPU,
    short_length: int = 0,
    num_kinds: int = 1,
    has_states: bool = False,
) -> list[str]:
    """What `kernels` write otherwise than the twins over a random walk, up to the first step with any. `room` is for
    known tokens: with little, a diff goes in parts. `short_length` as of `EndRules`."""
    dice = Random(seed)
    walk = Walk(dice, num_slots, max_model_len, block_size, num_kinds=num_kinds)
    num_rows, num_tokens = num_slots + 3, num_slots * max_model_len
    more = {"has_rope_offsets": short_length > 0, "has_states": has_states}
    twin = Side(step_state, walk, num_rows, num_tokens, **more)
    ours = Side(kernels, walk, num_rows, num_tokens, device, **more)
    for grant in walk.steps(num_steps):
        parts = parts_of(grant, EndRules((EOS,), max_model_len, short_length), diff_size(num_slots, 3, room), num_slots)
        rows = dice.randint(len(grant.slots), num_rows)
        tokens = min(num_tokens, grant.num_computed + dice.choice([0, 1, 40]))
        chosen = [dice.choice([EOS, -1, *range(2, VOCAB_SIZE)]) for _ in range(grant.num_sampled)]
        for side in (twin, ours):
            side.step(parts, rows, tokens, chosen)
        both = zip(twin.everything().items(), ours.everything().values(), strict=True)
        found = [f"step {grant.step}: {name}" for (name, want), got in both if not torch.equal(got.cpu(), want)]
        if found:
            return found
        told = twin.told[:, : grant.num_sampled].tolist()
        walk.chose(grant, [EOS if finish else token for token, finish in zip(*told, strict=True)])
    return []
