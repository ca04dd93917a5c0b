"""The rule by which a token ends its answer.

`finish_of` says it for one token, and is not called where answers are made. Each implementation handles many rows in
its own way, and one table of cases tests them all against it:

- numpy, of every engine: `SlotParams.note_tokens` in `stages/sample/slot_params.py`
- the plain twin of the device's kernel: `note_tokens` in `step_state.py`
- Triton: `note_tokens` in `kernels/triton/step_state.py`
- the scripted devices: `ScriptedModel` and `Outcomes` in `stages/testing/scripted/`
"""

from __future__ import annotations

from collections.abc import Collection

GOES_ON, STOP, LENGTH, ERROR = 0, 1, 2, 3  # as `FinishReason`


def finish_of(
    token_id: int,
    place: int,
    *,
    end_ids: Collection[int],
    min_tokens: int,
    max_tokens: int,
    is_broken: bool = False,
    is_over: bool = False,
) -> int:
    """How the token at `place` of its answer, from 0, ends it. The first that holds:

    ERROR   its row of logits had no finite maximum (`is_broken`), so that there is no token
    STOP    the grammar allows nothing more (`is_over`), whatever `min_tokens` says
    STOP    it is one of `end_ids`: EOS, unless that is ignored, and stop token ids; and at least `min_tokens` tokens
            came before it
    LENGTH  it is the last of `max_tokens`, or of the context
    GOES_ON
    """
    if is_broken:
        return ERROR
    if is_over or (token_id in end_ids and place >= min_tokens):
        return STOP
    return LENGTH if place + 1 >= max_tokens else GOES_ON
