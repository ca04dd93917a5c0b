"""Encoders of every architecture that transformers has: its hidden states and scores, alone and in mixed batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.model.checkpoint.model_kind import ENCODERS as KNOWN
from millrace.model.checkpoint.model_kind import is_bidirectional
from millrace.model.encoder.bidirectional import Bidirectional
from millrace.model.encoder.probe import probe
from millrace.model.errors import CheckpointError
from millrace.model.pooling import read_pooling
from millrace.model.sentence_files import read_sentence_files
from millrace.stages.encode.encoder_runner import EncoderRunner
from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.pooling_params import Floats, Kind, PoolingParams
from tests.model.encoder_checkpoints import ENCODERS, MORE_ENCODERS, make_encoder, write_pooling

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = ("cls", "mean", "last")
TOLERANCE = 2e-5
NO_LIMIT = {"mt5", "t5", "umt5", "xlnet"}  # whose positions are relative
PADS_CHANGE_NUMBERS = {"convbert", "fnet", "mobilebert", "nystromformer", "yoso"}  # convolutions and the like


def load(root: Path) -> Bidirectional:
    return Bidirectional.load(root, read_sentence_files(root), CPU)


def texts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, 300, length).astype(np.int32) for length in lengths]


def vectors(model: Bidirectional, root: Path, prompts: list[np.ndarray], *kinds: Kind, **params: Any) -> list[Floats]:
    """What the encode stage makes of the prompts in one batch, each with each pooling."""
    config = read_pooling(root, read_sentence_files(root), model.embedding_size or 1, "mean")
    asked = [
        TokenRequest(
            f"r{place}", 0, ids, SamplingParams(), place, pooling=PoolingParams(kind=kind, **params).complete(config)
        )
        for place, (ids, kind) in enumerate((ids, kind) for ids in prompts for kind in kinds)
    ]
    return [pooled.vector for pooled in EncoderRunner(model, CPU).encode(asked)]


def expected(model: Any, ids: np.ndarray, kind: Kind) -> Floats:
    """transformers' hidden states of a text alone, pooled and of length 1."""
    with torch.inference_mode():
        hidden = model(input_ids=torch.from_numpy(ids)[None].long()).last_hidden_state[0]
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[kind]
    pooled: Floats = torch.nn.functional.normalize(vector, dim=0).numpy()
    return pooled


@pytest.mark.parametrize("family", sorted(ENCODERS | MORE_ENCODERS))
def test_hidden_states_are_transformers_in_a_batch_of_mixed_lengths(family: str, tmp_path: Path):
    right = make_encoder(family, tmp_path)
    assert is_bidirectional(tmp_path)
    model = load(tmp_path)
    assert (model.hidden_size, model.vocab_size) == (32, 300)
    assert model.max_tokens == (4096 if family in NO_LIMIT else 128)
    assert model.allows_padding == (family not in PADS_CHANGE_NUMBERS)
    prompts = texts(1, 9, 2, 33, 9)
    made = iter(vectors(model, tmp_path, prompts, *KINDS))
    for ids in prompts:
        for kind in KINDS:
            assert np.abs(next(made) - expected(right, ids, kind)).max() < TOLERANCE


@pytest.mark.parametrize("family", ["deberta-v2", "eurobert", "gte", "mobilebert", "modernbert", "nomic_bert", "qwen3"])
def test_a_cross_encoders_scores_are_transformers_in_a_batch_of_mixed_lengths(family: str, tmp_path: Path):
    right = make_encoder(family, tmp_path, labels=1)
    model = load(tmp_path)
    prompts = texts(2, 9, 33)
    for ids, made in zip(prompts, vectors(model, tmp_path, prompts, "cls", normalize=False), strict=True):
        with torch.inference_mode():
            logits = right(input_ids=torch.from_numpy(ids)[None].long()).logits[0]
        assert np.abs(made - torch.sigmoid(logits).numpy()).max() < TOLERANCE


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "gemma3_text", "mobilebert", "modernbert", "nystromformer"])
def test_bfloat16_finds_the_same_about_padding(family: str, tmp_path: Path):
    make_encoder(family, tmp_path)
    model = Bidirectional.load(tmp_path, read_sentence_files(tmp_path), CPU, torch.bfloat16)
    assert model.allows_padding == (family not in PADS_CHANGE_NUMBERS)


KINDS_BY_CONFIG = [
    (True, {"model_type": "bert"}),
    (True, {"model_type": "bert", "architectures": ["BertModel"]}),
    (True, {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}),
    (True, {"model_type": "a new one", "architectures": ["NewForMaskedLM"]}),
    (True, {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5EncoderModel"]}),
    (True, {"model_type": "gemma3_text", "use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"]}),
    (True, {"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}}),
    (True, {"model_type": "gemma4_text", "use_bidirectional_attention": "all"}),
    (True, {"model_type": "qwen2", "is_causal": False, "architectures": ["Qwen2ForCausalLM"]}),
    (False, {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}),
    (False, {"model_type": "gemma3_text", "use_bidirectional_attention": None, "is_causal": True}),
    (False, {"model_type": "bert", "is_decoder": True, "architectures": ["BertLMHeadModel"]}),
    (False, {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForCausalLM"]}),
    (False, {"model_type": "mistral", "architectures": ["MistralModel"]}),
    (False, {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}),
    (False, {"model_type": "a new one", "architectures": ["NewModel"]}),
    (False, {"model_type": ["bert"], "architectures": 5, "is_causal": [], "text_config": "bert"}),
]


@pytest.mark.parametrize(
    ("is_encoder", "config"), KINDS_BY_CONFIG, ids=[str(config)[:70] for _, config in KINDS_BY_CONFIG]
)
def test_config_json_says_whether_a_model_is_an_encoder(is_encoder: bool, config: dict[str, Any], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_bidirectional(tmp_path) == is_encoder


def test_t5_saved_by_sentence_transformers_is_served_as_an_encoder(tmp_path: Path):
    right = make_encoder("t5", tmp_path, is_encoder_decoder=True, architectures=["T5Model"])
    assert not is_bidirectional(tmp_path)
    write_pooling(tmp_path, "mean_tokens")
    assert is_bidirectional(tmp_path)
    prompts = texts(5)
    made = vectors(load(tmp_path), tmp_path, prompts, "mean")[0]
    assert np.abs(made - expected(right, prompts[0], "mean")).max() < TOLERANCE


def test_the_encoders_are_those_that_transformers_has_for_masked_tokens():
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    with_decoder = {"bart", "mbart", "mvp"}
    of_pictures = {"modernvbert", "tapas", "ultravbert"}  # or of tables
    of_bytes_or_huge_texts = {"perceiver", "reformer"}
    others = with_decoder | of_pictures | of_bytes_or_huge_texts
    assert set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) - others == KNOWN - {"bert-generation", "xlnet"}


MAMBA = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 300, "state_size": 4, "is_causal": False}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 300}


@pytest.mark.parametrize(
    ("family", "shape", "config", "message"),
    [
        ("mamba", MAMBA, {}, "transformers' MambaModel: its tokens do not attend to later ones"),
        ("bart", BART, {}, "bart has an encoder and a decoder, and no class in transformers is its encoder alone"),
        ("big_bird", {}, {"attention_type": "block_sparse"}, "attention_type = block_sparse: .*set original_full"),
        ("gemma3_text", {}, {"dtype": "float16"}, "numbers beyond float16's range; set dtype = bfloat16 or float32"),
        ("nystromformer", {}, {"segment_means_seq_len": 128}, "NystromformerModel fails on texts of 7 tokens"),
        ("fnet", {}, {"dtype": "bfloat16"}, "Unsupported dtype BFloat16; try dtype = float32"),
        ("bert", {}, {"model_type": "new"}, "model type `new`"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.islower() else "",
)
def test_what_transformers_does_not_compute_rightly_is_refused(
    family: str, shape: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any
):
    if shape:
        monkeypatch.setitem(MORE_ENCODERS, family, shape)
    make_encoder(family, tmp_path, **config)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path):
    make_encoder("bert", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match="adapter_config.json .*adapters are not supported; merge it with peft"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda ids: torch.full((*ids.shape, 4), torch.nan), "not finite in torch.float32"),
        (lambda ids: torch.rand(*ids.shape, 4), "draws at random"),
        (lambda ids: torch.ones(len(ids), 3, 4), r"gives \[3, 4\] for 7 tokens: must be a vector a token"),
    ],
    ids=["not finite", "random", "fewer vectors"],
)
def test_a_trial_run_refuses_a_model_that_gives(made: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        probe(lambda ids, mask: made(ids), "It", 100, 0, 64, torch.float32)
