"""The parts of a model that handle text: tokenizer, chat template, pooling, the checkpoint's defaults. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...model.checkpoint import hub
from ...model.checkpoint.generation_defaults import GenerationDefaults
from ...model.checkpoint.tokenizer_size import check_tokenizer_file, check_tokens
from ...model.errors import shown
from ...model.pooling import PoolingConfig, read_decoder_pooling
from ...model.sentence_files import PoolingKind, SentenceFiles, read_sentence_files
from ...model.spec import DecoderSpec
from ...model.text.chat_template import ChatTemplate
from ...model.text.detokenizer import TextTable
from ...model.text.tokenizer import Tokenizer
from ...runtime.env.limits import give_back_freed_memory
from ...runtime.env.log import get_logger
from ...runtime.startup.phases import Phases
from ..config import EngineConfig, json_object
from ..errors import ConfigError
from ..tokenize.prompt_encoder import ModelEncoder
from ..tokenize.yes_no import YesNoPrompt, is_named, missing_tokens

log = get_logger("millrace.stages")


@dataclass(frozen=True, slots=True, eq=False)
class TextParts:
    """The parts of a model that handle text, and the defaults that are read with them."""

    tokenizer: Tokenizer
    encoder: ModelEncoder
    table: TextTable
    defaults: GenerationDefaults
    pooling: PoolingConfig
    has_trained_pooling: bool


def read_text(config: EngineConfig, root: Path, shape: DecoderSpec, model_id: str, phases: Phases) -> TextParts:
    """Reads tokenizer, chat template and defaults.

    Runs on a thread of its own, while weights are loaded.
    """
    with phases("tokenizer"):
        source = _tokenizer_folder(config, root)
        check_tokenizer_file(source, shape.vocab_size)
        files = read_sentence_files(root)
        tokenizer = Tokenizer.read(source, lower_case=files.lower_case)
        if tokenizer.sources != ("tokenizer.json",):
            log.info("tokenizer.converted", files=list(tokenizer.sources))
        check_tokens(source, len(tokenizer), shape.vocab_size)
        template = ChatTemplate.read(source, tokenizer, config.chat_template)
        if template is not None:
            variables = json_object("default_chat_template_kwargs", config.default_chat_template_kwargs)
            template.configure(config.chat_template_content_format, variables)
        log.info("chat_template.chosen", **_origins(template))
        yes_no = _yes_no_prompt(config, root, shape, model_id, files, tokenizer)
        encoder = ModelEncoder(tokenizer, template, model_id, yes_no=yes_no)
        overrides = json_object("override_generation_config", config.override_generation_config)
        is_applied = config.generation_config != "off"
        defaults = GenerationDefaults.read(root, shape, overrides, is_applied=is_applied)
        pooling = read_decoder_pooling(root, files, shape.hidden_size, configured_pooling(config))
        if len(tokenizer) > shape.vocab_size:
            log.warning("tokenizer.larger_than_model", num_tokens=len(tokenizer), vocab_size=shape.vocab_size)
        is_known = configured_pooling(config) is not None or files.is_present
        parts = TextParts(tokenizer, encoder, TextTable(tokenizer), defaults, pooling, is_known)
        give_back_freed_memory()  # while a tokenizer is made it takes twice what it keeps
        return parts


def _tokenizer_folder(config: EngineConfig, root: Path) -> Path:
    """The folder of the tokenizer's files; a Hub id's are downloaded, its weights are not."""
    if config.tokenizer is None or config.tokenizer == config.model:
        return root
    folder = hub.resolve_tokenizer(
        config.tokenizer, Path(config.download_dir) if config.download_dir else None, config.offline
    )
    log.info("tokenizer.chosen", source=config.tokenizer)
    return folder


def _yes_no_prompt(
    config: EngineConfig, root: Path, shape: DecoderSpec, model_id: str, files: SentenceFiles, tokenizer: Tokenizer
) -> YesNoPrompt | None:
    """The prompt of a Qwen3-Reranker: of a qwen3 model with this name, or where `pooling` or modules.json says so."""
    is_told = config.pooling == "yes_no"
    if config.pooling not in ("auto", "yes_no"):
        return None
    missing = missing_tokens(tokenizer)
    if is_told and (missing or not shape.head.exists):
        lacks = f"no token {shown(missing[0])!r}" if missing else "no output layer"
        raise ConfigError(f"pooling = yes_no: is for Qwen3-Reranker checkpoints, and {root} has {lacks}")
    is_able = not missing and shape.head.exists and (is_told or (shape.family == "qwen3" and shape.layers != ()))
    prompt = YesNoPrompt(tokenizer) if is_able else None
    if is_told or (files.score_tokens is None and is_named(model_id)):
        return prompt
    if files.score_tokens is None:
        return None
    if prompt is None or files.score_tokens != prompt.token_ids:
        raise ConfigError(
            f"modules.json ({root}): LogitScore with true_token_id, false_token_id = {files.score_tokens}: only those "
            'of Qwen3-Reranker, its tokens "yes" and "no", are supported; start with pooling = last to serve the model '
            "without scores"
        )
    return prompt


def _origins(template: ChatTemplate | None) -> dict[str, Any]:
    """Where the chat templates are from, for the log."""
    if template is None:
        return {"source": None}
    with_tools = {} if template.for_tools is template else {"source_with_tools": template.for_tools.origin}
    return {"source": template.origin} | with_tools


def configured_pooling(config: EngineConfig) -> PoolingKind | None:
    """The configured pooling of embeddings, which overrides the checkpoint's; None if none is."""
    return None if config.pooling == "auto" or config.pooling == "yes_no" else config.pooling
