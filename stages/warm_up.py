"""The first request of an engine, before it is ready: a real answer, or a real vector."""

from __future__ import annotations

from ..runtime.pipeline import Pipeline
from .embedding import Pairs, pooled_request
from .limits import as_token_ids
from .messages import Prompt, Request
from .outputs import ModelInfo
from .params import SamplingParams
from .pooling import PoolingParams

WARM_UP_PROMPT_TOKENS = 16


async def warm_up(pipeline: Pipeline, info: ModelInfo) -> None:
    """Whatever is made at first use is made now, and what does not work shows. Blocks may be cached afterwards."""
    num_prompt = min(WARM_UP_PROMPT_TOKENS, info.max_model_len - 1, info.vocab_size)
    max_tokens = min(4, info.max_model_len - num_prompt)
    prompt = Prompt(token_ids=as_token_ids(list(range(num_prompt))))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    if "generate" in info.tasks:
        await pipeline.call(Request("warm-up", (prompt,), params))
    elif "embed" in info.tasks:
        await pipeline.call(pooled_request("warm-up", (prompt,), PoolingParams()))
    else:
        await pipeline.call(Pairs(["warm"], ["up"]).request("warm-up", info.tasks))
