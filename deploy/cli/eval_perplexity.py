"""`millrace eval-perplexity MODEL TEXT`: how well a model predicts a text, alone or against another model."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tqdm import tqdm

from ...runtime.env.env import LiveEnv
from ...runtime.env.log import configure
from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ...stages.evaluation.perplexity import Evaluation, TextScore, evaluate
from ...stages.evaluation.window_scorer import WindowScorer
from ...stages.evaluation.windows import TokenizedText
from ..config import ServerConfig
from ..settings.sources import parse


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command."""
    configure(server_config.log_format, server_config.log_level)
    if options.against is None and options.against_set:
        raise ConfigError("--against-set: is for the model of --against, which is not given")
    if options.num_tokens is not None and options.num_tokens < 2:
        raise ConfigError(f"--num-tokens {options.num_tokens}: must be at least 2, one of them to be predicted")
    text = _read(options.text)
    env = LiveEnv(engine_config.seed)
    try:
        result, models = _evaluate(options, engine_config, text, env)
    finally:
        asyncio.run(env.aclose())
    figures = as_json(result, models)
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(figures) + b"\n")
    else:
        print("\n".join(_lines(figures)))
    return 0


def _evaluate(
    options: argparse.Namespace, config: EngineConfig, text: str, env: LiveEnv
) -> tuple[Evaluation, list[WindowScorer]]:
    scorer = WindowScorer.load(config, env, options.context_length)
    tokens = TokenizedText.read(scorer.tokenizer, text, options.num_tokens)
    reference, length = None, scorer.max_length
    if options.against is not None:
        changes = dict(_assignment(one) for one in options.against_set or ())
        reference = WindowScorer.load(replace(config, model=options.against, **changes), env, options.context_length)
        length = min(length, reference.max_length)
        _check_same_ids(tokens, TokenizedText.read(reference.tokenizer, text, options.num_tokens), options)
    length = options.context_length or length
    stride = options.stride if options.stride is not None else max(1, length // 2)
    with tqdm(total=tokens.num_scored, unit=" tokens", disable=None, leave=False) as bar:
        result = evaluate(scorer, tokens, length, stride, reference, bar.update, env.now)
    return result, [scorer] if reference is None else [scorer, reference]


def as_json(result: Evaluation, models: list[WindowScorer]) -> dict[str, Any]:
    """All figures, with models, windows and backends."""
    figures: dict[str, Any] = {
        "context_length": result.context_length,
        "stride": result.stride,
        "num_tokens": result.model.num_tokens,
        "num_bytes": result.model.num_bytes,
        "seconds": round(result.seconds, 3),
        "tokens_per_s": round(result.tokens_per_s, 1),
        "model": _of_model(models[0], result.model),
    }
    if result.reference is not None and result.against is not None:
        figures["reference"] = _of_model(models[1], result.reference)
        figures["against"] = asdict(result.against)
    return figures


def _of_model(scorer: WindowScorer, score: TextScore) -> dict[str, Any]:
    info = scorer.info
    return {
        "model": info.model_id,
        "backend": info.attention_backend,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
        "perplexity": score.perplexity,
        "perplexity_stderr": score.perplexity_stderr,
        "mean_nll": score.mean_nll,
        "bits_per_byte": score.bits_per_byte,
    }


def _lines(figures: Mapping[str, Any]) -> list[str]:
    length, stride = figures["context_length"], figures["stride"]
    lines = [
        f"windows     {length} tokens, {stride} apart: each token once, all but the first {length} tokens behind at "
        f"least {length - stride}",
        f"text        {figures['num_tokens']} tokens scored, of {figures['num_bytes']} bytes",
        *_model_lines("model", figures["model"]),
    ]
    if "reference" in figures:
        against = figures["against"]
        lines += _model_lines("reference", figures["reference"])
        lines.append(
            f"KL          {against['mean_kl']:.3g} nats a token, 99 % below {against['p99_kl']:.3g}, "
            f"at most {against['max_kl']:.3g}"
        )
        lines.append(f"top 1       {against['top1_agreement']:.4%} of tokens the same")
    lines.append(f"speed       {figures['tokens_per_s']:.1f} tokens/s")
    return lines


def _model_lines(role: str, model: Mapping[str, Any]) -> list[str]:
    kept = model["dtype"] if model["quantization"] is None else f"{model['dtype']} with {model['quantization']} weights"
    return [
        f"{role:<12}{model['model']}, {model['backend']}, {kept}, cache {model['kv_cache_dtype']}",
        f"perplexity  {model['perplexity']:.4f} +- {model['perplexity_stderr']:.4f} a token, "
        f"{model['bits_per_byte']:.4f} bits a byte",
    ]


def _check_same_ids(tokens: TokenizedText, others: TokenizedText, options: argparse.Namespace) -> None:
    for one, two in ((tokens.before, others.before), (tokens.token_ids, others.token_ids)):
        if not np.array_equal(one, two):
            count = f"{len(tokens.token_ids)} tokens, and to {options.model} {len(others.token_ids)}"
            raise ConfigError(
                f"--against {options.against}: the text is other tokens to it ({count}): predictions can only be "
                "compared between models with the same tokenizer"
            )


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if name not in EngineConfig.__dataclass_fields__ or not equals or name == "model":
        raise ConfigError(f"--against-set {text}: must be NAME=VALUE, with the name of an engine setting, as dtype")
    return name, parse(EngineConfig, name, value)


def _read(name: str) -> str:
    """The text of a file, or of stdin for "-". Raises `ConfigError`."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}; name a file of text, or - for stdin") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is no UTF-8 text: byte {error.start} is {error.reason}") from None
