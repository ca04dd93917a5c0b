"""The commands: output, exit codes and help."""

from __future__ import annotations

import os
import pty
import re
import resource
import signal
import subprocess
import sys

import pytest

from millrace.deploy.cli.main import main
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.deploy.running import RunningServer, heeds_interrupts

GREEDY = ["--temperature", "0", "--max-tokens", "12"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millrace.deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_help_is_grouped_and_comes_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("serve", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    # processor time: what else runs on this machine is not ours to answer for
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    for group in ("model:", "device:", "batch:", "KV cache:", "listening:", "security:"):
        assert f"\n{group}\n" in done.stdout


@pytest.mark.slow
def test_help_imports_nothing_heavy():
    code = (
        "import sys; from millrace.deploy.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print([n for n in ('torch', 'aiohttp', 'numpy', 'transformers', 'pydantic') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[]\n")


def test_the_version_is_told(capfd):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capfd.readouterr().out.startswith("millrace 0.")


def test_complete_prints_the_prompt_and_what_follows(server: RunningServer, capfd):
    asked = {"prompt": "Once upon", "temperature": 0, "max_tokens": 12}
    text = server.post("/v1/completions", asked).json["choices"][0]["text"]
    assert main(["complete", "Once upon", "--url", server.url, "--stats", *GREEDY]) == 0
    told = capfd.readouterr()
    assert told.out == f"Once upon{text}\n"
    assert "prompt 9 tokens, answer" in told.err and "TTFT" in told.err and "tokens/s" in told.err


def test_chat_answers_each_line_and_remembers(server: RunningServer, capfd, monkeypatch, tmp_path):
    (tmp_path / "lines").write_text("Hello\n\nAnd then?")
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert main(["chat", "--url", server.url + "/v1", "--system", "Be brief", *GREEDY]) == 0
    told = capfd.readouterr().out

    def ask(messages):
        asked = {"messages": messages, "temperature": 0, "max_tokens": 12}
        return server.post("/v1/chat/completions", asked).json["choices"][0]["message"]["content"]

    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    first = ask(messages)
    second = ask([*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}])
    assert told == f"{first}\n{second}\n"


@pytest.mark.slow
def test_ctrl_c_ends_a_chat_that_waits_for_a_line(server: RunningServer):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "millrace", "chat", "--url", server.url]
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heeds_interrupts
    ) as chat:
        try:
            assert chat.stdout is not None and chat.stdout.read(2) == b"> "
            chat.send_signal(signal.SIGINT)
            assert chat.wait(60.0) == 130
            assert chat.stderr is not None and chat.stderr.read() == b""
        finally:
            chat.kill()
            os.close(theirs)
            os.close(ours)


def test_what_the_server_refuses_is_told_and_exit_code_1(server: RunningServer, capfd):
    assert main(["complete", "x", "--url", server.url, "--model", "other"]) == 1
    assert "'other': not served here" in capfd.readouterr().err
    assert main(["complete", "x", "--url", "http://127.0.0.1:1"]) == 1
    assert "does not answer: connection refused: nothing listens there; start it with" in capfd.readouterr().err


WITH_URL = {
    "complete": ["complete", "x"],
    "chat": ["chat"],
    "run-batch": ["run-batch", "-i", "/dev/null", "-o", "-"],
    "bench serve": ["bench", "serve", "--num-prompts", "1"],
    "top": ["top", "--once"],
    "health": ["health"],
    "trace": ["trace", "-o", "/dev/null", "--admin-key", "k"],
}


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://a", "http://", "http://a:99999", "http://[::1"])
@pytest.mark.parametrize("command", WITH_URL.values(), ids=WITH_URL)
def test_every_command_refuses_what_is_no_url_with_one_that_is(command: list[str], url: str, capfd):
    assert main([*command, "--url", url]) == 3
    said = capfd.readouterr().err
    assert f"url {url}: must be like http://127.0.0.1:8000" in said and said.count("\n") == 1


WITH_OUTPUT = {
    "trace": (["trace", "--admin-key", "k", "--url", "http://127.0.0.1:1"], "--output-file"),
    "simulate": (["simulate", "--trace", "none", "--cost-model", "none"], "--save-result"),
    "cost model": (["simulate", "--trace", "none", "--cost-model", "none"], "--save-cost-model"),
    "chaos": (["chaos"], "--save-history"),
    "bench": (["bench", "serve", "--save-result", "--url", "http://127.0.0.1:1"], "--result-filename"),
}


@pytest.mark.parametrize(("command", "flag"), WITH_OUTPUT.values(), ids=WITH_OUTPUT)
def test_an_output_that_cannot_be_written_is_told_before_the_work(command: list[str], flag: str, capfd, tmp_path):
    (tmp_path / "file").touch()
    for place, problem in ((tmp_path, "is a folder"), (tmp_path / "file" / "x", "is a file|File exists")):
        assert main([*command, flag, str(place)]) == 3
        said = capfd.readouterr().err
        assert re.search(problem, said) and str(place.parent) in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["health", "--wait-s", "0"], "--wait-s 0: must be above 0"),
        (["simulate", "--max-requests", "0"], "--max-requests 0: must be at least 1"),
        (["simulate", "--scale-times", "-1"], "--scale-times -1: must be a number, 0 or more"),
        (["simulate", "--scale-lengths", "nan"], "--scale-lengths nan: must be a number, 0 or more"),
        (["eval-perplexity", "demo", "none", "--num-tokens", "-4"], "--num-tokens -4: must be at least 2"),
        (["chaos", "--log-dir", "/etc/hostname"], "--log-dir /etc/hostname: is a file, and must be a folder"),
    ],
)
def test_a_number_or_folder_of_no_use_is_refused(command: list[str], problem: str, capfd):
    needed = ["--trace", "none", "--cost-model", "none"] if command[0] == "simulate" else []
    assert main([*command, *needed]) == 3
    assert problem in capfd.readouterr().err


def test_collect_env_is_one_block_with_versions_and_no_secret(monkeypatch, capfd):
    monkeypatch.setenv("MILLRACE_API_KEY", "canary-key")
    monkeypatch.setenv("MILLRACE_PORT", "8123")
    monkeypatch.setenv("HOME_OF_A_CANARY", "canary-home")
    assert main(["collect-env"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("```\n") and out.endswith("\n```\n")
    for line in (
        r"python: 3\.\d+",
        r"cpu: .+, \d+ of \d+ cores",
        r"memory: [\d.]+ GiB",
        r"torch: 2\.\d+",
        "MILLRACE_PORT: 8123",
    ):
        assert re.search(f"^{line}", out, re.MULTILINE), line
    assert "MILLRACE_API_KEY: ***" in out and "canary" not in out


@pytest.mark.parametrize("flags", [["--temperature", "5"], ["--max-tokens", "600"]], ids=["at once", "by the prompt"])
def test_an_engine_names_the_flag_that_it_refuses(flags, monkeypatch, capfd):
    monkeypatch.setattr("millrace.stages.engine.engine.Engine", lambda config: scripted_engine(answer="ok"))
    assert main(["complete", "Once", "--model", "none", *flags]) == 1
    said = capfd.readouterr().err
    assert f"{flags[0]} = {flags[1]}" in said and "max_tokens" not in said


@pytest.mark.parametrize("command", [["engine", "--listen", ":0"], ["run-batch", "-i", "-", "-o", "-"], ["chat"]])
def test_a_command_that_does_not_listen_ignores_the_host_of_a_container(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLRACE_HOST", "0.0.0.0")
    assert main([*command, "--print-config"]) == 0
    assert main(["serve", "--print-config"]) == 3
    assert "host = 0.0.0.0 is reachable from other machines" in capsys.readouterr().err
