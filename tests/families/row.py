"""A row of the zoo: a tiny checkpoint, as the keys of its config.json, and by what it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

Path = Literal["own", "fallback"]  # a decoder of ours, or transformers on our cache
OWN: tuple[Path, ...] = ("own",)
BOTH: tuple[Path, ...] = ("own", "fallback")
FALLBACK: tuple[Path, ...] = ("fallback",)
NEITHER: tuple[Path, ...] = ()


class Absent(Enum):
    """The value of a key that config.json lacks."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tiny checkpoint of one model type."""

    name: str
    model_type: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # of its config, beside those of `checkpoint.SHAPE`
    file: Mapping[str, Any] = field(default_factory=dict)  # rewritten in config.json, which then says the same
    by: tuple[Path, ...] = BOTH  # what serves it with equal tokens; all else has to refuse it
    auto: str = "AutoModelForCausalLM"  # the class of transformers that makes it
    seed: int = 0  # another one where two logits are too close, or tokens repeat
    embed_std: float = 0.3  # of the embedding; small where it is multiplied, or the last token would always win
    gain: float = 2.0  # standard deviation of a matrix times the root of its columns
    lengths: tuple[int, ...] = ()  # of its prompts, where those of all rows do not do
    attention: str = "eager"  # implementation of transformers

    @property
    def text_type(self) -> str | None:
        """The type of the decoder inside a model that also reads images."""
        model_type: str | None = self.keys.get("text_config", {}).get("model_type")
        return model_type


def row(
    name: str,
    model_type: str,
    *,
    file: Mapping[str, Any] | None = None,
    by: tuple[Path, ...] = BOTH,
    auto: str = "AutoModelForCausalLM",
    seed: int = 0,
    embed_std: float = 0.3,
    gain: float = 2.0,
    lengths: tuple[int, ...] = (),
    attention: str = "eager",
    **keys: Any,
) -> Row:
    """A row with the keys of its config given by name."""
    return Row(
        name=name,
        model_type=model_type,
        keys=keys,
        file=file or {},
        by=by,
        auto=auto,
        seed=seed,
        embed_std=embed_std,
        gain=gain,
        lengths=lengths,
        attention=attention,
    )


def layer_types(pattern: str) -> list[str]:
    """The `layer_types` of a pattern: f full, s sliding, c chunked, l linear, v conv."""
    words = {"f": "full", "s": "sliding", "c": "chunked", "l": "linear"}
    return ["conv" if letter == "v" else f"{words[letter]}_attention" for letter in pattern]
