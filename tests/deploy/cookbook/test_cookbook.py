"""The stages of the cookbook and the template, from packages that pip has installed, over HTTP and WebSocket.

Inline with the scripted engine; in split mode by `millrace serve` with the bundled model.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.deploy.settings.sources import resolve
from millrace.stages.config import EngineConfig
from millrace.stages.messages import Begun, Prompt, Request, StepText
from millrace.stages.params import SamplingParams
from millrace.stages.testing import conformance, scripted_engine
from millrace.stages.testing.conformance_kit import BrokenPromise
from tests.counts import FULL
from tests.deploy.metrics.test_metrics import samples_of
from tests.deploy.running import ROOT, RunningServer
from tests.deploy.sockets import Client

COOKBOOK = ROOT / "deploy" / "cookbook"
KEYS = ("key-of-one", "key-of-two")
ONE, TWO = (hashlib.sha256(key.encode()).hexdigest()[:16] for key in KEYS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which both packages are installed, on `sys.path`."""
    pytest.importorskip("pip")
    pytest.importorskip("setuptools", minversion="70.1")  # an older one builds no wheels without another package
    folder = tmp_path_factory.mktemp("cookbook")
    for name in ("stages", "template"):  # a build writes beside the sources
        shutil.copytree(COOKBOOK / name, folder / name, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site")]
    subprocess.run([*command, str(folder / "stages"), str(folder / "template")], check=True, timeout=120)
    sys.path.insert(0, str(folder / "site"))
    importlib.invalidate_caches()
    yield folder / "site"
    sys.path.remove(str(folder / "site"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("millrace_cookbook", "my_stages")]:
        del sys.modules[name]


def of_package(site: Path, name: str) -> Any:
    module = importlib.import_module(f"millrace_cookbook.{name}")
    assert Path(str(module.__file__)).is_relative_to(site)
    return module


# -- each stage alone


TEXT = "Write to Bob.B+x@mail.example.org, card 4111 1111 1111 1111 or 12 apples; sk-abcdefGHIJKL0123 is TOP secret."
CLEAN = "Write to #, card # or 12 apples; # is # secret."


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 200])
def test_a_redactor_leaks_nothing_wherever_the_pieces_of_a_text_end(site: Path, width: int) -> None:
    redactor = of_package(site, "redactor").Redactor(words=["top", "to bobby"], mask="#")
    pieces = [TEXT[i : i + width] for i in range(0, len(TEXT), width)]
    made, held = "", ""

    redactor._num_matches = type("Counter", (), {"add": lambda self, count: None})()
    for piece in pieces:
        held += piece
        end = redactor.clear(held)
        made += redactor.redacted(held[:end])
        held = held[end:]
        assert made == CLEAN[: len(made)] and len(held) <= 40
    assert made + redactor.redacted(held) == CLEAN


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_redactor_finds_words_of_any_script_in_any_case(site: Path, width: int) -> None:
    text = "L'\u00e9cole, L'\u00c9COLE; na\u00efve bird, NA\u00cfVE BIRD; \u6771\u4eac; mi\u017fs and MISS, \u00e9col"
    words = ["\u00c9cole", "na\u00efve bird", "\u6771\u4eac", "miss", "mis s"]
    made, held, redactor = "", "", of_package(site, "redactor").Redactor(words=words, mask="#")
    redactor._num_matches = type("Counter", (), {"add": lambda self, count: None})()
    for i in range(0, len(text), width):
        held += text[i : i + width]
        end = redactor.clear(held)
        made, held = made + redactor.redacted(held[:end]), held[end:]
    expected = "L'#, L'#; #, #; #; # and #, \u00e9col"
    assert made + redactor.redacted(held) == expected


def test_a_redactor_is_fast_and_leaks_nothing_in_long_text_without_spaces(site: Path) -> None:
    redactor, began_s = of_package(site, "redactor").Redactor(), time.process_time()
    redactor._num_matches = type("Counter", (), {"add": lambda self, count: None})()
    for text in ("a" * 4_000, "a" * 4_000 + " b", "ab@" * 1_300, "a-" * 2_000):
        redactor.clear(text)
    assert time.process_time() - began_s < 0.25  # that of a quadratic search is over 1 s
    secret = "sk-" + "Ab1" * 300
    text, made, held = "x/" * 1_950 + "," + secret + "," + "y/" * 3_000, "", ""
    for i in range(0, len(text), 50):
        held += text[i : i + 50]
        end = redactor.clear(held)
        made, held = made + redactor.redacted(held[:end]), held[end:]
        assert len(held) <= 4_000
    assert made + redactor.redacted(held) == text.replace(secret, "[redacted]")


def step_text(request_id: str, i: int) -> StepText:
    return StepText(i, [i], ["a word "], [7], begun={i: Begun(np.arange(3, dtype=np.int32))})


def request(request_id: str, i: int) -> Request:
    return Request(request_id, (Prompt(text=f"question {i}"),), SamplingParams(), first_sequence_id=i)


@pytest.mark.parametrize("name", ["redactor", "tap", "cache_lookup", "cache_fill"])
def test_each_stage_of_the_cookbook_keeps_the_promises_of_every_stage(site: Path, name: str) -> None:
    if name.startswith("cache"):
        cache = of_package(site, "semantic_cache").semantic_cache
        index = ["cache_lookup", "cache_fill"].index(name)
        conformance(lambda: cache()[index].stage, request if index == 0 else step_text, seeds=1)
    else:
        kind = getattr(of_package(site, name), name.capitalize())
        conformance(kind, step_text, seeds=1)


@pytest.mark.parametrize("name", ["redactor", "tap"])
def test_a_variant_that_leaks_fails_the_kit(site: Path, name: str) -> None:
    kind = getattr(of_package(site, name), name.capitalize())
    leaking = type("Leaking", (kind,), {"ended": lambda self, request_id, cause: None})
    unfinished = lambda request_id, i: StepText(i, [i], ["held"], [7])  # noqa: E731
    with pytest.raises(BrokenPromise, match=r"still holds 'request-\d+' of .*: write ended\(request_id, cause\)"):
        conformance(leaking, unfinished, seeds=1)


def test_a_question_is_like_another_by_its_wording_numbers_and_negations(site: Path) -> None:
    cache = of_package(site, "semantic_cache")

    def found(asked: str, known: str, **others: Any) -> bool:
        answers = cache.Answers(0.75, 10, 100.0)
        answers.keep(cache.question_of(request_of(known)), "an answer", (1,), 0.0)
        return answers.find(cache.question_of(request_of(asked, **others)), others.get("now_s", 50.0)) is not None

    def request_of(text: str, owner: str = "a", now_s: float = 0.0, **params: Any) -> Request:
        return Request("r", (Prompt(text=text),), SamplingParams(**params), owner=owner)

    known = "How do I reset the password of my account?"
    assert found(known, known) and found("how do I reset the password of my account", known)
    assert found("How can I reset the password for my account?", known)
    assert not found("How do I delete my account?", known) and not found(f"{known} not", known)
    assert not found("add 17 and 4 please now", "add 17 and 5 please now")
    assert not found(known, known, owner="b") and not found(known, known, max_tokens=7)
    assert not found(known, known, now_s=101.0) and not found(known, known, seed=3)
    assert not found("translate this text from French to English", "translate this text from English to French")
    assert not found("how much is 3 - 5?", "how much is 3 + 5?") and not found("is it -5 or 1.5", "is it 5 or 1.5")
    assert (
        not found("is it 15", "is it 1.5")
        and not found("I don\u2019t", "I don")
        and found("it don\u2019t", "it don't.")
    )
    answers = cache.Answers(0.9, 2, 100.0)
    for word in ("one", "two", "three"):
        answers.keep(cache.question_of(request_of(word)), word, (), 0.0)
    assert len(answers) == 2 and answers.find(cache.question_of(request_of("one")), 1.0) is None


# -- served


@dataclass
class Served:
    """A server with the three stages."""

    url: str
    http: aiohttp.ClientSession
    raw: str = ""  # the last stream

    def headers(self, key: str) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {key}"}

    async def ask(self, prompt: str, key: str = KEYS[0], **more: Any) -> tuple[str, int, int]:
        """The streamed answer over HTTP, how many chunks it had, and its tokens."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 400, "stream": True} | more
        body["stream_options"] = {"include_usage": True}
        texts, usage = [], {}
        headers = self.headers(key)
        async with self.http.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            self.raw = await response.text()
            for line in self.raw.splitlines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    texts += [choice["text"] for choice in chunk["choices"]]
                    usage = chunk.get("usage") or usage
        return "".join(texts), len(texts), usage["completion_tokens"]

    async def ask_by_socket(self, prompt: str, key: str, **more: Any) -> str:
        address = f"{self.url}/v1/stream"
        async with self.http.ws_connect(address, autoclose=False, headers=self.headers(key)) as socket:
            client = Client(socket)
            await client.create("one", prompt, max_tokens=400, **more)
            await client.receive_until("done", "one")
            return client.text("one")

    async def get(self, path: str) -> str:
        async with self.http.get(self.url + path, headers=self.headers(KEYS[0])) as response:
            assert response.status == 200
            return await response.text()

    async def own_metrics(self) -> dict[str, float]:
        prefix, found = "millrace:stage:", samples_of(await self.get("/metrics"))
        return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


async def check(served: Served, prompt: str, similar: str, secrets: Sequence[str]) -> None:
    """The stages' work over both transports, for two keys."""
    names = [stage["name"] for stage in json.loads(await served.get("/v1/stages"))["stages"]]
    assert names[:2] == ["intake", "cache"]
    if "limit" in names:  # in the first process, on both sides of the step loop
        assert names[2:4] == ["tokenize", "limit"] and names[-6] == "pass"
    assert names[-5:] == ["detokenize", "redactor", "tap", "cache_fill", "exit"]
    answer, num_chunks, num_tokens = await served.ask(prompt)
    assert "[redacted]" in answer and not any(secret in answer for secret in secrets) and num_chunks > 3
    again, _, num_again = await served.ask(similar)
    assert (again, num_again) == (answer, num_tokens)  # from the cache
    assert await served.ask_by_socket(prompt, KEYS[0]) == answer
    own = await served.own_metrics()
    assert own[f'tap:tokens_total{{owner="{ONE}"}}'] == num_tokens and own[f'tap:requests_total{{owner="{ONE}"}}'] == 1
    assert own[f'cache:lookups_total{{owner="{ONE}",result="hit"}}'] == 2
    other = await served.ask_by_socket(prompt, KEYS[1])  # another owner's answers are not for it
    assert not any(secret in other for secret in secrets) and "[redacted]" in other
    every = {"logprobs": 1, "return_token_details": True, "return_token_ids": True}
    asked, _, _ = await served.ask(prompt, KEYS[1], metadata={"cache": "off"}, **every)
    parts = {part for secret in secrets for part in (secret, *secret.split()) if len(part) > 3} - set(asked.split())
    assert not any(secret in asked for secret in secrets) and not any(f'"{part}' in served.raw for part in parts)
    assert '"details"' in served.raw and not re.search(r'"token_ids":\[[^]]*[1-9]', served.raw)
    own = await served.own_metrics()
    assert own[f'tap:requests_total{{owner="{TWO}"}}'] == 2 and own[f'tap:tokens_total{{owner="{TWO}"}}'] > num_tokens
    assert own[f'cache:lookups_total{{owner="{TWO}",result="miss"}}'] == 1 and own["cache_fill:answers{}"] == 2
    assert own[f'tap:ends_total{{cause="finish",owner="{TWO}"}}'] == 2 and own["redactor:matches_total{}"] >= 3


@asynccontextmanager
async def session(url: str) -> AsyncIterator[Served]:
    async with aiohttp.ClientSession() as http:
        yield Served(url, http)


def test_the_three_stages_serve_inline_from_an_installed_package(site: Path) -> None:
    stages = ("redactor@after=detokenize", "semantic_cache,threshold=0.8", "tap@after=detokenize")

    async def main() -> None:
        answer = "Ask bob@example.org or the card 4111 1111 1111 1111, but not 12 others."
        async with (
            Server(ServerConfig(port=0, api_key=KEYS)) as server,
            scripted_engine(answer=answer, stage=stages, max_model_len=600) as engine,
        ):
            server.attach(engine)
            async with session(server.url) as served:
                await check(
                    served, "who knows about it", "Who knows about it?", ["bob@", "example.org", "4111", "1111"]
                )
                body = {"prompt": "a", "use_beam_search": True, "best_of": 2, "temperature": 0}
                headers = served.headers(KEYS[0])
                async with served.http.post(f"{served.url}/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 400 and "not supported with a redactor" in await response.text()
            await server.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="5 s of CPU; with MILLRACE_FULL=1")
def test_the_three_stages_serve_in_split_mode_by_the_command(site: Path, tmp_path: Path) -> None:
    (tmp_path / "millrace.yaml").write_text(
        "mode: split\nthreads: 1\nmax_num_seqs: 4\nport: 0\n"
        "stage:\n"
        "  - {class: redactor, after: detokenize, arguments: {words: [tree house, stronger than], patterns: []}}\n"
        "  - semantic_cache\n"
        "  - {class: tap, after: detokenize}\n"
        "  - limit@after=tokenize,most=10000\n"  # of the template
        "  - tests.stages.engine.own_code:Pass@after=sample\n"
    )
    (tmp_path / "keys").write_text("\n".join(KEYS))
    command = [sys.executable, "-m", "millrace", "serve", "--config", str(tmp_path / "millrace.yaml")]
    command += ["--api-key-file", str(tmp_path / "keys")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
        with RunningServer(command=command) as running:

            async def main() -> None:
                async with session(running.url) as served:
                    await check(served, "Once upon a time", "once upon a time", ["tree house", "stronger than"])

            asyncio.run(asyncio.wait_for(main(), 60))


def test_the_template_passes_its_own_tests_when_it_is_installed(site: Path) -> None:
    found = runpy.run_path(str(site.parent / "template" / "tests" / "test_limit.py"))
    tests = [test for name, test in found.items() if name.startswith("test_")]
    assert len(tests) == 2 and found["Limit"].__module__ == "my_stages.limit"
    for test in tests:
        test()


def test_the_stages_that_the_pages_serve_are_those_of_the_packages(site: Path) -> None:
    pages = [ROOT / "deploy/docs/own-stages.md", *COOKBOOK.rglob("README.md"), *COOKBOOK.rglob("*.py")]
    flags = {flag for page in pages for flag in re.findall(r"--stage (\w[^\s`]*)", page.read_text("utf-8"))}
    assert len(flags) >= 5
    for flag in flags:
        scripted_engine(stage=(flag,))  # raises for one that does not exist or fit
    blocks = re.findall(r"```yaml\n(.*?)```", pages[0].read_text("utf-8"), re.DOTALL)
    for number, block in enumerate(blocks):
        (file := site.parent / f"{number}.yaml").write_text(block)
        scripted_engine(stage=resolve([EngineConfig], {}, {}, file)["stage"].value)
    assert blocks
