"""Flags of `vllm serve`: what becomes of the 60 that its documentation puts first, and of its values."""

from __future__ import annotations

import argparse
from functools import cache
from typing import Any

import pytest

from millrace.deploy.cli import main as command_line
from millrace.deploy.cli.other_engines.near_misses import ENGINES
from millrace.deploy.cli.other_engines.rows import Read, Renamed, SoAnyway, Switch, Unsupported
from millrace.deploy.cli.other_engines.vllm_flags import ALIASES, VLLM
from millrace.deploy.config import ServerConfig
from millrace.deploy.settings.sources import build, resolve
from millrace.stages.config import EngineConfig

ACCEPTED: list[tuple[str, dict[str, Any]]] = [  # arguments of vLLM -> the settings that they give
    ("--model m", {"model": "m"}),
    ("--tokenizer t", {"tokenizer": "t"}),
    ("--tokenizer-mode auto", {}),
    ("--revision main", {"revision": "main"}),
    ("--dtype half", {"dtype": "float16"}),
    ("--seed 7", {"seed": 7}),
    ("--max-model-len 8k", {"max_model_len": 8000}),
    ("--max-model-len -1", {"max_model_len": "auto"}),
    ("--quantization awq_marlin", {"quantization": "auto"}),
    ("-q gptq", {"quantization": "auto"}),
    ("--enforce-eager", {"enforce_eager": True}),
    ("--max-logprobs 5", {"max_logprobs": 5}),
    ("--logprobs-mode processed_logprobs", {"logprobs_mode": "processed_logprobs"}),
    ("--served-model-name a b", {"served_model_name": ("a", "b")}),
    ("--generation-config vllm", {"generation_config": "off"}),
    ('--override-generation-config {"temperature":0.2}', {"override_generation_config": '{"temperature":0.2}'}),
    ("--override-generation-config.top_p=0.5", {"override_generation_config": '{"top_p": 0.5}'}),
    ("--runner pooling", {}),
    ("--task generate", {}),
    ("--convert none", {}),
    ("--load-format runai_streamer", {"load_format": "stream"}),
    ("--download-dir d", {"download_dir": "d"}),
    ("--reasoning-parser qwen3", {"reasoning_parser": "qwen3"}),
    ('--structured-outputs-config {"backend":"xgrammar","reasoning_parser":"qwen3"}', {"reasoning_parser": "qwen3"}),
    ("--structured-outputs-config.disable_any_whitespace=False", {}),
    ("--guided-decoding-backend outlines", {}),
    ("-tp 2", {"tensor_parallel_size": 2}),
    ("--tensor_parallel_size=1", {"tensor_parallel_size": 1}),
    ("-pp 2", {"pipeline_parallel_size": 2}),
    ("-dp 2", {"data_parallel_size": 2}),
    ("--distributed-executor-backend mp", {"executor": "process"}),
    ("--distributed-executor-backend ray", {"executor": "ray"}),
    ("--data-parallel-backend mp", {"executor": "auto"}),
    ("--disable-custom-all-reduce", {}),
    ("--block-size 32", {"block_size": 32}),
    ("--gpu-memory-utilization 0.8", {"gpu_memory_utilization": 0.8}),
    ("--kv-cache-memory-bytes 1G", {"kv_cache_bytes": 2**30}),
    ("--num-gpu-blocks-override 99", {"num_gpu_blocks": 99}),
    ("--swap-space 2", {"swap_space": 2.0}),
    ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8"}),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    ("--enable-prefix-caching=False", {"enable_prefix_caching": False}),
    ("--prefix-caching-hash-algo sha256", {}),
    ("--cpu-offload-gb 0", {}),
    ("--enable-lora --max-loras 2", {"enable_lora": True, "max_loras": 2}),
    ('--enable-lora --lora-modules a=/x {"name":"b","path":"/y"}', {"lora_modules": ("a=/x", "b=/y")}),
    ("--max-num-batched-tokens 2K", {"max_num_batched_tokens": 2048}),
    ("--max-num-seqs 64", {"max_num_seqs": 64}),
    ("--scheduling-policy fcfs", {"scheduler": "fifo"}),
    ("--enable-chunked-prefill true", {"enable_chunked_prefill": True}),
    ("--async-scheduling", {"async_scheduling": True}),
    (
        '--speculative-config {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}',
        {"speculation": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    ),
    ("--speculative-config.method ngram", {"speculation": "ngram"}),
    ("-O3", {}),
    ("--optimization-level 0", {"enforce_eager": True}),
    ("--decode-context-parallel-size 1 --mamba-cache-dtype auto", {}),
    ('--compilation-config {"cudagraph_mode":"NONE"}', {"enforce_eager": True}),
    ("--host 127.0.0.1 --port 9", {"host": "127.0.0.1", "port": 9}),
    ("--uvicorn-log-level trace", {"log_level": "debug"}),
    ("--disable-log-requests", {"log_requests": False}),
    ("--no-enable-log-requests", {"log_requests": False}),
    ("--enable-log-requests", {"log_requests": True}),
    ("--max-log-len 80", {"log_prompts": 80}),
    ("--disable-log-stats", {"stats_interval_s": 0.0}),
    ('--allowed-origins ["https://a.b"]', {"cors_allow_origin": ("https://a.b",)}),
    ('--allowed-methods ["*"]', {}),
    ("--api-key k l", {"api_key": ("k", "l")}),
    ("--ssl-certfile c --ssl-keyfile k", {"ssl_certfile": "c", "ssl_keyfile": "k"}),
    ("--root-path /v", {"root_path": "/v"}),
    ("--chat-template t.jinja", {"chat_template": "t.jinja"}),
    ("--chat-template-content-format openai", {"chat_template_content_format": "openai"}),
    (
        '--default-chat-template-kwargs {"enable_thinking":false}',
        {"default_chat_template_kwargs": '{"enable_thinking":false}'},
    ),
    ("--enable-auto-tool-choice --tool-call-parser hermes", {"tool_call_parser": "hermes"}),
    ("--disable-fastapi-docs", {"disable_docs": True}),
    ("--disable-frontend-multiprocessing", {"mode": "inline"}),
    ("--otlp-traces-endpoint http://c:4318/v1/traces", {"otlp_traces_endpoint": "http://c:4318/v1/traces"}),
    ('--limit-mm-per-prompt {"image":0}', {}),
    ("--no-trust-remote-code", {}),
    ("--trust_remote_code=False", {}),
    ("--preemption-mode recompute", {"swap_space": 0.0}),
    ("--enable-prompt-tokens-details", {}),
]

REFUSED = [  # arguments -> what is told
    ("--stream-interval 10", "--stream-interval 10: each token is sent as it comes; leave it out"),
    ('--speculative-config {"model":"draft"}', "--speculative-config: a draft model is not supported"),
    ("-dp 4 --data-parallel-size-local 2", "write --data-parallel-size N alone"),
    ("--enable-dbo", "a step is one batch"),
    ("--trust-remote-code", "--trust-remote-code: code of a checkpoint never runs"),
    ('--hf-overrides {"a":1}', "change it in a copy of the checkpoint's folder"),
    ("--rope-scaling {}", "change it in a copy of the checkpoint's folder"),
    ('--kv-transfer-config {"kv_connector":"NixlConnector"}', "blocks do not travel between servers"),
    ("--cpu-offload-gb 4", "--cpu-offload-gb 4: all weights stay on the device"),
    ('--speculative-config {"method":"eagle3"}', "method eagle3 is not supported: only n-gram drafts are"),
    (
        '--speculative-config {"method":"ngram","k":1}',
        "k is not supported: with ngram, keys are",
    ),
    ("--speculative-config ngram", '--speculative-config: must be a JSON object, not "ngram"'),
    ('--structured-outputs-config {"disable_any_whitespace":true}', "with each request instead"),
    ('--allowed-headers ["X-A"]', "only ['*'] is supported"),
    ("--allow-credentials", "no route reads cookies"),
    ("--middleware m", "--stage package.module:Class@after=STAGE serves a stage of your own"),
    ("--limit-mm-per-prompt.image 2", "images, audio and video are not supported"),
    ("--tokenizer-mode", "argument --tokenizer-mode: expected one argument"),
    ("--tokenizer-mode mistral", "--tokenizer-mode mistral: only auto is supported"),
    ("--enable-chunked-prefill=maybe", "must be true or false"),
    ("--lora-modules {}", 'must be name=path, or {"name": ..., "path": ...}'),
    ("--max-num-seqs 1.5", "invalid int value: '1.5'"),
    ("--max-num-seqs 1.0001k", "invalid int value: '1.0001k'"),
]

DOCUMENTED = (
    "model tokenizer tokenizer-mode trust-remote-code dtype seed revision max-model-len quantization enforce-eager "
    "max-logprobs logprobs-mode served-model-name generation-config override-generation-config hf-overrides "
    "rope-scaling runner task load-format download-dir reasoning-parser structured-outputs-config "
    "tensor-parallel-size pipeline-parallel-size data-parallel-size enable-expert-parallel "
    "distributed-executor-backend block-size gpu-memory-utilization kv-cache-memory-bytes swap-space kv-cache-dtype "
    "num-gpu-blocks-override enable-prefix-caching cpu-offload-gb enable-lora max-loras max-lora-rank lora-modules "
    "max-num-batched-tokens max-num-seqs scheduling-policy enable-chunked-prefill speculative-config "
    "kv-transfer-config compilation-config limit-mm-per-prompt host port uvicorn-log-level allowed-origins api-key "
    "ssl-certfile chat-template chat-template-content-format disable-fastapi-docs enable-auto-tool-choice "
    "tool-call-parser enable-log-requests disable-log-requests disable-log-stats otlp-traces-endpoint "
)


@cache
def parser() -> argparse.ArgumentParser:
    return command_line.make_parser()


def own_flags() -> set[str]:
    """The flags of `serve`."""
    (commands,) = parser()._subparsers._group_actions  # type: ignore[union-attr]
    return set(commands.choices["serve"]._option_string_actions)  # type: ignore[index, call-overload]


def parsed(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["serve", "m", *arguments])


def changed(arguments: str) -> dict[str, Any]:
    """The settings that are not the defaults."""
    options = parsed(*arguments.split())
    settings = resolve((EngineConfig, ServerConfig), vars(options), {}, None)
    for kind in (EngineConfig, ServerConfig):
        build(kind, settings)
    return {name: setting.value for name, setting in settings.items() if setting.source.startswith("flag")}


@pytest.mark.parametrize(("arguments", "settings"), ACCEPTED)
def test_a_flag_of_vllm_gives_its_setting(arguments: str, settings: dict[str, Any]) -> None:
    assert {"model": "m", **changed(arguments)}.items() >= settings.items()


@pytest.mark.parametrize(("arguments", "told"), REFUSED)
def test_what_has_no_equal_is_refused_with_the_next_step(capsys: Any, arguments: str, told: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*arguments.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "millrace serve: error: " in error and told in error.replace("\n", " ")


def test_sixty_documented_flags_are_accepted_or_refused_with_a_reason() -> None:
    own = own_flags()
    flags = [f"--{name}" for name in DOCUMENTED.split()]
    assert len(set(flags)) >= 60
    assert [flag for flag in flags if flag not in own and flag not in VLLM] == []


def test_every_row_leads_to_flags_of_ours_and_says_why_not() -> None:
    own = own_flags()
    for flag, row in VLLM.items():
        assert flag not in own, f"{flag}: the command has it by now; remove the row"
        match row:
            case Renamed(ours):
                assert ours in own, flag
            case Switch(on, off):
                assert {part for part in (*on, *(off or ())) if part.startswith("--")} <= own, flag
            case SoAnyway(why, _, otherwise):
                assert why and not otherwise.endswith("."), flag
            case Unsupported(reason):
                assert len(reason) > 20 and not reason.endswith("."), flag
            case Read():
                pass
    assert all(flag in VLLM or flag in own for flag in ALIASES.values())


def test_each_accepted_flag_is_told_once_and_ours_are_not() -> None:
    notes = parsed("--disable-log-stats", "--tokenizer-mode", "auto", "--port", "1", "--load-format", "hf").notes
    assert [(note.flag, note.ours, note.reason) for note in notes] == [
        ("--disable-log-stats", "--stats-interval-s 0", ""),
        ("--tokenizer-mode auto", "", "fast tokenizers alone are read"),
        ("--load-format hf", "--load-format auto", ""),
    ]


def test_a_model_behind_a_flag_with_several_values_stays_the_model() -> None:
    options = parser().parse_args(["serve", "--served-model-name", "a", "org/model"])
    assert (options.served_model_name, options.model) == (["a"], "org/model")


def test_a_command_without_the_setting_says_so(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "throughput", "--disable-log-stats"])
    assert "is --stats-interval-s here, which this command does not take" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--n-gpu-layers", "99"], "--n-gpu-layers is llama.cpp's: the whole model is on --device; leave it out"),
        (["-hf", "a/b:Q4_K_M"], "-hf is llama.cpp's: give the Hub id first"),
        (["-ngl", "99"], "-ngl is llama.cpp's: the whole model is on --device"),
        (["--ctx_size=4096"], "--ctx-size is llama.cpp's: write --max-model-len N"),
        (["--mem-fraction-static", "0.8"], "--mem-fraction-static is SGLang's: write --gpu-memory-utilization X"),
        (["--model-id", "x"], "--model-id is TGI's: give the model first"),
        (["--num-ctx", "4096"], "--num-ctx is Ollama's: write --max-model-len N"),
    ],
)
def test_a_flag_of_another_engine_is_recognised(capsys: Any, arguments: list[str], told: str) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert told in capsys.readouterr().err


def test_each_flag_of_another_engine_has_a_line_without_its_value(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parsed("-ngl", "99", "--ctx-size", "4096", "--flash-attn=on", "--colour", "red", "-t", "8")
    lines = capsys.readouterr().err.splitlines()[1:]
    assert lines[0] == "millrace serve: error: unrecognized arguments: --colour red"
    assert [line.partition(" is ")[0] for line in lines[1:]] == ["  -ngl", "  --ctx-size", "  --flash-attn", "  -t"]


@pytest.mark.parametrize(("command", "right"), [("run", "millrace chat --url"), ("ps", "GET /v1/models")])
def test_a_command_of_another_engine_is_recognised(capsys: Any, command: str, right: str) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([command, "llama3"])
    error = capsys.readouterr().err
    assert f"millrace has no {command}: " in error and right in error


def test_hints_are_for_flags_that_the_command_does_not_have() -> None:
    own = own_flags()
    for engine, flags in ENGINES.items():
        assert [flag for flag in flags if flag in own] == [], engine
