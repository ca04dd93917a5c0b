"""Chats and prompts as bodies for `/generate`, which holds token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....stages.params import SamplingParams

if TYPE_CHECKING:
    from ....stages.messages import Ints

PLAIN = SamplingParams()
NOT_RENDERED = frozenset({"bad_words_token_ids", "extra_args", "truncate_prompt_tokens", "truncation_side"})


def rendered(
    answer_id: str, model: str, token_ids: Ints, prompt: str, params: SamplingParams, body: Mapping[str, Any]
) -> dict[str, Any]:
    """One prompt as a body for `/generate`, plus its text with special tokens shown."""
    sampling_fields: dict[str, Any] = {
        name: value
        for name in PLAIN.__dataclass_fields__
        if name not in NOT_RENDERED and (value := getattr(params, name)) != getattr(PLAIN, name)
    }
    if "logit_bias" in sampling_fields:
        sampling_fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    return {
        "request_id": answer_id,
        "model": model,
        "token_ids": token_ids.tolist(),
        "prompt": prompt,
        "sampling_params": {"max_tokens": params.max_tokens} | sampling_fields,
        **{name: body[name] for name in ("stream", "priority", "cache_salt") if body.get(name)},
    }
