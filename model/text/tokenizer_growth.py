"""A bound on how much longer a tokenizer.json makes a text, checked before any text is read with it.

A few steps that each double a text take all memory at the first request. So the steps are added up from the file: the
length of a text becomes at most `factor` times its length, plus `extra`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import normalizers

from ..errors import CheckpointError
from .tokenizer_steps import steps_of

MAX_FACTOR = 16.0  # beside what Unicode forms and the byte alphabet need; published tokenizers have 1 to 4
MAX_EXTRA = 256  # characters
MAX_REPEATED = 4  # steps of one type


def check_growth(rust: RustTokenizer, root: Path) -> None:
    """Raises CheckpointError if the steps could make a text much longer."""
    factor, extra = 1.0, 0.0
    for step in steps_of(rust.normalizer):
        if isinstance(step, normalizers.Prepend):
            extra += len(json.loads(step.__getstate__())["prepend"])
        elif isinstance(step, normalizers.Replace):
            growth = _growth(json.loads(step.__getstate__()))
            factor, extra = factor * growth, extra * growth + (growth if growth > 1 else 0)
        _check(root, "normalizer", factor, extra)
    if rust.decoder is not None:
        _check_decoder(root, json.loads(rust.decoder.__getstate__()))
    for name, part in (("normalizer", rust.normalizer), ("pre_tokenizer", rust.pre_tokenizer)):
        kinds = Counter(type(step).__name__ for step in steps_of(part))
        for kind in ("BertNormalizer", "ByteLevel", "Metaspace"):
            if kinds[kind] > MAX_REPEATED:
                raise CheckpointError(
                    f"tokenizer.json ({root}): {name}: {kinds[kind]} steps of type {kind}, each of which makes a text "
                    f"longer; at most {MAX_REPEATED} are used"
                )
    if rust.post_processor is not None:
        _check_templates(root, json.loads(rust.post_processor.__getstate__()))


def _growth(step: Mapping[str, Any]) -> float:
    """How many characters a Replace makes of one, at most: a regular expression may match nothing, at every place."""
    written = len(step["content"])
    text = step["pattern"].get("String")
    return max(1.0, written / len(text)) if text else float(written + 1)


def _check(root: Path, name: str, factor: float, extra: float) -> None:
    if factor > MAX_FACTOR or extra > MAX_EXTRA:
        raise CheckpointError(
            f"tokenizer.json ({root}): {name}: its steps make a text {factor:.3g} times as long, plus {extra:.3g} "
            f"characters: must be at most {MAX_FACTOR:.3g} times and {MAX_EXTRA}"
        )


def _check_decoder(root: Path, decoder: Mapping[str, Any]) -> None:
    factor = 1.0
    for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        if step["type"] == "Replace":
            factor *= _growth(step)
    _check(root, "decoder", factor, 0)


def _check_templates(root: Path, processor: Mapping[str, Any]) -> None:
    """Each text stands at most once in a template."""
    for step in processor["processors"] if processor["type"] == "Sequence" else [processor]:
        if step["type"] == "Sequence":
            _check_templates(root, step)
        for name in ("single", "pair") if step["type"] == "TemplateProcessing" else ():
            counts = Counter(part["Sequence"]["id"] for part in step[name] if "Sequence" in part)
            for text, count in counts.items():
                if count > 1:
                    raise CheckpointError(
                        f"tokenizer.json ({root}): post_processor: the template {name} repeats ${text} {count} times; "
                        "each text must stand in it once"
                    )
