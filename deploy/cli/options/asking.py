"""Options of `millrace complete`, `chat` and `run-batch`."""

from __future__ import annotations

import argparse
from typing import Any

from .argument_parser import ArgumentParser
from .shared_options import LOGGING, add_common, add_engine_flags, usage

BATCH = frozenset(
    {"api_key", "served_model_name", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"}
    | {"strict_fields", "enable_request_metrics", "max_body_bytes"}
)


def add_complete(commands: Any) -> None:
    complete = commands.add_parser("complete", usage=usage("complete PROMPT"), help="complete a text")
    complete.add_argument("prompt", metavar="PROMPT", help="text to complete")
    _add_client(complete)


def add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", usage=usage("chat"), help="chat with a model")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_client(chat)


def add_run_batch(commands: Any) -> None:
    batch = commands.add_parser(
        "run-batch", usage=usage("run-batch -i IN.jsonl -o OUT.jsonl"), help="answer a file of requests, one per line"
    )
    files = batch.add_argument_group("batch")
    files.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests in OpenAI's batch format; -: stdin"
    )
    text = "answers in order of completion; an existing file is overwritten; -: stdout"
    files.add_argument("-o", "--output-file", required=True, metavar="FILE", help=text)
    files.add_argument(
        "--url", "--base-url", help="use this server instead of loading a model, e.g. http://127.0.0.1:8000"
    )
    text = "maximum concurrent requests, which also bounds the lines in memory (default: 128)"
    files.add_argument("--max-concurrency", type=int, metavar="N", default=128, help=text)
    add_common(batch)
    batch.add_argument("--model", default=argparse.SUPPRESS, help="folder or Hub id; none: the bundled model")
    add_engine_flags(batch, LOGGING | BATCH)


def _add_client(command: ArgumentParser) -> None:
    group = command.add_argument_group("request")
    group.add_argument(
        "--url", "--base-url", help="use this server instead of loading a model, e.g. http://127.0.0.1:8000"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="maximum tokens (default: 256)", default=256)
    group.add_argument("--temperature", type=float, metavar="X", help="0: greedy (default: the model's)")
    group.add_argument("--top-p", type=float, metavar="X", help="nucleus sampling (default: the model's)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be repeated")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="seed for a reproducible answer")
    group.add_argument("--stats", action="store_true", help="print time to first token and tokens/s to stderr")
    add_common(command)
    command.add_argument("--model", default=argparse.SUPPRESS, help="folder, Hub id, or model name with --url")
    add_engine_flags(command, LOGGING | {"api_key"})
