"""Sources of settings, and their precedence."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from millrace.deploy.cli.main import main
from millrace.deploy.config import ServerConfig
from millrace.deploy.settings.flags import add_flags
from millrace.deploy.settings.sources import build, resolve, show
from millrace.deploy.settings.values import whole_number
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError

KINDS = (EngineConfig, ServerConfig)


def settle(flags=(), environment=(), file=None):
    parser = argparse.ArgumentParser()
    add_flags(parser, KINDS)
    return resolve(KINDS, vars(parser.parse_args(list(flags))), dict(environment), file)


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("port: 1\nblock-size: 32\nmax_num_seqs: 7\n")
    settings = settle(["--port", "3"], {"MILLRACE_PORT": "2", "MILLRACE_BLOCK_SIZE": "64"}, file)
    names = ("port", "block_size", "max_num_seqs", "host")
    found = {name: (settings[name].value, settings[name].source) for name in names}
    assert found == {
        "port": (3, "flag --port"),
        "block_size": (64, "environment MILLRACE_BLOCK_SIZE"),
        "max_num_seqs": (7, f"file {file}"),
        "host": ("127.0.0.1", "default"),
    }


def test_each_source_gives_values_of_the_fields_type(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("gpu_memory_utilization: 1\nserved_model_name: a\noffline: true\n")
    environment = {"MILLRACE_API_KEY": "k1,k2", "MILLRACE_ENABLE_CHUNKED_PREFILL": "false", "MILLRACE_THREADS": "3"}
    settings = settle(["--dtype", "float32"], environment, file)
    config, server = build(EngineConfig, settings), build(ServerConfig, settings)
    assert (config.gpu_memory_utilization, config.offline, config.threads) == (1.0, True, 3)
    assert (config.enable_chunked_prefill, config.dtype) == (False, "float32")
    assert (server.served_model_name, server.api_key) == (("a",), ("k1", "k2"))


def test_numbers_take_units_and_json_settings_a_mapping_in_every_source(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("max_num_seqs: 2K\noverride_generation_config: {top_k: 3}\n")
    settings = settle(["--max-model-len", "1.5k"], {"MILLRACE_KV_CACHE_BYTES": "3Gi"}, file)
    config = build(EngineConfig, settings)
    assert (config.max_num_seqs, config.max_model_len, config.kv_cache_bytes) == (2048, 1500, 3 * 2**30)
    assert config.override_generation_config == '{"top_k": 3}'
    assert [whole_number(text) for text in ("7", "1m", "1M", "0.5k", "2T")] == [7, 10**6, 2**20, 500, 2**41]


@pytest.mark.parametrize(
    ("environment", "text", "named"),
    [
        ({"MILLRACE_PORT": "x"}, "", "MILLRACE_PORT = 'x'"),
        ({"MILLRACE_DTYPE": "int3"}, "", "MILLRACE_DTYPE = 'int3'"),
        ({"MILLRACE_OFFLINE": "maybe"}, "", "MILLRACE_OFFLINE = 'maybe'"),
        ({"MILLRACE_MAX_MODEL_LEN": "long"}, "", "MILLRACE_MAX_MODEL_LEN = 'long': must be a whole number or auto"),
        ({}, "max_model_len: long\n", "max_model_len = 'long': must be of type int or auto"),
        ({}, "max_model_len: 1.5\n", "max_model_len = 1.5: must be of type int or auto"),
        ({}, "port: x\n", "port = 'x'"),
        ({}, "port: true\n", "port = True"),
        ({}, "a: 1\n", "m.yaml:1: unknown setting a; --help lists all settings"),
        ({}, "prot: 1\n", "m.yaml:1: unknown setting prot (did you mean port?)"),
        ({}, "<<: {seed: 1,\n  prt: 2}\n", "m.yaml:2: unknown setting prt (did you mean port?)"),
        ({}, "<<: &a {seed: 1}\nport: 1\nport: 2\n", "m.yaml:3: port is in line 2 already"),
        ({}, "&a\n<<: *a\nport: 1\n", "not valid YAML"),
        ({}, "<<: 1\n", "not valid YAML: expected a mapping or list of mappings for merging, but found scalar"),
        ({}, "port: 1\nmax-num-seq: 1\n", "m.yaml:2: unknown setting max_num_seq (did you mean max_num_seqs?)"),
        ({}, "port: 1\nseed: 1\nport: 2\n", "m.yaml:3: port is in line 1 already"),
        ({}, "seed: 1\nport: x\n", "m.yaml:2: port = 'x'"),
        ({}, "port: 1\nseed: 2: 3\n", "m.yaml:2:8: not valid YAML: mapping values are not allowed here"),
        ({"MILLRACE_MAX_NUM_SEQ": "1"}, "", "no such setting (did you mean MILLRACE_MAX_NUM_SEQS?)"),
        ({}, "- 1\n", "must be a mapping"),
        ({}, "a: [\n", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, environment, text, named):
    file = tmp_path / "m.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settle([], environment, file)
    assert named in str(caught.value)


def test_a_file_merges_mappings_as_yaml_does(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("seed: 3\n<<: [&first {max-num-seqs: 4, port: 1}, {port: 2, host: '::1'}]\nmax_num_seqs: 5\n")
    settings = settle([], {}, file)
    assert [settings[name].value for name in ("seed", "max_num_seqs", "port", "host")] == [3, 5, 1, "::1"]


def test_a_variable_of_four_letters_must_be_a_settings_name_to_be_refused():
    assert settle([], {"MILLRACE_POST": "x"})["port"].source == "default"


def test_a_context_is_a_number_or_the_word_auto_from_every_source(tmp_path):
    file = tmp_path / "m.yaml"
    for text, value in (("auto", "auto"), ("64", 64)):
        file.write_text(f"max_model_len: {text}\n")
        for settings in (
            settle(["--max-model-len", text]),
            settle([], {"MILLRACE_MAX_MODEL_LEN": text}),
            settle([], {}, file),
        ):
            assert build(EngineConfig, settings).max_model_len == value
            assert yaml.safe_load(show(settings))["max_model_len"] == value
    for wrong in ("AUTO", "0", "-1"):
        with pytest.raises((ConfigError, SystemExit)):
            build(EngineConfig, settle(["--max-model-len", wrong]))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none.yaml"):
        settle([], {}, tmp_path / "none.yaml")


def test_what_is_shown_can_be_read_back_but_for_keys(tmp_path):
    settings = settle(
        ["--api-key", "secret-1", "--admin-key", "secret-2", "--served-model-name", "a", "--max-model-len", "64"]
    )
    shown = show(settings)
    assert "secret" not in shown
    assert "max_model_len: 64  # flag --max-model-len" in shown
    read = yaml.safe_load(shown)
    assert set(read) == set(settings) and read["served_model_name"] == ["a"] and read["model"] is None


def test_other_addresses_than_loopback_need_a_key_or_a_word():
    with pytest.raises(ConfigError, match="--api-key, or --allow-no-key"):
        ServerConfig(host="0.0.0.0")
    for config, is_private in (
        (ServerConfig(host="0.0.0.0", api_key=("k",)), False),
        (ServerConfig(host="0.0.0.0", allow_no_key=True), False),
        (ServerConfig(host="::1"), True),
        (ServerConfig(host="localhost"), True),
        (ServerConfig(host="0.0.0.0", uds="/tmp/s"), True),
    ):
        assert config.is_private is is_private


def test_an_admin_key_is_given_as_an_api_key_is_and_is_none_of_them(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("admin_key: [k1, k2]\n")
    flags = ["--admin-key", "k1", "--admin-key", "k2"]
    for settings in (settle(flags), settle([], {"MILLRACE_ADMIN_KEY": "k1,k2"}), settle([], {}, file)):
        assert build(ServerConfig, settings).admin_key == ("k1", "k2")
    for wrong in ({"admin_key": ("",)}, {"admin_key": ("é",)}, {"admin_key": ("k", "same"), "api_key": ("same",)}):
        with pytest.raises(ConfigError, match="^admin_key: ") as caught:
            ServerConfig(**wrong)
        assert "same" not in str(caught.value)
    with pytest.raises(ConfigError, match="--api-key, or --allow-no-key"):
        ServerConfig(host="0.0.0.0", admin_key=("k",))


@pytest.mark.parametrize("kind", [EngineConfig, ServerConfig])
def test_a_variable_that_is_set_but_empty_counts_as_not_set(kind):
    environment = {f"MILLRACE_{field.name.upper()}": "" for field in dataclasses.fields(kind)}
    assert build(kind, settle([], environment)) == kind()
    settings = settle([], {"MILLRACE_PORT": "0"} | environment if kind is EngineConfig else environment)
    assert {setting.source for name, setting in settings.items() if name != "port"} == {"default"}


def test_white_space_around_a_key_is_removed_and_noted(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text('admin_key: " a "\n')
    settings = settle(["--api-key", "k1\n"], {"MILLRACE_ADMIN_KEY": "a1,\ta2\r\n"}, file)
    config = build(ServerConfig, settings)
    assert (config.api_key, config.admin_key) == (("k1",), ("a1", "a2"))
    assert [name for name, setting in settings.items() if setting.is_trimmed] == ["api_key", "admin_key"]
    assert build(ServerConfig, settle([], {}, file)).admin_key == ("a",)
    assert not any(setting.is_trimmed for setting in settle(["--api-key", "k1"]).values())


@pytest.mark.parametrize("key", ["", " ", "k\n", "\tk", "a\nb", "a\x7f", "é"])
def test_a_key_that_no_client_could_send_is_refused(key):
    for name in ("api_key", "admin_key"):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            ServerConfig(**{name: (key,)})
    with pytest.raises(ConfigError, match="^api_key: "):
        build(ServerConfig, settle(["--api-key", " \n"]))


def test_print_config_prints_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setenv("MILLRACE_MAX_NUM_SEQS", "9")
    assert main(["serve", "some/model", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "model: 'some/model'  # command line" in printed
    assert "max_num_seqs: 9  # environment MILLRACE_MAX_NUM_SEQS" in printed


@pytest.mark.parametrize(
    "arguments",
    [["--port", "99999"], ["--block-size", "24"], ["--host", "0.0.0.0"], ["--config", "/none.yaml"]],
)
def test_a_wrong_setting_is_one_line_and_exit_code_3(capsys, arguments):
    assert main(["serve", *arguments]) == 3
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("millrace: ") and told.err.count("\n") == 1


def test_a_flag_that_is_neither_number_nor_word_says_what_it_may_be(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--max-model-len", "long"])
    assert "argument --max-model-len: invalid int or auto value: 'long'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["serve", "--tokenizer-work", "1"], "arguments: --tokenizer-work (did you mean --tokenizer-workers?)"),
        (["serve", "--max-model-length=9"], "--max-model-length=9 (did you mean --max-model-len?)"),
        (["top", "--ones"], "millrace top: error: unrecognized arguments: --ones (did you mean --once?)"),
        (["bench", "latenzy"], "(did you mean latency?)"),
        (["srve"], "(did you mean serve?)"),
    ],
)
def test_a_flag_is_not_abbreviated_and_a_near_miss_is_named(capsys, arguments, error):
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err.endswith(f"{error}\n")


@pytest.mark.parametrize(
    ("short", "value"), [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32")]
)
def test_short_names_of_data_types_are_taken_from_every_source(tmp_path, capsys, short, value):
    file = tmp_path / "m.yaml"
    file.write_text(f"dtype: {short}\n")
    assert settle([], {"MILLRACE_DTYPE": short})["dtype"].value == value
    assert settle([], {}, file)["dtype"].value == value
    assert main(["serve", "--dtype", short, "--print-config"]) == 0
    assert f"dtype: '{value}'  # flag --dtype" in capsys.readouterr().out


def test_underscores_in_flags_are_read_as_hyphens(capsys):
    assert main(["serve", "--max_num_seqs=3", "--print-config"]) == 0
    assert "max_num_seqs: 3  # flag --max-num-seqs" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["a"], ["--model", "a"], ["a", "--model", "a"]])
def test_a_model_is_named_with_or_without_its_flag(capsys, arguments):
    assert main(["serve", *arguments, "--print-config"]) == 0
    assert "model: 'a'" in capsys.readouterr().out
    assert main(["serve", *arguments, "--model", "b", "--print-config"]) == (0 if arguments[0] == "--model" else 3)


def test_variables_that_kubernetes_sets_for_a_service_are_no_settings():
    variables = {"MILLRACE_PORT": "tcp://10.0.0.1:80", "MILLRACE_SERVICE_PORT": "80", "MILLRACE_PORT_80_TCP_PORT": "80"}
    assert settle([], variables) == settle([], {})


def test_wrong_usage_is_exit_code_2(capsys):
    for arguments in (["serve", "--no-such-flag"], ["serve", "--dtype", "int3"], [], ["nothing"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_a_stage_of_ones_own_may_be_a_mapping_in_the_file_and_is_shown_as_it_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "millrace.yaml"
    mapping = "{class: 'a.b:C', after: tokenize, arguments: {words: [x, 'y,z']}}"
    file.write_text(f"stage:\n  - {mapping}\n  - d:E@before=exit\n")
    settings = resolve([EngineConfig], {}, {}, file)
    config = build(EngineConfig, settings)
    assert [json.loads(config.stage[0])["arguments"], config.stage[1]] == [{"words": ["x", "y,z"]}, "d:E@before=exit"]
    file.write_text(show({"stage": settings["stage"]}))
    assert resolve([EngineConfig], {}, {}, file)["stage"].value == config.stage
    file.write_text("stage: {class: a.b:C, afterr: tokenize}")
    with pytest.raises(ConfigError, match="unknown key afterr"):
        build(EngineConfig, resolve([EngineConfig], {}, {}, file))
