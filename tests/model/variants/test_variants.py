"""Variants of checkpoints: each gives the logits that transformers gives, or is refused by file, key and value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.model.errors import CheckpointError
from tests.model.variants.configs import CONFIGS
from tests.model.variants.runs import Checkpoints, Variant, native_logits, oracle_logits, patch
from tests.model.variants.weights import WEIGHTS

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("variants"))


@pytest.mark.parametrize("variant", CONFIGS, ids=lambda variant: variant.name)
def test_a_variant_of_the_configuration_is_as_in_transformers_or_refused(
    variant: Variant, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    check(variant, checkpoints.copy(variant, tmp_path / "model"), "config.json")


@pytest.mark.parametrize("variant", WEIGHTS, ids=lambda variant: variant.name)
def test_a_variant_of_the_weights_is_as_in_transformers_or_refused(
    variant: Variant, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    check(variant, checkpoints.copy(variant, tmp_path / "model"), "")


def test_the_tables_have_as_many_variants_as_they_claim() -> None:
    for table, least in ((CONFIGS, 75), (WEIGHTS, 30)):
        assert len({variant.name for variant in table}) == len(table) >= least


def check(variant: Variant, root: Path, file: str) -> None:
    if variant.refused:
        with pytest.raises(CheckpointError) as caught:
            native_logits(root, variant.num_tokens, **variant.settings)
        message = str(caught.value)
        assert variant.refused in message and file in message and "\n" not in message
        return
    ours = native_logits(root, variant.num_tokens, **variant.settings)
    patch(root, variant.oracle_keys or {})
    theirs = oracle_logits(root, variant.num_tokens, is_stepwise=variant.is_stepwise)
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()
    np.testing.assert_allclose(ours, theirs, atol=2e-4 * np.abs(theirs).max())
