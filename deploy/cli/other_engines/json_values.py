"""JSON values of vLLM's flags, as arguments of ours. Each function raises `FlagError` for what has no equal here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .rows import Arguments, FlagError

NGRAM = {  # key of --speculative-config -> our flag
    "num_speculative_tokens": "--num-speculative-tokens",
    "prompt_lookup_max": "--prompt-lookup-max",
    "prompt_lookup_min": "--prompt-lookup-min",
}
GRAMMAR_BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")


def speculative_config(value: Any) -> Arguments:
    """n-gram drafting with its lengths; no other method has an equal."""
    config = _object(value)
    method = config.pop("method", None)
    if method is None and config.get("model") in ("[ngram]", "ngram"):
        method = "ngram"
        config.pop("model")
    if method != "ngram":
        named = "a draft model" if method is None else f"method {method}"
        raise FlagError(f'{named} is not supported: only n-gram drafts are; use \'{{"method": "ngram"}}\'')
    arguments = ["--speculation", "ngram"]
    for key, number in config.items():
        if key not in NGRAM:
            raise FlagError(f"{key} is not supported: with ngram, keys are {', '.join(NGRAM)}")
        arguments += [NGRAM[key], str(number)]
    return tuple(arguments)


def structured_outputs_config(value: Any) -> Arguments:
    """The reasoning parser; any back-end's name."""
    arguments: list[str] = []
    for key, item in _object(value).items():
        match key, item:
            case "backend", str() if item.partition(":")[0] in GRAMMAR_BACKENDS:
                pass
            case "reasoning_parser", str():
                arguments += ["--reasoning-parser", item] if item else []
            case (("disable_fallback" | "disable_additional_properties" | "enable_in_reasoning"), False):
                pass
            case "disable_fallback", True:
                pass  # there is one back-end only
            case "disable_any_whitespace", False:
                pass
            case "disable_any_whitespace", True:
                raise FlagError('send "structured_outputs": {"disable_any_whitespace": true} with each request instead')
            case _:
                raise FlagError(f"{key} = {json.dumps(item)} is not supported; leave it out")
    return tuple(arguments)


def compilation_config(value: Any) -> Arguments:
    """`--enforce-eager` where it turns compilation or graphs off; other levels change nothing."""
    if isinstance(value, dict):
        level = value.get("mode", value.get("level"))
        is_eager = level in (0, "NONE") or value.get("cudagraph_mode") == "NONE"
        return ("--enforce-eager",) if is_eager else ()
    return ("--enforce-eager",) if value in (0, "0") else ()


def preemption_mode(value: Any) -> Arguments:
    """`recompute` is `--swap-space 0`; `swap` is the default."""
    if value not in ("swap", "recompute"):
        raise FlagError("must be swap or recompute")
    return ("--swap-space", "0") if value == "recompute" else ()


def pooler_config(value: Any) -> Arguments:
    """The pooling of embeddings, by vLLM's names."""
    config = _object(value)
    kind = str(config.pop("pooling_type", config.pop("seq_pooling_type", "auto"))).lower()
    if kind not in ("auto", "last", "mean", "cls"):
        raise FlagError(f"pooling_type {kind.upper()} is not supported: must be LAST, MEAN or CLS")
    for key, item in config.items():
        if item not in (None, True) or key not in ("normalize", "use_activation"):
            raise FlagError(f"{key} = {json.dumps(item)} is not supported; send normalize with each request instead")
    return ("--pooling", kind)


def allowed_origins(value: Any) -> Arguments:
    """Each origin may read answers, which lets it send requests too."""
    origins = [value] if isinstance(value, str) else value
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise FlagError('must be a JSON list of origins, as ["https://chat.example.com"]')
    return tuple(part for origin in origins for part in ("--cors-allow-origin", origin))


def everything(value: Any) -> Arguments:
    """Only `["*"]`, which is all."""
    if value not in (["*"], "*"):
        raise FlagError("only ['*'] is supported: the routes fix what they take; leave it out")
    return ()


def no_items(value: Any) -> Arguments:
    """Only 0 of each kind."""
    if any(item != 0 for item in _object(value).values()):
        raise FlagError("images, audio and video are not supported: every number must be 0; leave it out")
    return ()


def lora_module(value: Any) -> Arguments:
    """An adapter as name=path, from vLLM's JSON form."""
    if isinstance(value, Mapping) and isinstance(value.get("name"), str) and isinstance(value.get("path"), str):
        return ("--lora-modules", f"{value['name']}={value['path']}")
    raise FlagError('must be name=path, or {"name": ..., "path": ...}')


def empty(value: Any) -> Arguments:
    """Only an empty object."""
    if value:
        raise FlagError("nothing of it is supported; leave it out")
    return ()


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FlagError(f"must be a JSON object, not {json.dumps(value)[:80]}")
    return dict(value)
