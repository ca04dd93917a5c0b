"""Shell completion: what each shell offers, asked of the shells that are installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from millrace.deploy.cli.completion import SHELLS, commands_of
from millrace.deploy.cli.main import main, make_parser


@cache
def script(shell: str) -> str:
    return SHELLS[shell](list(commands_of(make_parser())))


def offered(shell_script: str, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(shlex.quote(word) for word in ("millrace", *words))
    code = (
        f"{shell_script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _millrace; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_offers_commands_flags_and_values() -> None:
    made = script("bash")
    assert {"serve", "bench", "doctor", "completion"} <= set(offered(made, ""))
    assert offered(made, "se") == ["serve"]
    assert set(offered(made, "bench", "")) >= {"latency", "throughput", "serve", "lora"}
    assert offered(made, "serve", "--max-num-b") == ["--max-num-batched-tokens"]
    assert offered(made, "bench", "serve", "--request-r") == ["--request-rate"]
    assert offered(made, "serve", "model", "--kv-cache-dtype", "") == ["auto", "int8", "fp8"]
    assert offered(made, "serve", "--kv-cache-dtype", "=", "f") == ["fp8"]
    assert offered(made, "serve", "mod") == [], "files, by the shell"
    assert offered(made, "completion", "--json") == []


def test_each_script_names_every_command_and_flag() -> None:
    for shell in SHELLS:
        made = script(shell)
        for command in commands_of(make_parser()):
            for flag in command.flags:
                name = flag.name if shell != "fish" else flag.name.lstrip("-")
                assert name in made, (shell, command.words, flag.name)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_parses_in_its_shell(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(script(shell))
    done = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_prints_the_script_and_refuses_other_shells(capsys: Any) -> None:
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == script("fish")
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "choose from" in capsys.readouterr().err
