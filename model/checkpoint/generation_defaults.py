"""A checkpoint's sampling defaults, read from generation_config.json. A request overrides each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...kernels.layout.sampling_fields import FROM_CHECKPOINT, Kind, Phase, SamplingField
from ..config_keys import ConfigKeys
from ..errors import CheckpointError
from ..files import read_json
from ..spec import DecoderSpec

LEAST_SHARE = 1e-9  # stands for 0 where 0 itself is invalid
# Keys that change what transformers generates, and the values at which they do not. No request gets them by default.
NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, [], ""),
    "suppress_tokens": (None, []),
    "top_h": (None,),
    "watermarking_config": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The sampling parameters of a request that sets none."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # the sampling fields that the checkpoint sets
    max_tokens: int | None = None  # `max_new_tokens`
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a sequence
    not_applied: tuple[str, ...] = ()  # keys that would change answers, and that are not supported as defaults

    @classmethod
    def read(
        cls, root: Path, config: DecoderSpec, overrides: Mapping[str, Any] | None = None, *, is_applied: bool = True
    ) -> GenerationDefaults:
        """The defaults of the checkpoint in `root`; end tokens are those of generation_config.json and config.json.

        `overrides` replaces keys of the file. Without `is_applied` only the file's end tokens count.
        An end token outside the vocabulary is left out, as it never comes. Raises CheckpointError naming a value that
        is out of range, and a key of `overrides` that has no effect.
        """
        own = read_json(root, "generation_config.json") or {}
        keys = ConfigKeys(_overridden(own, overrides or {}, is_applied), f"generation_config.json ({root})")
        eos = keys.token_ids("eos_token_id", config.vocab_size)
        is_greedy = keys.values.get("do_sample") is False
        asked = [each for each in FROM_CHECKPOINT if each.phase is Phase.PENALTY or not is_greedy]
        sampling = {each.name: value for each in asked if (value := _read(keys, each)) is not None}
        return cls(
            sampling={"temperature": 0.0, **sampling} if is_greedy else sampling,
            max_tokens=None if keys.values.get("max_new_tokens") is None else keys.count("max_new_tokens"),
            eos_token_ids=tuple(dict.fromkeys(eos + config.eos_token_ids)),
            not_applied=tuple(key for key, off in NOT_APPLIED.items() if keys.values.get(key) not in off),
        )


def _overridden(own: Mapping[str, Any], overrides: Mapping[str, Any], is_applied: bool) -> dict[str, Any]:
    known = sorted(("do_sample", "eos_token_id", "max_new_tokens", *(each.name for each in FROM_CHECKPOINT)))
    for key in overrides:
        if key not in known:
            problem = "is not applied as a default" if key in NOT_APPLIED else "is not a key of it"
            raise CheckpointError(f"override_generation_config: {key[:64]} {problem}; keys are {', '.join(known)}")
    kept = own if is_applied else {key: value for key, value in own.items() if key == "eos_token_id"}
    if overrides.get("temperature") and "do_sample" not in overrides:  # which a file's do_sample = false would undo
        kept = {key: value for key, value in kept.items() if key != "do_sample"}
    return {**kept, **overrides}


def _read(keys: ConfigKeys, each: SamplingField) -> float | None:
    """The value of a field. Shares must be at most 1; other numbers are brought into range when they are used."""
    value = keys.optional_number(each.name, least=min(each.least, 0), most=1.0 if each.most == 1 else 1e9)
    if value is None:
        return None
    if each.excludes_least:
        return max(value, LEAST_SHARE)
    return int(each.row_value(value)) if each.kind is Kind.WHOLE else value
