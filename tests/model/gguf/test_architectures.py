"""Each architecture of GGUF files: the spec and the tensors are those of the checkpoint that it was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="not installed: gguf")

from millrace.model.checkpoint.hub import resolve  # noqa: E402
from millrace.model.checkpoint.tensor_shapes import expected_shapes, open_source  # noqa: E402
from millrace.model.errors import CheckpointError  # noqa: E402
from millrace.model.families.registry import read_spec  # noqa: E402
from millrace.model.gguf import folder as folders  # noqa: E402
from millrace.model.gguf.keys import Keys  # noqa: E402
from millrace.model.gguf.recurrent_architectures import tiled_values  # noqa: E402
from millrace.model.grouped_matrix import GroupedMatrix  # noqa: E402
from tests.model.gguf import made_dense, made_files, made_latents, made_recurrent  # noqa: E402
from tests.model.gguf.made_files import MADE, write_gguf  # noqa: E402


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


WRITERS = {
    **dict.fromkeys(MADE, write_gguf),
    **dict.fromkeys(made_recurrent.MADE, made_recurrent.write_gguf),
    **dict.fromkeys(made_latents.MADE, made_latents.write_gguf),
    **dict.fromkeys(made_dense.MADE, made_dense.write_gguf),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_gguf_file_has_the_spec_and_the_tensors_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    folder, file = WRITERS[name](name, tmp_path)
    stand_in = resolve(str(file))
    theirs, their_spec = open_source(folder, read_spec(folder), "auto")
    ours, our_spec = open_source(stand_in, read_spec(stand_in), "auto")
    assert replace(our_spec, dtype=their_spec.dtype) == their_spec
    for tensor in expected_shapes(their_spec):
        assert np.array_equal(np.asarray(ours.array(tensor)), np.asarray(theirs.array(tensor))), tensor


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])  # rotated pairs, halves, fused matrices
def test_packed_rows_are_those_of_the_unpacked_tensors(name: str, tmp_path: Path) -> None:
    _, file = write_gguf(name, tmp_path, packed="Q8_0")
    stand_in = resolve(str(file))
    source, spec = open_source(stand_in, read_spec(stand_in), "auto")
    matrices = {tensor: matrix for tensor in expected_shapes(spec) if (matrix := source.grouped(tensor)) is not None}
    assert {tensor.split(".")[-2] for tensor in matrices} >= {"q_proj", "k_proj", "v_proj", "gate_proj", "embed_tokens"}
    for tensor, matrix in matrices.items():
        assert isinstance(matrix, GroupedMatrix), tensor
        half, rows = matrix.shape[0] // 2, source.array(tensor)
        found = np.concatenate([matrix.rows(0, half).dequantize(), matrix.rows(half, matrix.shape[0]).dequantize()])
        assert np.array_equal(found, rows), tensor


def test_experts_of_a_stack_stay_packed_one_by_one(tmp_path: Path) -> None:
    folder, file = write_gguf("granitemoe", tmp_path, packed="Q8_0")
    stand_in = resolve(str(file))
    source, spec = open_source(stand_in, read_spec(stand_in), "auto")
    theirs, _ = open_source(folder, read_spec(folder), "auto")
    for name in ("gate_proj", "up_proj"):
        name = f"model.layers.1.mlp.experts.3.{name}.weight"
        matrix, rows = source.grouped(name), source.array(name)
        assert isinstance(matrix, GroupedMatrix) and matrix.shape == (48, 32) and matrix.is_mapped
        assert np.array_equal(np.concatenate([numbers for _, numbers in matrix.unpacked()]), rows)
        assert np.allclose(rows, theirs.array(name), atol=0.02)
        assert [piece.num_bytes for piece in source.pieces(name)] == [48 * 34]
        source.forget(name)
    assert spec.mixtures[1].shared is not None


def test_layers_that_guess_further_tokens_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_files, "NUM_GUESSING", 1)
    _, file = write_gguf("glm4moe", tmp_path)
    stand_in = resolve(str(file))
    source, spec = open_source(stand_in, read_spec(stand_in), "auto")
    assert spec.num_layers == 2 and source.array("model.layers.1.mlp.experts.3.up_proj.weight").shape == (16, 32)


def test_experts_with_a_bias_of_choice_are_chosen_by_sigmoids_if_a_file_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_expert_gating_func", lambda *_: None)
    for name in ("deepseek2", "deepseek2-v3"):
        (tmp_path / name).mkdir()
        folder, file = WRITERS[name](name, tmp_path / name)
        spec = read_spec(folder)
        assert replace(read_spec(resolve(str(file))), dtype=spec.dtype) == spec


def test_gemma_4_without_the_factors_of_its_rotation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = WRITERS["gemma4"]("gemma4", tmp_path)
    monkeypatch.setattr(folders, "FACTOR_TENSORS", ())
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is missing, which says what part of a head rotates"):
        resolve(str(file))


def test_heads_of_values_lie_as_in_the_checkpoint_if_there_are_no_more_than_of_keys() -> None:
    sizes = {"time_step_rank": 4, "inner_size": 48, "group_count": 4, "state_size": 8, "conv_kernel": 4}
    metadata = {f"qwen35.ssm.{key}": size for key, size in sizes.items()}
    assert not tiled_values(Keys(metadata, "qwen35", {}))  # so matrices stay packed
    assert tiled_values(Keys({**metadata, "qwen35.ssm.group_count": 2}, "qwen35", {}))["ssm_out"].columns is not None
