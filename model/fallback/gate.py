"""What is known of a model before its weights are read: its class, and whether its layers keep only keys and values."""

from __future__ import annotations

from collections import Counter
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    __version__,
)
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from .errors import UnservableError

STORED = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)  # cache layers that a paged cache stands for
BOTH_DIRECTIONS = (True, "all")  # values of `use_bidirectional_attention`; "vision" is for images only


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that loads the model. Raises UnservableError saying what does not fit a paged cache."""
    if config.is_encoder_decoder:
        raise UnservableError("is_encoder_decoder = true: one half reads and the other writes")
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_causal", True) is False:
        raise UnservableError("is_causal = false: it attends in both directions, as an encoder")
    if (value := getattr(text, "use_bidirectional_attention", None)) in BOTH_DIRECTIONS:
        raise UnservableError(f"use_bidirectional_attention = {value}: it attends in both directions, as an encoder")
    kind, model_class = _class_of(config)
    problem = _state(text)
    if problem is None and getattr(model_class, "_is_stateful", False):
        problem = f"its layers keep a state besides keys and values ({model_class.__name__})"
    can_choose = getattr(model_class, "_can_set_attn_implementation", None)  # NOTE: private; without it the probe tells
    if problem is None and can_choose is not None and not can_choose():
        problem = "its attention does not go through transformers' attention interface"
    if problem is not None:
        raise UnservableError(problem)
    return kind


def _class_of(config: PreTrainedConfig) -> tuple[Any, type[Any]]:
    """The auto class and the class of the model: of one that writes text, or of one that also reads images."""
    kinds = (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    )
    for kind, mapping in kinds:
        if type(config) in mapping:
            return kind, mapping[type(config)]
    raise UnservableError(f"transformers {__version__} has no class of this type that generates text")


def _state(text: PreTrainedConfig) -> str | None:
    """What the layers keep besides keys and values, by transformers' cache classes; None if nothing."""
    types = getattr(text, "layer_types", None)
    try:
        layers = DynamicCache(config=text).layers
    except KeyError as error:
        return f"layer_types names {error}, for which transformers {__version__} has no cache"
    others = [n for n, layer in enumerate(layers) if type(layer) not in STORED]
    if not others:
        return None
    names = Counter(str(types[n]) if types else type(layers[n]).__name__ for n in others)
    counts = ", ".join(f"{name} in {count} of {len(layers)}" for name, count in names.items())
    if any(isinstance(layers[n], DynamicIndexedLayer) for n in others) or any("compressed" in name for name in names):
        return f"its layers choose or compress their keys ({counts}), and sparse attention is not built"
    return f"its layers keep a state besides keys and values ({counts})"
