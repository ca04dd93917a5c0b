"""The poolings of an encoder and the last steps of an embedding, by hand; lengths, prompts and cuts end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from millrace.model.encoder.dense import DenseLayer
from millrace.model.errors import CheckpointError
from millrace.model.pooling import PoolingConfig
from millrace.stages import LLM
from millrace.stages.encode.encoder_runner import POOLINGS
from millrace.stages.engine.pooled_requests import ScoringPairs
from millrace.stages.errors import Refused
from millrace.stages.pooling_params import PoolingParams
from tests.model.encoder_checkpoints import make_encoder, write_pooling

HIDDEN = torch.tensor([[[9.0, -9.0], [2.0, 1.0], [4.0, -3.0], [7.0, 7.0]]])  # one text of four tokens
MIDDLE = torch.tensor([[False, True, True, False]])  # a prompt before, padding after


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("cls", [2, 1]),
        ("last", [4, -3]),
        ("max", [4, 1]),
        ("mean", [3, -1]),
        ("mean_sqrt_len", [6 / 2**0.5, -2 / 2**0.5]),
        ("weighted_mean", [(2 * 2 + 3 * 4) / 5, (2 * 1 - 3 * 3) / 5]),
    ],
)
def test_poolings_by_hand(kind: Any, right: list[float]):
    assert POOLINGS[kind](HIDDEN, MIDDLE)[0].tolist() == pytest.approx(right)


def finished(vector: list[float], params: PoolingParams, **model: Any) -> list[float]:
    made = params.complete(PoolingConfig(kind="mean", size=len(vector), **model)).finish(np.array(vector, np.float32))
    assert made is not None
    return [round(float(number), 4) for number in made]


def test_length_and_dimensions_are_the_requests_or_else_the_models():
    assert finished([3, 4], PoolingParams()) == [0.6, 0.8]
    assert finished([3, 4], PoolingParams(), normalizes=False) == [3, 4]
    assert finished([3, 4], PoolingParams(normalize=True), normalizes=False) == [0.6, 0.8]
    assert finished([3, 4], PoolingParams(), truncate_dim=1) == [0.6]  # as sentence-transformers: cut last
    assert finished([3, 4], PoolingParams(normalize=True), truncate_dim=1) == [1]
    assert finished([3, 4], PoolingParams(dimensions=1)) == [1]


@pytest.mark.parametrize(("similarity", "right"), [("cosine", 0.8), ("dot", 8), ("euclidean", -5), ("manhattan", -7)])
def test_a_score_is_the_models_similarity(similarity: Any, right: float):
    pairs = ScoringPairs(["q"], ["d"])
    vectors = [np.array([0, 2], np.float32), np.array([3, 4], np.float32)]
    if similarity in ("euclidean", "manhattan"):
        vectors[0] = np.array([0, 0], np.float32)
    pooling = PoolingConfig(kind="mean", size=2, similarity=similarity)
    assert pairs.scores(vectors, {"embed"}, pooling) == pytest.approx([right])


def write_dense(root: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    (root / "2_Dense").mkdir(exist_ok=True)
    (root / "2_Dense/config.json").write_text(json.dumps(config))
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, root / "2_Dense/model.safetensors")
    return root


def test_a_linear_layer_by_hand(tmp_path: Path):
    device, vectors = torch.device("cpu"), torch.tensor([[1.0, 2.0]])
    weights = {"linear__weight": torch.tensor([[1.0, 1.0]]), "linear__bias": torch.tensor([-5.0])}
    root = write_dense(tmp_path, {"activation_function": "torch.nn.modules.activation.ReLU"}, **weights)
    assert DenseLayer.load(root, "2_Dense", 2, device)(vectors).tolist() == [[0]]
    config = {"activation_function": "torch.nn.modules.linear.Identity", "use_residual": True}
    write_dense(tmp_path, config, **weights, residual__weight=torch.tensor([[0.0, 10.0]]))
    assert DenseLayer.load(root, "2_Dense", 2, device)(vectors).tolist() == [[18]]
    with pytest.raises(CheckpointError, match=r"linear.weight has the shape \[1, 2\]: must be \[n, 3\]"):
        DenseLayer.load(root, "2_Dense", 3, device)
    write_dense(tmp_path, {"activation_function": "x.Odd"}, **weights)
    with pytest.raises(CheckpointError, match="2_Dense/config.json .*activation 'x.Odd' is not supported"):
        DenseLayer.load(root, "2_Dense", 2, device)


@pytest.mark.slow
def test_long_texts_are_cut_and_prompts_are_put_before_them(tmp_path: Path):
    make_encoder("bert", tmp_path)
    write_pooling(tmp_path, "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    prompts = {"query": "the fox ", "document": "a dog "}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    long = "by the sea " * 50
    with LLM(str(tmp_path), dtype="float32", device="cpu") as llm:

        def embed(text: Any, **params: Any) -> Any:
            return llm.embed([text], PoolingParams(**params), use_tqdm=False)[0]

        kept = embed(long)
        assert kept.num_prompt_tokens == 16
        ids = llm.engine.tokenizer.encode(long)
        assert np.array_equal(kept.embedding, embed([*ids[:15], ids[-1]]).embedding)
        assert embed(long, truncate_prompt_tokens=8).num_prompt_tokens == 8
        left = embed(long, truncate_prompt_tokens=8, truncation_side="left")
        assert np.array_equal(left.embedding, embed([ids[0], *ids[-7:]]).embedding)
        assert embed(ids, truncate_prompt_tokens=-1).num_prompt_tokens == 16
        with pytest.raises(Refused, match="length is 16 tokens, and the prompt has"):
            embed(ids)
        with pytest.raises(Refused, match="truncate_prompt_tokens: 2 tokens: must be above 2") as refused:
            embed(long, truncate_prompt_tokens=2)
        assert refused.value.param == "truncate_prompt_tokens"
        assert np.array_equal(embed("cats", prompt_name="query").embedding, embed("the fox cats").embedding)
        with pytest.raises(Refused, match="prompt_name = 'topic': must be one of query, document"):
            embed("cats", prompt_name="topic")
        scored = llm.score("cats", ["lazy"])[0].score
        assert scored == pytest.approx(float(embed("the fox cats").embedding @ embed("a dog lazy").embedding), abs=1e-5)


@pytest.mark.slow
def test_embedding_gemma_is_transformers_with_prompts_and_two_linear_layers(tmp_path: Path):
    model = make_encoder("gemma3_text", tmp_path)
    kinds = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    modules = [{"path": f"{at}_{kind}" if at else "", "type": f"a.b.{kind}"} for at, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    prompts = {"query": "the fox ", "document": "a dog "}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(4)) for shape in ((64, 32), (24, 64))]
    for folder, matrix in zip(("2_Dense", "3_Dense"), matrices, strict=True):
        (tmp_path / folder).mkdir()
        config = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": matrix}, tmp_path / folder / "model.safetensors")

    def right(text: str) -> torch.Tensor:
        ids = AutoTokenizer.from_pretrained(tmp_path)(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            vector = model(ids).last_hidden_state[0].mean(0)
            return torch.nn.functional.normalize(matrices[1] @ (matrices[0] @ vector), dim=0)

    texts = ["cats", "by the sea while 12 cats jump over a lazy dog " * 3, "the lazy dog"]
    with LLM(str(tmp_path), device="cpu") as llm:
        assert llm.engine.info.tasks == {"embed"}
        for text, made in zip(texts, llm.embed(texts, PoolingParams(prompt_name="query"), use_tqdm=False), strict=True):
            assert np.abs(made.embedding - right("the fox " + text).numpy()).max() < 1e-5
        assert llm.score("cats", ["lazy"])[0].score == pytest.approx(
            float(right("the fox cats") @ right("a dog lazy")), abs=1e-5
        )
