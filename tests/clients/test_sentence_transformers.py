"""sentence-transformers on the same files, of its newest and of older layouts: equal embeddings, scores and cuts."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.stages import LLM
from millrace.stages.pooling_params import PoolingParams
from tests.model.encoder_checkpoints import make_encoder
from tests.model.tiny_tokenizers import TEXT

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sentence_transformers") is None,
        reason="sentence-transformers is missing: pip install -e '.[clients]'",
    ),
]

TEXTS = ["The Quick brown fox", *TEXT[:2], "a", "cats and dogs by the sea " * 40]
TOLERANCE = 2e-5
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def edit(path: Path, **values: Any) -> None:
    """Sets keys of a JSON file; None removes one."""
    read = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({key: value for key, value in (read | values).items() if value is not None}))


def saved(path: Path, mode: str = "mean", **options: Any) -> Path:
    """A model as the installed sentence-transformers writes it."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    base, made = path / "base", path / "made"
    make_encoder(options.pop("family", "bert"), base)
    parts: list[Any] = [modules.Transformer(str(base)), modules.Pooling(32, mode, options.pop("include_prompt", True))]
    for size, activation in options.pop("dense", ()):
        torch.manual_seed(size)
        parts.append(modules.Dense(parts[-1].get_embedding_dimension(), size, activation_function=activation))
    parts += [modules.Normalize()] if options.pop("normalizes", True) else []
    model = SentenceTransformer(modules=parts, device="cpu", **options)
    model.save(str(made))
    return made


def as_older(made: Path, mode: str, *, folder: str = "", **transformer: Any) -> None:
    """Rewrites the files with the keys, the types and the folders that versions before 5.4 write."""
    modules = json.loads((made / "modules.json").read_text())
    for module in modules:
        module["type"] = "sentence_transformers.models." + module["type"].rpartition(".")[2]
    modules[0]["path"] = folder
    (made / "modules.json").write_text(json.dumps(modules))
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    is_on = {f"pooling_mode_{name}": name.startswith(mode) and len(name) - len(mode) in (0, 6, 7) for name in names}
    old = {"word_embedding_dimension": 32, "include_prompt": True, **is_on}
    (made / "1_Pooling" / "config.json").write_text(json.dumps(old))
    settings = {"max_seq_length": 40, "do_lower_case": False} | transformer
    (made / "sentence_bert_config.json").write_text(json.dumps(settings))
    (made / "config_sentence_transformers.json").write_text(json.dumps({"__version__": {}}))
    if folder:
        (made / folder).mkdir()
        for file in [file for file in made.iterdir() if file.is_file() and file.name != "modules.json"]:
            file.rename(made / folder / file.name)


def new(**options: Any) -> Callable[[Path], Path]:
    return lambda path: saved(path, **options)


def changed(name: str, values: dict[str, Any], **options: Any) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        made = saved(path, **options)
        edit(made / name, **values)
        return made

    return make


def old(mode: str = "mean", *, normalizes: bool = True, **options: Any) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        made = saved(path, mode if mode in MODES else "mean", normalizes=normalizes)
        as_older(made, mode, **options)
        return made

    return make


def dense(*layers: tuple[int, str], **options: Any) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        import torch

        return saved(path, dense=[(size, getattr(torch.nn, name)()) for size, name in layers], **options)

    return make


PROMPTS = {"query": "the query: ", "document": "", "topic": "a topic; "}
MODELS: dict[str, Callable[[Path], Path]] = {
    **{f"new, {mode}": new(mode=mode) for mode in MODES},
    "new, not of length 1": new(normalizes=False),
    "new, RoBERTa": changed("tokenizer_config.json", {"model_max_length": 100}, family="roberta", normalizes=False),
    "new, a default prompt": new(prompts=PROMPTS, default_prompt_name="topic"),
    "new, a prompt left out of the mean": new(prompts=PROMPTS, default_prompt_name="topic", include_prompt=False),
    "new, a prompt left out of cls": new(
        mode="cls", prompts=PROMPTS, default_prompt_name="topic", include_prompt=False, normalizes=False
    ),
    "new, cut to 16 numbers": new(truncate_dim=16),
    "new, a linear layer": dense((24, "Tanh")),
    "new, two linear layers": dense((48, "GELU"), (16, "Identity")),
    "new, as EmbeddingGemma": dense((96, "Identity"), (24, "Identity"), family="gemma3_text", prompts=PROMPTS),
    "new, as Sentence-T5": dense((24, "Identity"), family="t5"),
    **{f"new, {family}": new(family=family) for family in ("eurobert", "gte", "modernbert", "nomic_bert")},
    "new, the tokenizer's length": changed("tokenizer_config.json", {"model_max_length": 24}),
    "new, a length among arguments": changed(
        "sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 12}}}
    ),
    **{f"old, {mode}": old(mode) for mode in MODES},
    "old, not of length 1": old(normalizes=False),
    "old, no mode": old("none"),
    "old, in lower case": old(do_lower_case=True),
    "old, a short length": old(max_seq_length=10),
    "old, a length among arguments": old(max_seq_length=None, tokenizer_args={"model_max_length": 14}),
    "old, in a folder": old("cls", folder="0_Transformer"),
}


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_those_of_sentence_transformers(name: str, tmp_path: Path):
    from sentence_transformers import SentenceTransformer

    folder = MODELS[name](tmp_path)
    right = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        made = np.stack([output.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
        assert np.abs(made - right).max() < TOLERANCE


def test_prompts_are_chosen_by_name_and_by_role(tmp_path: Path):
    from sentence_transformers import SentenceTransformer

    folder = saved(tmp_path, prompts=PROMPTS | {"document": "a document: "})
    theirs = SentenceTransformer(str(folder), device="cpu")
    query, documents = TEXTS[0], TEXTS[1:4]
    right = theirs.similarity(theirs.encode_query(query), theirs.encode_document(documents))[0].tolist()
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        assert [output.score for output in llm.score(query, documents)] == pytest.approx(right, abs=TOLERANCE)
        (made,) = llm.embed([query], PoolingParams(prompt_name="topic"), use_tqdm=False)
        assert np.abs(made.embedding - theirs.encode(query, prompt_name="topic")).max() < TOLERANCE


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_scores_are_the_similarity_that_the_model_names(similarity: str, tmp_path: Path):
    from sentence_transformers import SentenceTransformer

    folder = saved(tmp_path, normalizes=False, similarity_fn_name=similarity)
    theirs = SentenceTransformer(str(folder), device="cpu")
    right = theirs.similarity(theirs.encode(TEXTS[0]), theirs.encode(TEXTS))[0].tolist()
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        scores = [output.score for output in llm.score(TEXTS[0], TEXTS)]
    assert scores == pytest.approx(right, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("layout", ["new", "old", "oldest", "old, no types"])
@pytest.mark.parametrize("activation", ["Sigmoid", "Identity", "Tanh"])
def test_a_cross_encoders_scores_are_those_of_sentence_transformers(layout: str, activation: str, tmp_path: Path):
    import torch
    from sentence_transformers import CrossEncoder

    base, made = tmp_path / "base", tmp_path / "made"
    make_encoder("bert", base, labels=1)
    path = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"
    if layout == "new":
        CrossEncoder(str(base), activation_fn=getattr(torch.nn, activation)(), device="cpu").save(str(made))
    else:
        shutil.copytree(base, made)
        said = {"sentence_transformers": {"activation_fn": path}}
        edit(made / "config.json", **(said if layout != "oldest" else {"sbert_ce_default_activation_function": path}))
    edit(made / "tokenizer_config.json", model_max_length=50)
    if layout == "old, no types":
        edit(made / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[4]), (TEXTS[4], TEXTS[4]), (TEXTS[4], TEXTS[3])]
    right = CrossEncoder(str(made), device="cpu").predict(pairs).tolist()
    with LLM(str(made), dtype="float32", device="cpu") as llm:
        scores = llm.score([query for query, _ in pairs], [document for _, document in pairs])
    assert [output.score for output in scores] == pytest.approx(right, abs=TOLERANCE)
