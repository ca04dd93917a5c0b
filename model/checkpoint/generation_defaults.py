"""A checkpoint's sampling defaults, read from generation_config.json. A request overrides each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import CheckpointError
from ..files import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The sampling parameters of a request that sets none; None = the checkpoint sets none either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a sequence

    @classmethod
    def read(cls, root: Path, config: ModelConfig) -> GenerationDefaults:
        """The defaults of the checkpoint in `root`; end tokens are from generation_config.json, else from config.json.

        Raises CheckpointError naming a value that is out of range.
        """
        values = read_json(root, "generation_config.json") or {}
        source = f"generation_config.json ({root})"
        eos = values.get("eos_token_id")
        ids = config.eos_token_ids if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        if not all(type(token_id) is int and 0 <= token_id < config.vocab_size for token_id in ids):
            raise CheckpointError(f"{source}: eos_token_id: must be ids below {config.vocab_size}, not {eos!r}")
        if values.get("do_sample") is False:
            penalty = _number(values, source, "repetition_penalty")
            return cls(temperature=0.0, repetition_penalty=penalty, eos_token_ids=ids)
        top_k = _number(values, source, "top_k")
        return cls(
            temperature=_number(values, source, "temperature"),
            top_p=_number(values, source, "top_p", most=1.0),
            top_k=None if top_k is None else int(top_k),
            min_p=_number(values, source, "min_p", most=1.0),
            repetition_penalty=_number(values, source, "repetition_penalty"),
            eos_token_ids=ids,
        )


def _number(values: Mapping[str, Any], source: str, key: str, most: float = math.inf) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or math.isinf(value):
        raise CheckpointError(f"{source}: {key}: must be a number from 0 to {most}, not {value!r}")
    return float(value)
