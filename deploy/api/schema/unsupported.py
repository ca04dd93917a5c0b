"""Known fields that this server does not support.

Ignoring them would change the answer, so a request is refused unless the field's value has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ....kernels.layout.sampling_fields import FIELDS
from ...errors import wrong_field

Harmless = Mapping[str, Sequence[Any]]  # field -> values without effect

NOTHING: Sequence[Any] = (None, False, {}, [], "")
_OFF_WHEN_EMPTY = (
    "suffix",
    "tools",
    "functions",
    "audio",
    "echo",
    "chat_template",
    "cache_salt",
    "logits_processors",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "web_search_options",
)

# advice for some fields, after their name in the error text
REASONS = {
    "suffix": "this server does not fill in the middle; leave it out, or write the model's markers into the prompt",
    "echo": "only supported on /v1/completions; leave it out",
    "images": "this model takes text only; leave images out",
    "template": "a request cannot bring its own; start the server with --chat-template, or send raw = true",
    "functions": "not supported by this server; send tools instead",
    "function_call": "not supported by this server; send tools and tool_choice instead",
}
INSTEAD = {  # field -> the field of this server with the same meaning
    **{alias: field.name for field in FIELDS for alias in field.aliases},
    **dict.fromkeys(("grammar", "ebnf", "grammar_string"), "structured_outputs.grammar"),
    **dict.fromkeys(("enable_thinking", "preserve_thinking"), "chat_template_kwargs"),
    "json_schema": "response_format",
    "regex": "structured_outputs.regex",
    "num_beams": "use_beam_search and best_of",
    "banned_tokens": "logit_bias",
    "custom_token_bans": "logit_bias",
    "add_bos_token": "add_special_tokens on /v1/completions",
    "t_max_predict_ms": "timeout_s",
    **dict.fromkeys(("logits_processor", "custom_logit_processor"), "logits_processors"),
}

UNSUPPORTED: Harmless = {
    "modalities": (None, ["text"]),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    **dict.fromkeys(_OFF_WHEN_EMPTY, NOTHING),
}

# Fields of other servers. Options of a method that is off, such as mirostat_tau, ask for nothing and are not listed.
_OF_OTHER_SERVERS: Harmless = {
    **dict.fromkeys(("typical", "tfs", "tfs_z", "guidance_scale", "cfg_scale", "num_beams"), (None, 1)),
    **dict.fromkeys(("repeat_penalty", "rep_pen", "encoder_repetition_penalty", "min_temp", "max_temp"), (None, 1, 0)),
    **dict.fromkeys(
        ("dry_multiplier", "xtc_probability", "mirostat", "mirostat_mode", "top_a", "penalty_alpha"), (None, 0)
    ),
    **dict.fromkeys(
        ("epsilon_cutoff", "eta_cutoff", "smoothing_factor", "dynatemp_range", "diversity_penalty"), (None, 0)
    ),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "n_probs", "min_keep"), (None, 0)),
    **dict.fromkeys(("min_new_tokens", "min_length", "t_max_predict_ms", "dynatemp_min", "dynatemp_max"), (None, 0)),
    **dict.fromkeys(("nsigma", "n_predict", "num_predict"), (None, 0, -1)),
    **dict.fromkeys(("max_new_tokens", "max_length", "random_seed", "enable_thinking", "preserve_thinking"), (None,)),
    **dict.fromkeys(("do_sample", "add_bos_token", "detokenize"), (None, True)),
    **dict.fromkeys(
        (
            *("prompt_embeds", "input_embeds", "inputs_embeds", "images", "image_data", "audio_data", "video_data"),
            *("multi_modal_data", "mm_processor_kwargs", "lora", "lora_path", "lora_request", "lora_adapters"),
            *("adapter_id", "custom_logit_processor", "logits_processor", "vllm_xargs"),
            *("dynamic_temperature", "samplers", "sampler_order", "sampler_priority", "negative_prompt", "watermark"),
            *("grammar", "grammar_string", "ebnf", "json_schema", "regex", "structural_tag", "format", "options"),
            *("ban_eos_token", "banned_tokens", "banned_strings", "custom_token_bans", "token_healing", "stop_regex"),
            *("stopping_strings", "stop_strings", "stop_sequence", "no_stop_trim", "return_full_text", "truncate"),
            *("safe_prompt", "prompt_mode", "plugins", "search_parameters"),
        ),
        NOTHING,
    ),
}
# Fields of this server's APIs that generate, for the routes that do not have them.
_OF_OTHER_ROUTES: Harmless = {
    **dict.fromkeys(("n", "best_of"), (None, 1)),
    **dict.fromkeys(("top_logprobs", "prompt_logprobs"), (None, 0)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "seed"), (None,)),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (None, True)),
    **dict.fromkeys(
        (
            *("messages", "prompt", "input", "system", "instructions", "documents", "previous_response_id"),
            *("stop", "stop_sequences", "bad_words", "allowed_token_ids", "logprobs", "use_beam_search"),
            *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "text", "output_config", "tools", "reasoning", "reasoning_effort", "thinking"),
            *("thinking_budget", "thinking_token_budget", "chat_template_kwargs", "continue_final_message"),
            *("truncate_prompt_tokens", "add_special_tokens"),
        ),
        NOTHING,
    ),
}
GENERATION: Harmless = {**UNSUPPORTED, "parallel_tool_calls": (None, True), **_OF_OTHER_ROUTES, **_OF_OTHER_SERVERS}

# The same for embeddings, scores and reranking.
POOLING: Harmless = {
    **dict.fromkeys(("add_special_tokens", "normalized", "use_activation", "activation", "softmax"), (None, True)),
    **dict.fromkeys(("embedding_type", "embedding_types", "output_dtype", "embed_dtype"), (None, "float", ["float"])),
    **dict.fromkeys(
        (
            *("messages", "prompt_name", "input_type", "task", "instruction", "prompt", "late_chunking"),
            *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "multi_modal_data", "prompt_embeds"),
            *("lora", "lora_path", "lora_request", "rank_fields", "max_chunks_per_doc", "max_tokens_per_doc"),
        ),
        NOTHING,
    ),
}
# The same for /tokenize.
TOKENIZING: Harmless = dict.fromkeys(("chat_template", "documents", "input", "system", "mm_processor_kwargs"), NOTHING)


def refuse_unsupported(
    raw: Mapping[str, Any],
    unknown: list[str],
    unsupported: Harmless,
    instead: Mapping[str, str],
    fields: Container[str],
) -> list[str]:
    """Returns `unknown` without the unsupported fields.

    `ApiError` if one of those would have an effect; it names the right field, from `instead` or among `fields`.
    """
    for name in unknown:
        if name in unsupported and not _is_one_of(raw[name], unsupported[name]):
            raise wrong_field(name, _reason(name, instead, fields), code="unsupported_parameter")
    return [name for name in unknown if name not in unsupported]


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """Membership by JSON equality: 1 is 1.0, but 0 is not false."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _reason(name: str, instead: Mapping[str, str], fields: Container[str]) -> str:
    general = INSTEAD.get(name, "")
    right = instead.get(name) or instead.get(general) or general  # the general name may have another one here
    if right and (right != general or re.split(r"\W", general)[0] in fields):
        return f"not supported on this route; send {right} instead"
    return REASONS.get(name, "not supported on this route; leave it out")
