"""Faults for tests: a family whose spec or names of tensors are changed on their way to the decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest

from millrace.model.families import registry
from millrace.model.families.names import Names
from millrace.model.spec import DecoderSpec, LayerSpec

SpecChange = Callable[[DecoderSpec], DecoderSpec]


def plant(
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    change: SpecChange = lambda spec: spec,
    names: Callable[[Names], Names] = lambda names: names,
) -> None:
    """Change what the family of a type returns, until the test ends."""
    families = import_module(f"millrace.model.families.{registry.MODULES[model_type]}").FAMILIES
    family = families[model_type]
    planted = replace(family, spec=lambda keys: change(family.spec(keys)), names=lambda spec: names(family.names(spec)))
    monkeypatch.setitem(families, model_type, planted)


def in_layers(change: Callable[[LayerSpec], LayerSpec]) -> SpecChange:
    """The change of a spec that changes each layer. Equal layers stay one object."""

    def changed(spec: DecoderSpec) -> DecoderSpec:
        layers = {id(layer): change(layer) for layer in spec.layers}
        return replace(spec, layers=tuple(layers[id(layer)] for layer in spec.layers))

    return changed
