"""Where weights are read from: the values of `load_format`, and what other engines call them."""

from __future__ import annotations

import re

LOAD_FORMATS = ("auto", "safetensors", "gguf", "stream", "dummy")
PLUG_IN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # package.module:Source
ELSEWHERE = {  # another engine's value -> what to use here
    "runai_streamer": "stream, with a model of https://, s3://, gs:// or az://",
    "runai_streamer_sharded": "stream, with a model of https://, s3://, gs:// or az://",
    "remote": "stream, with a model of https://, s3://, gs:// or az://",
    "fastsafetensors": "auto, which maps safetensors",
    "instanttensor": "auto, which maps safetensors",
    "hf": "auto",
    "mistral": "auto, with the same model in Hugging Face format",
    "bitsandbytes": "auto: a bitsandbytes checkpoint is recognised by its config.json",
    "sharded_state": "auto, with the checkpoint that the shards were made of",
    "tensorizer": "auto, with the checkpoint that was serialized",
    "layered": "auto, which reads tensor by tensor",
    "pt": "safetensors: pickled weights can run code and are never loaded",
    "npcache": "safetensors: pickled weights can run code and are never loaded",
}


def load_format_problem(load_format: str) -> str | None:
    """What is wrong with a value, and what would be right; None for one of `LOAD_FORMATS`, or the name of a plug-in."""
    if load_format in LOAD_FORMATS or PLUG_IN.fullmatch(load_format):
        return None
    if load_format in ELSEWHERE:
        return f"is another engine's; use {ELSEWHERE[load_format]}"
    return f"must be {', '.join(LOAD_FORMATS)}, or package.module:Source for your own"
