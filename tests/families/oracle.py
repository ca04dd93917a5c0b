"""The tokens that transformers generates greedily in float32 on a CPU, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.families.checkpoint import VOCAB_SIZE

LENGTHS = (5, 41, 70)  # of the prompts: within windows and chunks, beyond them, and with many of them
NUM_NEW = 60  # tokens after each
NUM_BEAMS, BEAM_LENGTH = 3, 5  # of a beam search, in tokens


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Fixed token ids, none of which is special."""
    return [
        [(37 * index * index + 11 * index + 7 * length) % (VOCAB_SIZE - 8) + 8 for index in range(length)]
        for length in lengths
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """What transformers generates after a prompt."""

    prompt: list[int]
    token_ids: list[int]
    logits: Tensor  # [tokens, V] f32, from which each was chosen

    @property
    def margin(self) -> float:
        """The least distance of the best logit from the second, over the spread of the logits."""
        best = self.logits.topk(2).values
        return float(((best[:, 0] - best[:, 1]) / self.logits.std(-1)).min())

    @property
    def num_distinct(self) -> int:
        """How many different tokens it has."""
        return len(set(self.token_ids))


@torch.no_grad()
def answer(model: PreTrainedModel, prompt: list[int], num_new: int = NUM_NEW) -> Answer:
    """Generate `num_new` tokens after a prompt, whatever they are."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Answer(prompt, output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits).float())


@torch.no_grad()
def beams(model: PreTrainedModel, prompt: list[int]) -> list[list[int]]:
    """The answers of a beam search in which none ends, the likeliest first. Each step computes all tokens anew."""
    found: list[list[int]] = [[]]
    sums = torch.zeros(1)
    for _ in range(BEAM_LENGTH):
        logits = model(input_ids=torch.tensor([[*prompt, *tokens] for tokens in found]), use_cache=False).logits[:, -1]
        each = sums[:, None] + logits.float().log_softmax(-1)
        sums, places = each.flatten().topk(NUM_BEAMS)
        found = [[*found[place // each.shape[1]], place % each.shape[1]] for place in places.tolist()]
    return found
