"""The messages between stages.

A message is frozen: it is built once and never changed on its way. A client *request* holds one or more prompts. Each
choice of each prompt is a *sequence*, with a dense `sequence_id` in order of arrival. A running sequence has a *slot*;
columnar state is indexed by slot. Those of requests are in `request_messages.py`, those of steps in `step_messages.py`.

Senders and receivers:

    Request      client   -> intake -> tokenize
    TokenRequest tokenize -> schedule
    StepPlan     schedule -> allocate
    PlanReport   allocate -> schedule
    StepGrant    allocate -> execute
    StepLogits   execute  -> sample
    Rates        execute  -> allocate
    Guess        schedule -> schedule; the channel does not carry it, a recording does
    StepDone, StepVoid   sample -> schedule
    StepTokens   sample   -> detokenize, with the results of pooled sequences as Pooled
    StepText     detokenize -> exit
"""

from __future__ import annotations

from .request_messages import AdapterRef, ChatPrompt, Ints, Prompt, Request, TokenRequest
from .step_messages import (
    NO_INDICES,
    NO_INTS,
    STATES,
    AdapterLoads,
    Begun,
    BlockCopy,
    Bools,
    Direction,
    Drafts,
    Finish,
    FinishReason,
    Floats,
    Guess,
    Indices,
    PlanReport,
    Pooled,
    PromptLogprobs,
    PromptProgress,
    Rates,
    Started,
    StepDone,
    StepGrant,
    StepLogits,
    StepPlan,
    StepText,
    StepTokens,
    StepVoid,
    TableEntries,
    TokenLogprobs,
    TopLogprobs,
)

__all__ = (
    "AdapterLoads",
    "AdapterRef",
    "Begun",
    "BlockCopy",
    "Bools",
    "ChatPrompt",
    "Direction",
    "Drafts",
    "Finish",
    "FinishReason",
    "Floats",
    "Guess",
    "Indices",
    "Ints",
    "NO_INDICES",
    "NO_INTS",
    "PlanReport",
    "Pooled",
    "Prompt",
    "PromptLogprobs",
    "PromptProgress",
    "Rates",
    "Request",
    "STATES",
    "Started",
    "StepDone",
    "StepGrant",
    "StepLogits",
    "StepPlan",
    "StepText",
    "StepTokens",
    "StepVoid",
    "TableEntries",
    "TokenLogprobs",
    "TokenRequest",
    "TopLogprobs",
)
