"""`millrace eval-perplexity`: what it prints, and what it refuses."""

import json
import re

import pytest

from millrace.deploy.cli.main import main

ON_CPU = ("--device", "cpu", "--threads", "1")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a girl named Lily.\n" * 3)
    return str(path)


def test_eval_perplexity_prints_figures_with_windows_and_backend(text, capfd):
    assert main(["eval-perplexity", "demo", text, *ON_CPU, "--context-length", "21"]) == 0
    out = capfd.readouterr().out
    assert "windows     21 tokens, 10 apart: each token once" in out and "at least 11\n" in out
    assert "model       demo, native, bfloat16, cache bfloat16\n" in out
    assert re.search(r"^perplexity  \d+\.\d{4} \+- \d+\.\d{4} a token, \d\.\d{4} bits a byte$", out, re.MULTILINE)
    assert re.search(r"^speed       [\d.]+ tokens/s$", out, re.MULTILINE)


def test_eval_perplexity_compares_two_dtypes_as_json(text, capfd):
    against = ("--against", "demo", "--against-set", "dtype=float32", "--json", "--num-tokens", "20")
    assert main(["eval-perplexity", "demo", text, *ON_CPU, *against]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["model"]["dtype"], found["reference"]["dtype"]) == ("bfloat16", "float32")
    assert found["num_tokens"] == 19
    assert found["model"]["perplexity"] == pytest.approx(found["reference"]["perplexity"], rel=0.02)
    assert 0 < found["against"]["mean_kl"] <= found["against"]["p99_kl"] <= found["against"]["max_kl"] < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["TEXT.missing"], "cannot be read: No such file"),
        (["TEXT", "--against-set", "dtype=float32"], "--against-set: is for the model of --against"),
        (["TEXT", "--against", "demo", "--against-set", "dtipe=float32"], "--against-set dtipe=float32: must be NAME="),
        (["TEXT", "--context-length", "8", "--stride", "9"], "stride = 9: must be at least 1, and at most 7"),
    ],
)
def test_eval_perplexity_says_what_would_be_right(text, options, message, capfd):
    options = [option.replace("TEXT", text) for option in options]
    assert main(["eval-perplexity", "demo", *options, *ON_CPU]) == 3
    assert message in capfd.readouterr().err
