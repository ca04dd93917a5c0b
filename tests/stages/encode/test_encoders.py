"""Encoder models: transformers' own hidden states and scores, alone and in batches, and what they refuse."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from millrace.model.errors import CheckpointError
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import LLM, Engine, EngineConfig, SamplingParams
from millrace.stages.encode.stage import batches
from millrace.stages.errors import ConfigError, Refused
from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams as Params
from millrace.stages.pooling_params import Floats, Kind, PoolingParams
from tests.model.encoder_checkpoints import ENCODERS, change_config, make_encoder, write_pooling

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "by", "the", "sea", "while", "12", "cats"]
TEXTS = [" ".join((WORDS * 9)[at : at + count]) for at, count in enumerate((1, 2, 7, 20, 40, 60))]
TOLERANCE = 1e-4
CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


def expected(model: Any, folder: Path, text: str, kind: Kind) -> Floats:
    """transformers' hidden states of a text alone, pooled and of length 1."""
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state[0]
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[kind]
    pooled: Floats = torch.nn.functional.normalize(vector, dim=0).numpy()
    return pooled


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(ENCODERS))
def test_embeddings_are_transformers_alone_and_in_batches(family: str, tmp_path: Path):
    model = make_encoder(family, tmp_path, pooling="cls_token")
    kinds: tuple[Kind, ...] = ("cls", "mean", "last")

    async def main() -> None:
        async with Engine(
            EngineConfig(model=str(tmp_path), max_num_batched_tokens=96, max_num_seqs=32, **CPU)
        ) as engine:
            assert engine.info.max_model_len == 128 and engine.info.tasks == {"embed"}
            assert (
                np.abs((await engine.embed(TEXTS[3])).embedding - expected(model, tmp_path, TEXTS[3], "cls")).max()
                < TOLERANCE
            )
            asked = [(text, kind) for text in TEXTS for kind in kinds]
            outputs = await asyncio.gather(*(engine.embed(text, PoolingParams(kind=kind)) for text, kind in asked))
            for (text, kind), output in zip(asked, outputs, strict=True):
                assert np.abs(output.embedding - expected(model, tmp_path, text, kind)).max() < TOLERANCE

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "activation"), [("bert", None), ("bert", "Identity"), ("roberta", "Sigmoid")])
def test_a_cross_encoders_scores_are_transformers(family: str, activation: str | None, tmp_path: Path):
    said = {} if activation is None else {"sentence_transformers": {"activation_fn": f"torch.nn.x.{activation}"}}
    model = make_encoder(family, tmp_path, labels=1, **said)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def right(query: str, document: str) -> float:
        inputs = tokenizer(query, document, return_tensors="pt", return_token_type_ids=family == "bert")
        with torch.inference_mode():
            logit = model(**inputs).logits[0, 0]
        return float(logit if activation == "Identity" else torch.sigmoid(logit))

    with LLM(str(tmp_path), max_num_batched_tokens=256, **CPU) as llm:
        for queries, documents in ((TEXTS[2], TEXTS[:5]), (TEXTS[:5], TEXTS[4::-1])):
            outputs = llm.score(queries, documents)
            each = [queries] * 5 if isinstance(queries, str) else queries
            for output, query, document in zip(outputs, each, documents, strict=True):
                assert abs(output.score - right(query, document)) < TOLERANCE
                assert output.num_prompt_tokens == len(tokenizer(query, document).input_ids)
        with pytest.raises(Refused, match="no embeddings; it scores pairs of texts"):
            llm.embed("x", use_tqdm=False)


@pytest.mark.slow
def test_an_encoder_scores_by_cosine_and_generates_nothing(tmp_path: Path):
    make_encoder("bert", tmp_path)

    with LLM(str(tmp_path), **CPU) as llm:
        embeddings = [output.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
        cosines = [float(embeddings[2] @ embedding) for embedding in embeddings]
        assert [output.score for output in llm.score(TEXTS[2], TEXTS)] == pytest.approx(cosines, abs=TOLERANCE)
        with pytest.raises(Refused, match="does not generate text; it embeds texts"):
            llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)
        with pytest.raises(Refused, match="length is 128 tokens, and the prompt has 129"):
            llm.embed([[7] * 129], use_tqdm=False)
        assert llm.embed([[7] * 128], use_tqdm=False)[0].num_prompt_tokens == 128


@pytest.mark.slow
def test_there_is_nothing_to_record_of_an_encoder(tmp_path: Path):
    make_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match="an encoder model has no scheduler"):
        LLM(str(tmp_path), record=str(tmp_path / "run.jsonl"), **CPU)
    assert not (tmp_path / "run.jsonl").exists()


# -- the checkpoint's settings


def load(folder: Path, **settings: Any) -> Any:
    from millrace.runtime.startup.phases import Phases
    from millrace.stages.loading.model import load_model

    return load_model(EngineConfig(model=str(folder), **CPU | settings), Phases(lambda: 0.0), LiveEnv(0))


@pytest.mark.parametrize("asked", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_an_encoder_refuses_quantization_and_says_what_halves_its_weights(tmp_path: Path, asked: dict[str, Any]):
    make_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match="= int8: is for models that generate.*leave it out, or set dtype = bfloat16"):
        load(tmp_path, **asked)


def test_pooling_and_limits_are_read_from_the_checkpoint_unless_told_otherwise(tmp_path: Path):
    make_encoder("bert", tmp_path)
    assert load(tmp_path).info.pooling.kind == "mean"
    write_pooling(tmp_path, "cls_token")
    assert load(tmp_path).info.pooling.kind == "cls"
    assert load(tmp_path, pooling="last").info.pooling.kind == "last"
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    assert load(tmp_path).info.max_model_len == 64
    assert load(tmp_path, max_model_len=32).info.max_model_len == 32
    with pytest.raises(ConfigError, match="max_model_len = 65: must be at most 64"):
        load(tmp_path, max_model_len=65)
    change_config(tmp_path, matryoshka_dimensions=[8, 16])
    pooling = load(tmp_path).info.pooling
    assert [pooling.allows(count) for count in (8, 16, 32, 1, 33)] == [True, True, True, False, False]


def test_what_would_make_wrong_vectors_is_refused(tmp_path: Path):
    make_encoder("bert", tmp_path)
    write_pooling(tmp_path, "mean_tokens", other="LSTM")
    with pytest.raises(CheckpointError, match="module 'LSTM' is not supported"):
        load(tmp_path)
    write_pooling(tmp_path, "mean_tokens", "max_tokens")
    with pytest.raises(CheckpointError, match=r"1_Pooling/config.json .*\['max', 'mean'\]: exactly one of cls, max"):
        load(tmp_path)
    assert load(tmp_path, pooling="cls").info.pooling.kind == "cls"
    change_config(tmp_path, auto_map={"AutoModel": "x.Y"})
    with pytest.raises(CheckpointError, match="requires code outside this program"):
        load(tmp_path)


def test_a_classifier_of_several_labels_or_with_missing_weights_is_refused(tmp_path: Path):
    make_encoder("bert", tmp_path / "three", labels=3)
    with pytest.raises(CheckpointError, match="3 labels"):
        load(tmp_path / "three")
    make_encoder("bert", tmp_path / "headless", architectures=["BertForSequenceClassification"], id2label={"0": "x"})
    with pytest.raises(CheckpointError, match="tensor classifier.bias is missing"):
        load(tmp_path / "headless")


SIZES = [
    ("bert", {"num_hidden_layers": 10**9}, "num_hidden_layers: must be a whole number up to 2"),
    ("bert", {"intermediate_size": 10**9}, "intermediate_size: must be a whole number up to 300"),
    ("bert", {"vocab_size": 2**40}, "vocab_size: must be a whole number up to 300"),
    ("bert", {"max_position_embeddings": 10**9}, "max_position_embeddings: must be a whole number up to 300"),
    ("distilbert", {"n_layers": 10**9}, "n_layers: must be a whole number up to 2"),
    ("t5", {"num_layers": 10**9}, "num_layers: must be a whole number up to 2"),
    ("t5", {"d_ff": 10**9}, "d_ff: must be a whole number up to 65536"),
    ("bert", {"hidden_size": "32"}, "hidden_size: must be a whole number"),
    ("bert", {"num_attention_heads": 5}, "attention heads"),
    ("bert", {"hidden_act": "no such"}, "cannot load it"),
]


@pytest.mark.parametrize(("family", "keys", "message"), SIZES, ids=[str(keys) for _, keys, _ in SIZES])
def test_sizes_that_the_files_do_not_have_are_refused_at_once(
    family: str, keys: dict[str, Any], message: str, tmp_path: Path
):
    make_encoder(family, tmp_path)
    change_config(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


# -- the stage


def asked(*lengths: int) -> list[TokenRequest]:
    params = Params(max_tokens=1)
    return [TokenRequest(f"r{i}", 0, np.zeros(n, np.int32), params, i) for i, n in enumerate(lengths)]


def test_batches_hold_no_more_than_the_budget_padding_included():
    def cut(*lengths: int) -> list[list[int]]:
        return [[len(r.token_ids) for r in part] for part in batches(asked(*lengths), 100, 4)]

    assert cut(10, 20, 25, 40) == [[10, 20, 25], [40]]
    assert cut(150, 1, 1, 1, 1, 1) == [[150], [1, 1, 1, 1], [1]]
    assert cut() == []


class Failing:
    """An encoder that fails on every batch with a prompt of 13 tokens."""

    def encode(self, batch: Any) -> Any:
        from millrace.stages.messages import Begun, Pooled

        if any(len(request.token_ids) == 13 for request in batch):
            raise MemoryError("13 tokens are too many")
        return [Pooled(r.first_sequence_id, np.ones(1, np.float32), Begun(r.token_ids, 0)) for r in batch]


@sim_test(seeds=5)
async def test_a_prompt_that_fails_ends_its_request_and_no_other(env: SimEnv):
    from millrace.stages.engine.pooled_requests import pooled_request, read_vectors
    from millrace.stages.engine.wiring import EncoderStages
    from millrace.stages.errors import Failed
    from millrace.stages.messages import Prompt
    from millrace.stages.outputs import ModelInfo

    info = ModelInfo("x", 64, 500, "float32", "cpu", "", (), 0, 16, False, Params(), tasks=frozenset({"embed"}))
    loaded: Any = type("Loaded", (), {"info": info, "encoder": None, "runner": Failing(), "probe": None})
    parts = EncoderStages(EngineConfig(), loaded)
    parts.pipeline.use(env)
    await parts.pipeline.start()

    async def embed(length: int) -> int:
        prompts = [Prompt(token_ids=np.ones(length, np.int32))] * 3
        request = pooled_request(f"r{length}", prompts, PoolingParams(kind="cls"))
        return len(await read_vectors(await parts.pipeline.submit(request)))  # type: ignore[arg-type]

    results = await asyncio.gather(*(embed(length) for length in (5, 13, 40, 6)), return_exceptions=True)
    assert [r if isinstance(r, int) else type(r) for r in results] == [3, Failed, 3, 3]
    assert not parts.exit.live and not parts.intake.admission.num_admitted
    await parts.pipeline.stop()
