"""Options of `millrace bench` and `eval-perplexity`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .shared_options import LOGGING, add_common, add_engine_flags, usage

EVALUATION = frozenset(  # settings that may change a model's predictions, or are needed to load it
    {"revision", "download_dir", "offline", "allow_links_outside", "model_impl", "load_format", "dtype", "seed"}
    | {
        "merge_adapter",
        "quantization",
        "device",
        "attention_backend",
        "deterministic",
        "threads",
        "enforce_eager",
        "tilings",
    }
    | {"block_size", "kv_cache_dtype", "gpu_memory_utilization"}
)


def add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", usage=usage("bench latency|throughput|serve|lora"), help="run a benchmark")
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)

    latency = kinds.add_parser("latency", usage=usage("bench latency"), help="latency of one batch, in this process")
    load = _add_load(latency, input_len=32, output_len=128)
    load.add_argument("--batch-size", type=int, metavar="N", default=8, help="prompts per batch (default: 8)")
    load.add_argument("--num-iters", type=int, metavar="N", default=30, help="measured batches (default: 30)")
    load.add_argument("--num-iters-warmup", type=int, metavar="N", default=10, help="warm-up (default: 10)")
    latency.set_defaults(dataset_path=None, random_range_ratio=0.0)

    throughput = kinds.add_parser("throughput", usage=usage("bench throughput"), help="throughput, in this process")
    _add_many(_add_load(throughput, input_len=128, output_len=128))
    for command in (latency, throughput):
        command.add_argument("--model", default=argparse.SUPPRESS, help="folder or Hub id; none: the bundled model")
        add_engine_flags(command, LOGGING)

    serve = kinds.add_parser("serve", usage=usage("bench serve"), help="latency and throughput of a running server")
    load = _add_load(serve, input_len=128, output_len=128)
    _add_many(load)
    _add_clients(load)
    serve.add_argument("--model", default=argparse.SUPPRESS, help="model name; none: the server's first")
    add_engine_flags(serve, LOGGING | {"api_key"}, of_engine=frozenset({"seed"}))

    text = "what LoRA adapters add to a step, in this process"
    lora = kinds.add_parser("lora", usage=usage("bench lora"), help=text)
    load = _add_load(lora, input_len=16, output_len=64)
    text = "rows of a step and adapters among them; may be repeated (default: 1/1 8/8 32/1 32/8 32/32)"
    load.add_argument("--mix", action="append", metavar="ROWS/ADAPTERS", help=text)
    load.add_argument("--rank", type=int, metavar="N", default=16, help="of the adapters (default: 16)")
    text = "measured batches of each mix, with and without adapters in turns (default: 8)"
    load.add_argument("--num-iters", type=int, metavar="N", default=8, help=text)
    lora.add_argument("--model", default=argparse.SUPPRESS, help="folder or Hub id; none: the bundled model")
    add_engine_flags(lora, LOGGING)


def add_eval_perplexity(commands: Any) -> None:
    text = "perplexity of a text, and how far a model's predictions are from another's"
    evaluate = commands.add_parser("eval-perplexity", usage=usage("eval-perplexity MODEL TEXT"), help=text)
    evaluate.add_argument("model", metavar="MODEL", help="folder, GGUF file or Hub id of a model; demo: the bundled")
    evaluate.add_argument("text", metavar="TEXT", help="file of UTF-8 text; -: stdin")
    how = evaluate.add_argument_group("evaluation")
    text = "tokens of a window (default: 2048, or the model's most if that is less)"
    how.add_argument("--context-length", type=int, metavar="N", help=text)
    text = "tokens between windows, so that all but the first have N less than a window before them (default: half)"
    how.add_argument("--stride", type=int, metavar="N", help=text)
    how.add_argument("--num-tokens", type=int, metavar="N", help="use only the first N tokens of the text")
    text = "reference with the same tokens: print KL(MODEL2 || MODEL) and how often both find the same token likeliest"
    how.add_argument("--against", metavar="MODEL2", help=text)
    text = "engine setting of MODEL2, in place of MODEL's, such as dtype=float32; may be repeated"
    how.add_argument("--against-set", action="append", metavar="NAME=VALUE", help=text)
    how.add_argument("--json", action="store_true", help="print one JSON object")
    add_common(evaluate)
    add_engine_flags(evaluate, LOGGING, of_engine=EVALUATION)


def _add_load(command: argparse.ArgumentParser, *, input_len: int, output_len: int) -> Any:
    load = command.add_argument_group("load")
    text = f"tokens per random prompt (default: {input_len})"
    load.add_argument("--input-len", "--random-input-len", type=int, metavar="N", default=input_len, help=text)
    text = f"tokens per answer (default: {output_len})"
    load.add_argument("--output-len", "--random-output-len", type=int, metavar="N", default=output_len, help=text)
    result = command.add_argument_group("result")
    result.add_argument("--save-result", action="store_true", help="also write the results to a JSON file")
    result.add_argument("--result-dir", metavar="FOLDER", help="folder of this file (default: the current one)")
    result.add_argument("--result-filename", metavar="FILE", help="name of this file (default: includes the date)")
    add_common(command)
    return load


def _add_many(load: Any) -> None:
    load.add_argument("--num-prompts", type=int, metavar="N", default=1000, help="number of requests (default: 1000)")
    text = "lengths vary by this share in both directions, 0 to 1 (default: 0)"
    load.add_argument("--random-range-ratio", type=float, metavar="X", default=0.0, help=text)
    text = 'file of JSON lines like {"prompt": "...", "output_tokens": 20}, used instead of random prompts'
    load.add_argument("--dataset-path", type=Path, metavar="FILE", help=text)


def _add_clients(load: Any) -> None:
    text = "URL of the server (default: http://127.0.0.1:8000)"
    load.add_argument("--base-url", "--url", metavar="URL", default="http://127.0.0.1:8000", help=text)
    text = "/v1/completions (default), or /v1/chat/completions with --dataset-path"
    load.add_argument("--endpoint", metavar="PATH", default="/v1/completions", help=text)
    text = "requests per second, a Poisson process (default: inf, all at once)"
    load.add_argument("--request-rate", type=float, metavar="X", default=float("inf"), help=text)
    load.add_argument("--max-concurrency", type=int, metavar="N", help="concurrent requests (default: no limit)")
    text = "goodput limits in ms, such as ttft:500 tpot:50 e2el:5000"
    load.add_argument("--goodput", nargs="+", metavar="NAME:MS", help=text)
    text = "generate answers to their full length (default: only with random prompts)"
    load.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help=text)
